"""`mode="kernels"`: every kernel of a program by a fake CUPTI, in a session, with the joules of a fake sensor."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import pytest

from tessera import profile
from tessera.profile import kernel_tracing
from tessera.profile.cupti_collector import CuptiCollector
from tessera.profile.cupti_library import Cupti
from tessera.profile.cupti_timeline import demangle, read_records
from tessera.record import CODE

from .test_cupti_collector import fake, library  # noqa: F401  (fixtures)

torch = pytest.importorskip("torch")
NAMES = [ctypes.create_string_buffer(n) for n in (b"_Z4gemmPf", b"ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)")]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, library: str) -> None:  # noqa: F811
    """A torch whose CUDA starts when it is asked for, and the fake CUPTI with it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call: call())
    monkeypatch.setattr(kernel_tracing, "synchronize", lambda: None)
    make = CuptiCollector.__init__

    def __init__(self: CuptiCollector) -> None:
        make(self, Cupti(library))

    monkeypatch.setattr(CuptiCollector, "__init__", __init__)


def launch(fake: Any, name: int, start_ns: int, length_ns: int) -> None:  # noqa: F811
    shape = (ctypes.c_int32 * 6)(3, 2, 1, 128, 1, 1)
    fake.fake_kernel(ctypes.addressof(NAMES[name]), start_ns, start_ns + length_ns, shape, 0)


def test_kernels_of_a_session_are_in_its_timeline(fake: Any, cuda: None, tmp_path: Path) -> None:  # noqa: F811
    with profile.session(mode="kernels", path=tmp_path / "a.tessera") as sess:
        begun_ns = time.time_ns()
        for number in range(100):
            launch(fake, number % 10 == 0, begun_ns + 10_000 * number, 4_000)
        fake.fake_copy(begun_ns + 2_000_000, begun_ns + 2_001_000, 4096, 1)
        fake.fake_set(begun_ns + 3_000_000, begun_ns + 3_000_500, 64)
    timeline = sess.timeline()
    kernels = timeline.rows("kernel")
    assert len(kernels) == 90
    row = int(kernels[0])
    assert timeline.name(row) == "gemm(float*)"
    assert timeline["start_ns"][row] == begun_ns + 10_000  # the first is a collective
    assert timeline["end_ns"][row] - timeline["start_ns"][row] == 4_000
    shape = timeline.launches[int(timeline["launch"][row])]
    assert (shape.grid, shape.block, shape.registers, shape.shared_bytes) == ((3, 2, 1), (128, 1, 1), 40, 3072)
    assert [timeline.launches[int(timeline["launch"][r])].collective_type for r in timeline.rows("collective")] == [
        "all_reduce"
    ] * 10
    copied = int(timeline.rows("memcpy")[0])
    assert timeline.name(copied) == "Memcpy HtoD (Pinned -> Device)"
    assert timeline["bytes"][copied] == 4096
    assert len(timeline.rows("memset")) == 1
    assert len(sess.recording().facts.windows) == 1


def test_rows_come_to_the_file_while_the_program_runs(
    fake: Any,  # noqa: F811
    cuda: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_tracing, "FLUSH_S", 0.0)
    with profile.session(mode="kernels", path=tmp_path / "a.tessera") as sess:
        launch(fake, 0, time.time_ns(), 1_000)
        until = time.monotonic() + 60
        while not len(sess.timeline().rows("kernel")):
            assert time.monotonic() < until, "no kernel came to the file"
            time.sleep(0.05)
        launch(fake, 0, time.time_ns(), 1_000)
    assert len(sess.timeline().rows("kernel")) == 2
    assert len(sess.recording().facts.windows) == 1


def test_a_session_may_begin_within_the_start_of_cuda(
    fake: Any,  # noqa: F811
    cuda: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `tessera run` does: torch holds a lock then, for which `_lazy_call` would wait for ever."""

    def wait_for_ever(call: Any) -> None:
        raise AssertionError("torch.cuda._lazy_call within torch.cuda._lazy_init")

    monkeypatch.setattr(torch.cuda, "_lazy_call", wait_for_ever)
    monkeypatch.setattr(torch.cuda._tls, "is_initializing", True, raising=False)
    with profile.session(mode="kernels", path=tmp_path / "a.tessera") as sess:
        launch(fake, 0, time.time_ns(), 1_000)
    assert len(sess.timeline().rows("kernel")) == 1


def test_records_without_a_time_are_left_out_and_said(fake: Any, library: str) -> None:  # noqa: F811
    collector = CuptiCollector(Cupti(library))
    collector.start()
    launch(fake, 0, 0, 0)
    launch(fake, 0, time.time_ns(), 10)
    collector.stop()
    timeline = read_records(collector.take())
    assert timeline["kind"].tolist() == [CODE["kernel"]]
    assert any("could not time 1" in note for note in timeline.notes)


def test_a_torch_without_cuda_says_that_nothing_was_traced(tmp_path: Path) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    with profile.session(mode="kernels", path=tmp_path / "a.tessera") as sess:
        pass
    assert any("this torch has no CUDA" in note for note in sess.notes)


def test_cupti_that_refuses_does_not_stop_the_program(
    fake: Any,  # noqa: F811
    cuda: None,
    tmp_path: Path,
) -> None:
    fake.fake_reset(130001, 0, 96, 88)
    with profile.session(mode="kernels", path=tmp_path / "a.tessera") as sess:
        pass
    assert any("cuptiActivityEnable failed" in note for note in sess.notes)


def test_names_are_demangled_as_kineto_does() -> None:
    assert demangle("_ZN2at6native6vecaddEPf") == "at::native::vecadd(float*)"
    assert demangle("triton_poi_fused_add_0") == "triton_poi_fused_add_0"
