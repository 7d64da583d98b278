"""Runs Kineto through torch.profiler: starts and stops it, lets it write a file, and reads that as a `Timeline`.

torch's own `events()` and `key_averages()` are never called: they make a Python object of every event (16 s for
139 000). `export_chrome_trace` writes the same events from C++ in a fraction of a second, and our reader makes columns
of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..errors import MeasurementError
from ..notes import Note
from ..record import CODE
from ..stream import names
from ..timeline.columns import NONE, Timeline, keep_rows
from ..timeline.stream_names import KEY, key
from .cupti_library import find_loaded
from .flight_record import FlightCall, group_sizes, name_groups, read_calls
from .options import ON_DEVICE, SessionOptions
from .torch_hooks import ModuleRanges, has_compiled

if TYPE_CHECKING:
    from .kernel_tracing import KernelTracing

# Kineto writes CUPTI's stream id, which is neither torch's id nor the driver's pointer. CUPTI converts a pointer to it
# (cuptiGetStreamIdEx) if Kineto has loaded CUPTI; otherwise the driver does (cuStreamGetId, from CUDA 12 on), with the
# same result. Both are called through ctypes. If neither answers, streams are shown by their numbers.
Ask = Callable[[int], int | None]
"""Converts the pointer of a stream of the current device to its id."""


def name_streams(*, known: Mapping[tuple[int, int], str] | None = None, ask: Ask | None = None) -> dict[str, str]:
    """Return the names of our streams by the keys of `timeline.stream_names`. Call it while Kineto and CUPTI run."""
    handles = names() if known is None else known
    torch: Any = sys.modules.get("torch")
    if not handles or (ask is None and (torch is None or not torch.cuda.is_initialized())):
        return {}
    names_by_key: dict[str, str] = {}
    for (device, handle), name in handles.items():
        if ask is not None:
            number = ask(handle)
        else:
            with torch.cuda.device(device):
                number = stream_id(handle)
        if number is not None:
            names_by_key[key(device, number)] = name
    return names_by_key


def add_stream_names(timeline: Timeline, names_by_key: Mapping[str, str]) -> None:
    """Put names of streams into a timeline's meta; call it while the devices still have Kineto's numbers."""
    if names_by_key:
        timeline.meta[KEY] = {**(timeline.meta.get(KEY) or {}), **names_by_key}


def renumber_streams(timeline: Timeline, numbers: list[int]) -> None:
    """Change the device numbers in stream names: device i becomes `numbers[i]`."""
    names_by_key = timeline.meta.get(KEY)
    if not names_by_key:
        return
    moved: dict[str, str] = {}
    for text, name in names_by_key.items():
        device, stream = map(int, text.split("/"))
        moved[key(numbers[device] if device < len(numbers) else device, stream)] = name
    timeline.meta[KEY] = moved


def stream_id(handle: int) -> int | None:
    """Return the id that a trace has for the stream of a pointer; None if neither CUPTI nor the driver tells."""
    for way in (by_cupti, by_driver):
        number = way(handle)
        if number is not None:
            return number
    return None


def by_cupti(handle: int) -> int | None:
    """Return CUPTI's id of a stream of the current context."""
    library = _find_loaded("libcupti")
    if library is None or not hasattr(library, "cuptiGetStreamIdEx"):
        return None
    number = ctypes.c_uint32()
    # NULL: the current context; 0: not the per-thread default streams
    failed = library.cuptiGetStreamIdEx(None, ctypes.c_void_p(handle), ctypes.c_uint8(0), ctypes.byref(number))
    return None if failed else int(number.value)


def by_driver(handle: int) -> int | None:
    """Return the driver's id of a stream."""
    library = _find_loaded("libcuda")
    if library is None or not hasattr(library, "cuStreamGetId"):
        return None
    number = ctypes.c_ulonglong()
    failed = library.cuStreamGetId(ctypes.c_void_p(handle), ctypes.byref(number))
    return None if failed else int(number.value)


@functools.lru_cache(maxsize=8)
def _open(path: str) -> Any:
    try:
        return ctypes.CDLL(path)
    except OSError:
        return None


def _find_loaded(name: str) -> Any:
    path = find_loaded(name)
    return _open(path) if path else None


_LEFT_OUT = {"gpu": ("kernel",), "memcpy": ("memcpy", "memset"), "collective": ("collective",)}


def torch_installed() -> bool:
    """Return whether torch is installed."""
    return "torch" in sys.modules or importlib.util.find_spec("torch") is not None


