"""CUPTI's records through a fake libcupti: layouts of all releases, buffers handed over, names, and what is lost."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import RecordingError
from tessera.profile.cupti_collector import LEAST_BYTES, MOST_BYTES, CuptiCollector, RecordBytes
from tessera.profile.cupti_library import CONCURRENT_KERNEL, MEMCPY, MEMSET, Cupti, CuptiError, open_cupti
from tessera.profile.cupti_records import find_places, split_records

SOURCE = Path(__file__).parents[1] / "fakes" / "fake_cupti.c"
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed: no fake can be compiled")

# (CUPTI_API_VERSION, bytes of a kernel's, a copy's, a set's record) as the headers of CUDA 11.8 to 13.4 have them.
RELEASES = [
    (18, 200, 88, 88),
    (18, 208, 88, 88),
    (24, 208, 88, 88),
    (28, 208, 96, 88),
    (130001, 216, 96, 88),
    (130202, 224, 96, 88),
    (130301, 232, 96, 88),
    (130401, 248, 112, 104),
    (140000, 264, 120, 112),  # one that nobody has seen: learnt from CUPTI's own walk
]
NAMES = [ctypes.create_string_buffer(b"_Z4gemmPf"), ctypes.create_string_buffer(b"softmax")]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cupti") / "libcupti.so.13"
    flags = ["-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(path)], check=True)
    return str(path)


@pytest.fixture
def fake(library: str) -> Iterator[Any]:
    fake = ctypes.CDLL(library)
    launch_shape = ctypes.POINTER(ctypes.c_int32)
    fake.fake_kernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint64] * 2, launch_shape, ctypes.c_uint64]
    fake.fake_copy.argtypes = [*[ctypes.c_uint64] * 3, ctypes.c_int]
    fake.fake_set.argtypes = [ctypes.c_uint64] * 3
    fake.fake_reset.argtypes = [ctypes.c_uint32, *[ctypes.c_size_t] * 3]
    fake.fake_time.argtypes = [ctypes.c_uint64]
    fake.fake_call.argtypes = [*[ctypes.c_uint32] * 2, *[ctypes.c_uint64] * 2, *[ctypes.c_uint32] * 2]
    fake.fake_reset(130001, 216, 96, 88)
    yield fake
    fake.fake_reset(130001, 216, 96, 88)


def launch(fake: Any, number: int, name: int = 0) -> None:
    shape = (ctypes.c_int32 * 6)(number + 1, 2, 1, 128, 1, 1)
    fake.fake_kernel(ctypes.addressof(NAMES[name]), 1000 + 10 * number, 1005 + 10 * number, shape, 0)


def count_kernels(piece: RecordBytes | None) -> int:
    return 0 if piece is None else len(piece.split()[CONCURRENT_KERNEL])


@pytest.mark.parametrize(("version", "kernel", "copy", "memset"), RELEASES)
def test_records_of_every_release_are_read(
    fake: Any, library: str, version: int, kernel: int, copy: int, memset: int
) -> None:
    fake.fake_reset(version, kernel, copy, memset)
    collector = CuptiCollector(Cupti(library), most_bytes=1 << 14)
    collector.start()
    for number in range(500):
        launch(fake, number, name=number % 2)
        if number % 7 == 3:
            fake.fake_copy(5000 + number, 5002 + number, 4096 + number, 1)
        if number % 11 == 5:
            fake.fake_set(9000 + number, 9001 + number, 64)
    collector.stop()
    assert len(collector._full) > 3  # several buffers
    taken = collector.take()
    assert taken is not None
    kernels, copies, sets = (taken.split()[kind] for kind in (CONCURRENT_KERNEL, MEMCPY, MEMSET))
    assert kernels["grid"][:, 0].tolist() == list(range(1, 501))
    assert set(kernels["block"][:, 0].tolist()) == {128}
    assert kernels["start"].tolist() == [1000 + 10 * n for n in range(500)]
    assert set((kernels["end"] - kernels["start"]).tolist()) == {5}
    assert copies["bytes"].tolist() == [4096 + n for n in range(500) if n % 7 == 3]
    assert len(sets) == sum(n % 11 == 5 for n in range(500))
    assert [taken.names[p] for p in kernels["name"][:2].tolist()] == ["_Z4gemmPf", "softmax"]


def test_a_buffer_with_a_running_kernel_comes_later(fake: Any, library: str) -> None:
    collector = CuptiCollector(Cupti(library))
    collector.start()
    launch(fake, 0)
    fake.fake_pending(1)
    collector.flush()
    assert collector.take() is None
    fake.fake_pending(0)
    collector.flush()
    piece = collector.take()
    assert piece is not None
    assert len(piece.split()[CONCURRENT_KERNEL]) == 1
    collector.stop()


def test_few_kernels_of_which_one_runs_always_come_soon(fake: Any, library: str) -> None:
    collector = CuptiCollector(Cupti(library))
    collector.start()
    fake.fake_pending(1)
    kept = launched = 0
    for _ in range(30):
        for _ in range(100):
            launch(fake, launched)
            launched += 1
        collector.flush()
        kept += count_kernels(collector.take())
        assert launched - kept <= 100
    collector.stop()


def test_buffers_that_nobody_takes_are_bounded_and_the_loss_is_counted(
    fake: Any, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.profile.cupti_collector.MOST_WAITING", 3 * 2160 - 1)
    collector = CuptiCollector(Cupti(library), most_bytes=2160)  # ten kernels
    collector.start()
    for number in range(100):
        launch(fake, number)
    collector.stop()
    kept = count_kernels(collector.take())
    assert 0 < kept < 100
    assert kept + collector.dropped == 100


def test_buffers_are_used_again(fake: Any, library: str) -> None:
    collector = CuptiCollector(Cupti(library), most_bytes=2160)
    collector.start()
    for number in range(1000):
        launch(fake, number)
        if number % 50 == 0:
            collector.take()
    collector.stop()
    collector.take()
    assert len(collector._empty) < 10


def test_buffers_are_small_where_kernels_are_few_and_large_where_they_are_many(fake: Any, library: str) -> None:
    """A buffer is handed over when it is full, or nothing in it runs: of few kernels a large one would come late."""
    collector = CuptiCollector(Cupti(library))
    collector.start()
    given = []
    for count in (100, 100, 100, 20_000, 20_000, 20_000, 10, 10, 10):
        for number in range(count):
            launch(fake, number)
        collector.flush()
        given.append(max(len(buffer) for buffer, _ in collector._full))
        kept = count_kernels(collector.take())
        assert kept == count
    assert given[2] == given[8] == LEAST_BYTES
    assert given[5] == MOST_BYTES
    collector.stop()


def test_a_layout_that_contradicts_cupti_is_refused(fake: Any, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = CuptiCollector(Cupti(library))
    collector.start()
    for number in range(3):
        launch(fake, number)
    monkeypatch.setattr(Cupti, "walk", lambda *_: iter([(CONCURRENT_KERNEL, 0), (CONCURRENT_KERNEL, 4096)]))
    collector.stop()
    with pytest.raises(RecordingError, match="not known"):
        collector.take()


@pytest.mark.parametrize("wrong", ["grid", "name"])
def test_kernels_that_cannot_be_are_refused_and_the_program_lives(fake: Any, library: str, wrong: str) -> None:
    """A layout in which another field lies where a name was: reading there must not end the program."""
    collector = CuptiCollector(Cupti(library))
    collector.start()
    shape = (ctypes.c_int32 * 6)(0 if wrong == "grid" else 3, 2, 1, 128, 1, 1)
    fake.fake_kernel(12345 if wrong == "name" else ctypes.addressof(NAMES[0]), 10, 20, shape, 0)
    collector.stop()
    with pytest.raises(RecordingError, match="not known"):
        collector.take()


def test_records_of_an_unknown_kind_are_refused() -> None:
    data = np.zeros(216, np.uint8)
    data[:4].view("<u4")[0] = 77
    with pytest.raises(RecordingError, match="kind 77"):
        split_records(data.tobytes(), {CONCURRENT_KERNEL: 216})


@pytest.mark.parametrize(("begin", "ticks_per_ns"), [(1, 1.0), (123_456, 2.1), (-1, 1.0)])
def test_times_are_those_of_the_wall_clock_whatever_cupti_counts(
    fake: Any, library: str, begin: int, ticks_per_ns: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA 12 tells the wall clock (-1 here); after Kineto has run, CUPTI counts ticks of the processor."""
    started_ns = 1_790_000_000_000_000_000
    now_ns = [started_ns]
    monkeypatch.setattr("tessera.profile.cupti_collector.time.time_ns", lambda: now_ns[0])

    def tick(elapsed_ns: int) -> int:
        now_ns[0] = started_ns + elapsed_ns
        ticks = now_ns[0] if begin < 0 else begin + int(elapsed_ns * ticks_per_ns)
        fake.fake_time(ticks)
        return ticks

    tick(0)
    collector = CuptiCollector(Cupti(library))
    collector.start()
    middle = tick(500_000_000)
    shape = (ctypes.c_int32 * 6)(1, 1, 1, 32, 1, 1)
    fake.fake_kernel(ctypes.addressof(NAMES[0]), middle, middle + int(1000 * ticks_per_ns), shape, 0)
    tick(1_000_000_000)
    collector.stop()
    piece = collector.take()
    assert piece is not None
    kernels = piece.split()[CONCURRENT_KERNEL]
    start_ns, end_ns = (int(piece.to_epoch_ns(kernels[edge])[0]) for edge in ("start", "end"))
    assert start_ns - started_ns == pytest.approx(500_000_000, abs=5)
    assert end_ns - start_ns == pytest.approx(1000, abs=5)


