"""Pauses of a GPU: the kernel's code, the thread that launches it, and a cap held by it, against a fake driver."""

from __future__ import annotations

import random
import re
import subprocess
import threading
import time
import types
from pathlib import Path

import pytest

from tessera import monitor, schedule
from tessera.errors import ScheduleError
from tessera.monitor import Monitor
from tessera.runtime import control_loop, pause_kernel
from tessera.runtime.controller import PaceCommand
from tessera.runtime.gpu_pacer import GpuPacer, make_pacer
from tessera.runtime.pause_kernel import PauseKernel

from fakes.busy import BusySensor
from fakes.cuda_driver import load_fake, missing_compiler
from waiting import wait_until


@pytest.fixture
def cuda(monkeypatch):
    if missing_compiler():
        pytest.skip(missing_compiler())
    fake = load_fake()
    fake.fake_refuse(b"")
    monkeypatch.setattr(pause_kernel, "load_driver", lambda: fake)
    yield fake
    fake.fake_refuse(b"")


@pytest.fixture
def pacer(cuda):
    made = GpuPacer(0)
    wait_until(lambda: made.counts().points == 1)  # the launch that loads the code
    yield made
    made.stop()


# -- the kernel -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [70, 80, 90, 100])
def test_the_kernel_is_assembled_and_needs_less_than_any_other(capability, tmp_path):
    """Where a block of the program's fits, one of ours must fit: one warp, few registers, no memory of its own."""
    triton = pytest.importorskip("triton")
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if not ptxas.exists():
        pytest.skip("this Triton brings no ptxas")
    source = tmp_path / "pause.ptx"
    source.write_text(pause_kernel.PTX)
    told = subprocess.run(
        [ptxas, f"-arch=sm_{capability}", "-v", source, "-o", tmp_path / "pause.cubin"],
        check=True,
        capture_output=True,
        text=True,
    ).stderr
    assert int(re.search(r"Used (\d+) registers", told)[1]) <= 32
    assert "smem" not in told
    assert "0 bytes spill stores" in told


def test_a_grid_fills_every_sm(cuda):
    assert PauseKernel(0).blocks == 132 * 32


def test_making_it_leaves_the_threads_capture_mode_as_it_was(cuda):
    before = cuda.fake_mode()
    PauseKernel(0)
    assert cuda.fake_mode() == before


def test_a_driver_that_refuses_is_said_with_its_reason(cuda):
    cuda.fake_refuse(b"cuModuleLoadData")
    with pytest.raises(ScheduleError) as told:
        PauseKernel(0)
    assert "cuModuleLoadData" in told.value.what
    assert "CUDA_ERROR" in told.value.why
    assert "driver" in told.value.fix


# -- the thread -------------------------------------------------------------------------------------------------


def test_pauses_last_as_long_as_the_ratio_says_and_end_with_the_command(pacer):
    pacer.obey(PaceCommand(0.5, 0.002))
    wait_until(lambda: pacer.counts().waits >= 20)
    counts = pacer.counts()
    assert counts.waited_s >= 0.5 * counts.worked_s * 0.99
    pacer.obey(PaceCommand())
    ended = pacer.counts().points
    wait_until(lambda: pacer.counts().points == pacer._launched)
    pacer.obey(PaceCommand(0.5, 0.002))
    wait_until(lambda: pacer.counts().points > ended + 3)


def test_nothing_is_launched_while_nothing_has_to_wait(pacer, cuda):
    before = cuda.fake_launched()
    for _ in range(50):
        pacer.obey(PaceCommand())
        time.sleep(0.001)
    assert cuda.fake_launched() == before


def test_a_new_command_ends_a_pause_that_is_under_way(pacer):
    pacer.obey(PaceCommand(49.0, 0.01))
    wait_until(lambda: load_fake().fake_paused())
    pacer.obey(PaceCommand())
    wait_until(lambda: not load_fake().fake_paused())


@pytest.mark.parametrize("ratio", [0.2, 4.0])
def test_one_pause_is_launched_at_a_time(pacer, ratio):
    """A second one, queued behind a long pause, would find no work before it, and the third too much."""
    pacer.obey(PaceCommand(ratio, 0.002))
    most = 0

    def look():
        nonlocal most
        most = max(most, pacer._launched - pacer.counts().points)
        time.sleep(0.0005)  # what is queued behind a pause is there for as long as it lasts

    before = pacer.counts().waits
    wait_until(lambda: pacer.counts().waits >= before + 40, look)
    assert most <= 1