class Finished:
    """A traced window that has ended. Kineto holds its events until `timeline` has read them."""

    process_ends: ClassVar[bool] = False
    """Set when the process is about to end. Events are then not freed one by one: the end of the process frees them."""

    def __init__(
        self,
        prof: Any,
        options: SessionOptions,
        streams: Mapping[str, str],
        calls: Sequence[FlightCall],
        sizes: dict[str, int] | None,
    ) -> None:
        self._prof = prof
        self._options = options
        self._streams = streams
        self._calls, self._group_sizes = calls, sizes

    def timeline(self) -> Timeline:
        """Export and read the events, then free them. Exporting holds the interpreter's lock, 2 to 3 us per event."""
        from ..timeline import kineto

        prof, self._prof = self._prof, None
        with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
            path = Path(folder) / "trace.json"
            prof.export_chrome_trace(str(path))
            self._let_go(prof)
            del prof
            timeline = kineto.read(path, frames=self._options.with_stack)
        add_stream_names(timeline, self._streams)
        name_groups(timeline, self._calls, self._group_sizes)
        numbers = find_sensor_numbers() if sys.modules["torch"].cuda.is_initialized() else None
        if numbers is not None:
            renumber_devices(timeline, numbers)
        return drop_own_frames(drop_unasked(timeline, self._options))

    def discard(self) -> None:
        """Free the events unread."""
        prof, self._prof = self._prof, None
        self._let_go(prof)

    def _let_go(self, prof: Any) -> None:
        """Free Kineto's events, unless the process ends anyway: that takes 3 us each with shapes, under the lock.

        torch's profiler is in a reference cycle. Otherwise its events would be freed by the garbage collector or at the
        interpreter's end, and the program would stand still for that time.
        """
        held, prof.profiler = prof.profiler, None
        if self.process_ends:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


class KinetoCollector:
    """Starts and stops Kineto. Only the thread that started it may stop it: Kineto's state belongs to a thread."""

    starting: ClassVar[bool] = False
    """Whether the profiler that is just starting is ours. A process has only one Kineto."""

    def __init__(self, options: SessionOptions) -> None:
        self._options = options
        self._prof: Any = None
        self._prepared: Any = None
        self.thread: int | None = None
        self.notes: list[str] = []

    @property
    def recording(self) -> bool:
        return self._prof is not None

    def prepare(self) -> None:
        """Load and enable the vendor's library now, so that the first recorded step does not pay for that."""
        if self._prepared is not None:
            return
        # Kineto writes each start and stop to standard error; 99 is above all its levels.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        import torch

        options = self._options
        if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
            raise _busy("another profiler is running")  # to start a second one would end in a segfault (2.13)
        prof = torch.profiler.profile(
            activities=self._activities(), record_shapes=options.record_shapes, with_stack=options.with_stack,
            profile_memory="memory" in options.enabled_activities, experimental_config=_trace_only(options),
        )  # fmt: skip
        KinetoCollector.starting = True
        try:
            # torch warns that the "profiler clears events at the end of each cycle": of no interest to our user.
            with warnings.catch_warnings(), _without_inductor(torch):
                warnings.simplefilter("ignore")
                prof.prepare_trace()
        except RuntimeError as exc:
            raise _busy(str(exc)) from exc
        finally:
            KinetoCollector.starting = False
        self._prepared = prof
        self._touch_device()

    def _activities(self) -> list[Any]:
        import torch

        kinds = torch.profiler.ProfilerActivity
        wanted = [kinds.CPU]
        if not any(a in self._options.enabled_activities for a in ON_DEVICE):
            return wanted
        supported = torch.profiler.supported_activities()
        if torch.cuda.is_available() and kinds.CUDA in supported:  # ROCm too
            wanted.append(kinds.CUDA)
        elif hasattr(torch, "xpu") and torch.xpu.is_available() and kinds.XPU in supported:
            wanted.append(kinds.XPU)
        elif not self.notes:
            self.notes.append(Note("torch sees no accelerator: only operators of the CPU are traced", "no_accelerator"))
        return wanted

    def _touch_device(self) -> None:
        """Launch one tiny kernel and discard its events: CUPTI makes its buffers at the first kernel."""
        import torch

        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.zeros(1, device="cuda")
            torch.cuda.synchronize()

    def start(self) -> None:
        self.prepare()
        try:
            self._prepared.start_trace()
        except RuntimeError as exc:
            self._prepared = None
            raise _busy(str(exc)) from exc
        self._prof, self._prepared = self._prepared, None
        self.thread = threading.get_ident()

    def stop(self) -> Finished:
        """Stop recording. Waits for the device, whose last kernels belong to the window."""
        if self.thread != threading.get_ident():
            raise MeasurementError(
                "the trace can only be ended by the thread that began it",
                why="Kineto keeps its state by thread",
                fix="enter and leave the session on one thread",
            )
        prof, self._prof = self._prof, None
        streams = name_streams()
        prof.stop_trace()
        return Finished(prof, self._options, streams, read_calls(), group_sizes())

    def cancel(self) -> None:
        prof, self._prepared = self._prepared, None
        if prof is not None:  # the only way to end Kineto's warm-up
            prof.start_trace()
            prof.stop_trace()


