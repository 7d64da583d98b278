"""Holds the duty of a GPU from outside: a thread that pauses it a few hundred times a second while a cap asks for it.

::

    this thread   launch     launch     launch            nothing while nothing has to wait
    GPU           ■■■■■■ ▒▒▒ ■■■■■■ ▒▒▒ ■■■■■■ ▒▒▒        ▒ a pause: ratio x the work before it (pause_kernel.py)

The program's own threads do nothing for a pause, and the pacer need not know their streams. Waits for tokens of
Tessera's own kernels are in the kernels' stream instead (token_stream.py).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ScheduleError
from .controller import PaceCommand
from .pacer import LIMIT_S, HostPacer, PaceCounts, Pacer

if TYPE_CHECKING:
    from .pause_kernel import PauseKernel
    from .token_stream import TokenStream

_log = logging.getLogger("tessera")

# The longest pause; the next pauses make up for the rest. A collective that waits for this GPU gives up only after
# minutes.
LONGEST_PAUSE_S = 0.5
# Below this ratio, pauses are launched at fixed intervals.
SHORT = 0.5
# Slices differ by up to this share; their waits differ alike, so that the duty is the same.
VARIED = 0.1
# LOOK_S: interval of looks at a pause that is not over yet. LATE_S: the most by which a slice is expected to be late.
LOOK_S = 0.0003
LATE_S = 0.001
# The longest that the first call of a schedule waits for the kernel; compiling it takes 0.1 s.
LOADED_S = 2.0


def vary_slice(slice_s: float, rng: random.Random) -> float:
    """Return a slice of another length each time; the mean length is `slice_s`.

    Equal slices stay in step with the sampling of a sensor: for the length of a window, it then shows more or less
    power than is drawn.
    """
    return slice_s * rng.uniform(1.0 - VARIED, 1.0 + VARIED)


class GpuPacer:
    """The pauses of one CUDA device, and the waits for tokens in its streams."""

    where = "by pauses of the GPU"

    def __init__(
        self, device: int, make_kernel: Callable[[int], PauseKernel] | None = None, *, most_work_s: float = LIMIT_S
    ) -> None:
        self.device, self._most_work_s = device, most_work_s
        self.failure: str | None = None
        self._make_kernel = make_kernel
        self._kernel: PauseKernel | None = None
        self._command = PaceCommand()
        self._wake = threading.Condition()
        self._launched = 0
        self._worked_s = 0.0
        self._random = random.Random()
        self._tokens: TokenStream | None = None
        self._spends = self._stopping = False
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tessera-pause-{device}", daemon=True)
        self._thread.start()

    def obey(self, command: PaceCommand) -> None:
        if self._tokens is not None:
            self._tokens.obey(command if self._spends else PaceCommand())
        with self._wake:
            woken = command.ratio > 0 and self._command.ratio == 0
            self._command = PaceCommand() if self._spends else command
            if self._kernel is not None:
                self._kernel.set_ratio(self._command.ratio)
            if woken:
                self._wake.notify_all()

    def wait_until_loaded(self) -> None:
        """Wait until the kernel is loaded. Called before the first work, beside which loading would have to wait."""
        self._loaded.wait(LOADED_S)

    def pace_by_tokens(self, wanted: bool) -> None:
        if wanted and self._tokens is None:
            import torch

            from .token_stream import TokenStream

            self._tokens = TokenStream(torch.device("cuda", self.device))
        self._spends = wanted

    def spend(self, tokens: int, *, restart: bool = False) -> None:
        if self._tokens is not None:
            self._tokens.spend(tokens, restart=restart)

    def counts(self) -> PaceCounts:
        kernel, tokens = self._kernel, self._tokens
        paused = PaceCounts() if kernel is None else PaceCounts(*kernel.read_counts())
        spent = PaceCounts() if tokens is None else tokens.counts()
        return replace(paused + spent, ended_s=spent.ended_s)

    def count_queued(self) -> int:
        return 0 if self._tokens is None else self._tokens.count_queued()

    def stop(self) -> None:
        """Pause nothing from now on, and end the thread."""
        with self._wake:
            self._stopping = True
            self._command = PaceCommand()
            if self._kernel is not None:
                self._kernel.set_ratio(0.0)
            self._wake.notify_all()
        self._thread.join(timeout=0.5)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._kernel = self._load()
            self._loaded.set()
            while self._wait_for_command():
                self._pause(self._kernel)
        # no kernel for this GPU, or an earlier CUDA error of the program: its work goes on
        except ScheduleError as exc:
            self.failure = f"gpu{self.device}: the power cap is not held: {exc}"
            _log.warning("%s", self.failure)
        finally:
            self._loaded.set()

    def _load(self) -> PauseKernel:
        """Compile and load the kernel; on this thread, because that takes tens of milliseconds."""
        if self._make_kernel is not None:
            kernel = self._make_kernel(self.device)
        else:
            from .pause_kernel import PauseKernel

            kernel = PauseKernel(self.device)
        kernel.set_limits(busy_s=self._most_work_s, longest_s=LONGEST_PAUSE_S)
        kernel.make_current()
        self._launch(kernel)  # the first launch loads the code; without a ratio it ends at once
        kernel.set_ratio(self._command.ratio)
        return kernel

    def _wait_for_command(self) -> bool:
        """Wait until something has to wait; return False at the end."""
        with self._wake:
            while not self._stopping and self._command.ratio == 0:
                self._wake.wait()
        return not self._stopping

    def _pause(self, kernel: PauseKernel) -> None:
        """Let work run for a slice, then pause it. The kernel times both, so a late launch makes a longer pause.

        Launches at fixed intervals are good for short pauses only. If pauses are longer than the work, one pause that
        is too long makes the next too short, and the next too long again. Then the slice begins when the pause is over.
        """
        command = self._command
        slice_s = vary_slice(command.slice_s, self._random)
        if command.ratio < SHORT:
            time.sleep(slice_s * (1.0 + command.ratio))
            if kernel.read_counts()[0] >= self._launched:
                self._launch(kernel)
            return
        time.sleep(slice_s)
        before_s = kernel.read_counts()[2]
        self._launch(kernel)
        time.sleep(command.ratio * self._worked_s)
        while kernel.read_counts()[0] < self._launched and self._command.ratio > 0:
            time.sleep(LOOK_S)
        # The next pause is sized by how long a slice really took, including the launch and the last blocks.
        worked_s = (kernel.read_counts()[2] - before_s) / command.ratio
        self._worked_s = min(worked_s, slice_s + LATE_S)

    def _launch(self, kernel: PauseKernel) -> None:
        kernel.launch()
        self._launched += 1


def make_pacer(device: int, *, most_work_s: float = LIMIT_S) -> Pacer:
    """Return the pacer of a CUDA device; -1 is the host.

    A pause of a GPU counts at most `most_work_s` of work before it.
    """
    if device < 0:
        return HostPacer()
    import torch

    version: Any = torch.version
    if version.hip is not None:
        raise ScheduleError(
            "AMD GPUs cannot be paused yet",
            why="the kernel is for NVIDIA's",
            fix='cap_policy="driver" with permission to set the power limit',
        )
    pacer = GpuPacer(device, most_work_s=most_work_s)
    pacer.wait_until_loaded()
    return pacer