def test_calls_of_the_host_come_with_names_and_system_threads(fake: Any, library: str) -> None:
    collector = CuptiCollector(Cupti(library))
    collector.start(calls=True)
    fake.fake_call(5, 0, 100, 110, 4242, 7)
    fake.fake_other(17)  # enabled by another client: its length is learnt from CUPTI's own walk
    fake.fake_call(4, 1, 200, 210, 4243, 8)
    launch(fake, 0)
    collector.stop()
    piece = collector.take()
    assert piece is not None
    calls = {kind: records for kind, records in piece.split().items() if kind in (4, 5)}
    assert {k: (r["thread"].tolist(), r["correlation"].tolist()) for k, r in calls.items()} == {
        5: ([4242], [7]),
        4: ([4243], [8]),
    }
    assert piece.calls == {(5, 0): "cudaLaunchKernel", (4, 1): "cuLaunchKernelEx"}
    collector.start()  # without them
    fake.fake_call(5, 0, 100, 110, 4242, 9)
    launch(fake, 1)
    collector.stop()
    piece = collector.take()
    assert piece is not None and set(piece.split()) == {CONCURRENT_KERNEL}


@given(st.lists(st.tuples(st.sampled_from([1, 2, 10]), st.integers(1, 30)), max_size=20), st.integers(0, 3))
def test_places_of_records_are_found_however_kinds_follow_each_other(runs: list[tuple[int, int]], cut: int) -> None:
    sizes = {1: 96, 2: 88, 10: 216}
    expected: dict[int, list[int]] = {}
    data = bytearray()
    for kind, count in runs:
        for _ in range(count):
            expected.setdefault(kind, []).append(len(data))
            data += kind.to_bytes(4, "little") + bytes(sizes[kind] - 4)
    if cut and data:  # within the last record
        last = max(places[-1] for places in expected.values())
        kind = next(k for k, places in expected.items() if places[-1] == last)
        expected[kind].pop()
        del data[last + 4 * cut :]
    found = {k: v.tolist() for k, v in find_places(bytes(data), sizes).items()}
    assert found == {k: v for k, v in expected.items() if v}


def test_another_profiler_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/opt/nsight/libToolsInjection64.so")
    with pytest.raises(CuptiError, match="another profiler"):
        open_cupti()


def test_a_kind_that_cannot_be_recorded_leaves_nothing_enabled(fake: Any, library: str) -> None:
    fake.fake_reset(130001, 0, 96, 88)  # kernels are refused
    collector = CuptiCollector(Cupti(library))
    with pytest.raises(CuptiError, match="cuptiActivityEnable"):
        collector.start()
    assert not collector.running
    fake.fake_copy(1, 2, 3, 1)
    collector._cupti.flush(forced=True)
    assert collector.take() is None
