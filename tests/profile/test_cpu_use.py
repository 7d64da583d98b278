"""What a program uses of the CPUs, and DataLoader workers in a recorded run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from tessera import profile
from tessera.profile.cpu_use import CpuUseCounter, ThreadTimes, count_cores, list_formats
from tessera.sensors.processes import ProcessOwner


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Each item takes 5 ms of CPU time."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> torch.Tensor:
        began = time.process_time()
        while time.process_time() - began < 0.005:
            pass
        return torch.ones(4)


def test_the_workers_of_a_data_loader_are_in_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.tessera"
    with profile.session(mode="sampling", path=path):
        for _ in torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=1):
            pass
    use = profile.load(path).facts.cpu_use
    assert use is not None
    assert 0.2 <= use.children_s <= use.cpu_s
    assert use.cores >= 1 and use.threads == torch.get_num_threads()


def test_threads_beside_the_main_one_are_counted_by_name() -> None:
    def work() -> None:
        began = time.thread_time()
        while time.thread_time() - began < 0.1:
            pass
        done.wait()

    done = threading.Event()
    early = threading.Thread(target=work)
    early.start()
    time.sleep(0.3)
    times = ThreadTimes()  # what was used before does not count
    threads = [threading.Thread(target=work) for _ in range(2)] + [threading.Thread(target=work, name="tessera-x")]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while times.by_name()["work"][1] < 0.2 and time.monotonic() < deadline:
        time.sleep(0.05)
        times.poll()
    done.set()
    for thread in (early, *threads):
        thread.join()
    times.poll()
    count, seconds = times.by_name()["work"]
    assert count == 3 and 0.2 <= seconds < 0.3


def test_the_thread_that_is_traced_is_not_beside_itself() -> None:
    found: list[ThreadTimes] = []

    def traced() -> None:
        found.append(ThreadTimes())
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
        found[0].poll()

    thread = threading.Thread(target=traced, name="session")
    thread.start()
    thread.join()
    assert "session" not in found[0].by_name()


def test_a_run_says_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = ProcessOwner(user="ada", job="4711")
    monkeypatch.setattr("tessera.profile.assemble.find_owner", lambda pid: owner)
    with profile.session(mode="sampling", path=tmp_path / "run.tessera"):
        pass
    meta = profile.load(tmp_path / "run.tessera").facts.meta
    assert (meta["user"], meta["job"]) == ("ada", "4711") and "pod" not in meta


@pytest.mark.parametrize(("text", "expected"), [("max 100000", None), ("50000 100000", 0.5), ("rubbish", None)])
def test_a_quota_limits_the_cores(tmp_path: Path, text: str, expected: float | None) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    assert count_cores(quota) == (expected or count_cores(tmp_path / "missing"))


def test_formats_are_those_of_the_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu avx2 avx512_bf16 amx_int8\n")
    assert list_formats(cpuinfo) == ["bf16", "int8"]
    assert list_formats(tmp_path / "missing") == []


def test_what_other_programs_used_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_s = iter([100.0, 103.0])
    monkeypatch.setattr("tessera.profile.cpu_use.read_machine_s", lambda: next(machine_s))
    fact = CpuUseCounter().to_fact()
    assert fact is not None and fact["others_s"] == pytest.approx(3.0 - fact["cpu_s"])  # type: ignore[operator]
    assert 0 < fact["over_s"] < 60  # type: ignore[operator]