class OperatorCollector(KinetoCollector):
    """Kineto for operators only, while CUPTI's own records continue. Without CUPTI, Kineto records kernels as well.

    With CUPTI, the host's calls come from it: their threads and times tie kernels to operators (`timeline.link`).
    Kineto then costs half as much, and neither of the two loses a kernel.
    """

    def __init__(
        self,
        options: SessionOptions,
        kernels: KernelTracing,
        modules: ModuleRanges,
        flush: Callable[[], None],
    ) -> None:
        """`flush` writes what was recorded to the file, because no other thread can while Kineto stops."""
        super().__init__(options)
        self._kernels = kernels
        self._modules = modules
        self._flush = flush

    def prepare(self) -> None:
        """Warm up if Kineto records kernels too. Beside CUPTI the warm-up would take the records of that step."""
        if not self._kernels.running:
            super().prepare()

    def start(self) -> None:
        with self._kernels.handed_over(calls=True):
            super().prepare()
            super().start()
        if not has_compiled():  # adding and removing hooks makes torch.compile compile again
            self._modules.install()

    def stop(self) -> Finished:
        self._modules.remove()
        with self._kernels.handed_over(calls=False):
            self._flush()
            return super().stop()

    def _activities(self) -> list[Any]:
        import torch

        return [torch.profiler.ProfilerActivity.CPU] if self._kernels.running else super()._activities()

    def _touch_device(self) -> None:
        if not self._kernels.running:
            super()._touch_device()


@contextlib.contextmanager
def _without_inductor(torch: Any) -> Iterator[None]:
    """Keep torch.profiler from importing Inductor just to read a setting: 4 s in a program that compiles nothing.

    torch imports Inductor when `torch._inductor` is first used (2.11, 2.13); a program that compiles has done that.
    """
    lazy = getattr(torch, "_lazy_modules", None)
    if "torch._inductor" in sys.modules or not isinstance(lazy, set) or "_inductor" not in lazy:
        yield
        return
    lazy.discard("_inductor")
    try:
        yield
    finally:
        lazy.add("_inductor")


def _trace_only(options: SessionOptions) -> Any:
    """Let torch make no Python objects of events, which we never use (since 2.13; not possible with stacks)."""
    from torch._C._profiler import _ExperimentalConfig

    if options.with_stack:
        return None
    try:
        return _ExperimentalConfig(trace_only=True)
    except TypeError:
        return None


def _busy(why: str) -> MeasurementError:
    return MeasurementError(
        "the trace could not be started",
        why=f"torch.profiler: {why.splitlines()[0]}",
        fix='one profiler at a time: end the other torch.profiler, or use mode="sampling", which needs none',
    )


def find_sensor_numbers() -> list[int] | None:
    """Return the sensors' number of each device of torch; None if the numbers are the same.

    Kineto and CUPTI count only the devices that CUDA_VISIBLE_DEVICES leaves; NVML counts all.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not os.environ.get("CUDA_VISIBLE_DEVICES") or torch.version.hip is not None:
        return None
    index_of = getattr(torch.cuda, "_get_nvml_device_index", None)
    if index_of is None:
        return None
    try:
        return [int(index_of(i)) for i in range(torch.cuda.device_count())]
    except (RuntimeError, TypeError, ValueError, IndexError):  # a MIG part of a GPU has no NVML number
        return None


def renumber_devices(timeline: Timeline, numbers: list[int]) -> None:
    """Give the devices of a timeline the sensors' numbers."""
    device = timeline["device"]
    is_mapped = (device >= 0) & (device < len(numbers))
    timeline.columns["device"] = np.where(
        is_mapped, np.array([*numbers, NONE])[np.where(is_mapped, device, NONE)], device
    )
    renumber_streams(timeline, numbers)
    for entry in timeline.device_properties:
        if entry.get("id") in range(len(numbers)):
            entry["id"] = numbers[entry["id"]]


def drop_unasked(timeline: Timeline, options: SessionOptions) -> Timeline:
    """Return the timeline without the kinds of device rows that were not asked for; their joules count as idle."""
    left_out = [a for a in ON_DEVICE if a not in options.enabled_activities]
    if not left_out:
        return timeline
    note = f"not recorded, as asked: {', '.join(left_out)}; their joules count as idle"
    kept = keep_rows(timeline, ~np.isin(timeline["kind"], [CODE[k] for a in left_out for k in _LEFT_OUT[a]]))
    return timeline if kept is timeline else replace(kept, notes=[*timeline.notes, note])


def drop_own_frames(timeline: Timeline) -> Timeline:
    """Return the timeline without Python frames of our own threads: torch's Python tracer records every thread.

    There, threads that ran before the trace and did nothing in torch all have the number 0.
    """
    is_frame = np.isin(timeline["name"], timeline.meta.get("frames", ()))
    alive = {t.native_id: t.name.startswith("tessera-") for t in threading.enumerate() if t.native_id is not None}
    own = [number for number, is_own in alive.items() if is_own]
    if {number for number, is_own in alive.items() if not is_own} <= set(timeline["thread"][is_frame].tolist()):
        own.append(0)  # all other threads have been seen, so 0 is ours
    return keep_rows(timeline, ~(is_frame & np.isin(timeline["thread"], own)))