def test_a_failure_is_said_and_the_thread_ends(cuda, caplog):
    cuda.fake_refuse(b"cuLaunchKernel")
    made = GpuPacer(0)
    wait_until(lambda: made.failure)
    assert "gpu0: the power cap is not held" in made.failure
    made._thread.join(timeout=600)
    made.obey(PaceCommand(1.0))  # and nothing raises
    assert made.counts().waits == 0
    assert len(caplog.records) == 1


def test_a_pacer_is_made_with_its_kernel_loaded(cuda):
    """Loaded beside the first call's work it would wait for it: windows of +38% in the first half second on an H200."""
    made = make_pacer(0)
    assert made._launched == 1
    made.stop()


# -- a cap ------------------------------------------------------------------------------------------------------


@pytest.fixture
def device(cuda, monkeypatch, tmp_path):
    """A fresh loop over a GPU whose work is a sleep, while it is not paused."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("TESSERA_RUNTIME_DIR", str(tmp_path))
    sensor = BusySensor("gpu0", cuda.fake_unpaused_s)
    sensor.start()
    monitor.use(Monitor([sensor]).start())
    monkeypatch.setattr(control_loop, "_loop", None)
    monkeypatch.setattr(control_loop, "_current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a sleep")

    def work(milliseconds):
        for _ in range(milliseconds):
            while cuda.fake_paused():
                time.sleep(0.0002)
            sensor.work(0.001)

    yield work
    control_loop.get_loop().stop()
    monitor.use(None)


def test_a_cap_is_held_without_a_hook_in_the_program(device):
    import torch

    @schedule(power_cap="400W")
    def step():
        assert torch._C._len_torch_function_stack() == 0
        device(10)

    def run():  # a report waits for readings: after each call, the program would draw less than its cap on average
        for _ in range(20):
            step()

    wait_until(lambda: step.report().waits > 50 and step.report().mean_w < 0.75 * 900.0, run)
    report = step.report()
    assert report.where == "by pauses of the GPU"
    assert report.waited_s > 0
    assert report.slowdown > 0
    assert "pauses of the GPU" in str(report)


def test_below_the_cap_nothing_is_launched(device, cuda):
    @schedule(power_cap="2kW")
    def step():
        device(5)

    step()
    wait_until(lambda: control_loop.get_loop().find_spender().pacer.counts().points == 1)
    before = cuda.fake_launched()
    end = time.monotonic() + 0.7
    wait_until(lambda: time.monotonic() > end, step)
    wait_until(lambda: not control_loop.get_loop()._is_near(time.monotonic_ns()), step)  # it looks ten times a second
    assert cuda.fake_launched() == before
    assert "nothing had to wait" in str(step.report())


def test_what_is_judged_is_read_after_the_pause_between_looks(monkeypatch):
    """Read before it, a rise of power was seen 0.1 s late: a window of compiled BERT was 22% above its cap."""
    order, this = [], threading.current_thread()

    def note(name):  # other threads may look too
        return lambda *_, **__: order.append(name) if threading.current_thread() is this else None

    loop = control_loop.ControlLoop()
    sampler = types.SimpleNamespace(wait_for=note("read"))
    monkeypatch.setattr(control_loop.monitor, "default", lambda: types.SimpleNamespace(sampler=sampler))
    monkeypatch.setattr(control_loop.time, "sleep", note("pause"))
    monkeypatch.setattr(loop, "_steer", note("judge"))
    loop._tick()
    assert order == ["pause", "read", "judge"]


def test_a_gpu_that_cannot_be_paused_is_in_the_report(device, cuda):
    cuda.fake_refuse(b"cuModuleLoadData")
    step = schedule(power_cap="400W")(lambda: device(5))
    wait_until(lambda: any("not held" in note for note in step.report().notes), step)


def test_slices_differ_and_keep_their_mean() -> None:
    from tessera.runtime.gpu_pacer import VARIED, vary_slice

    rng = random.Random(0)
    slices = [vary_slice(0.002, rng) for _ in range(2000)]
    assert sum(slices) / len(slices) == pytest.approx(0.002, rel=0.01)
    assert max(abs(s / 0.002 - 1.0) for s in slices) <= VARIED and len({round(s, 6) for s in slices}) > 100
