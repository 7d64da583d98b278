"""Streams, events, copies, pinned memory, prefetch, and the names of streams on the timeline; CUDA's part is a fake."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import gc
import importlib
import json
import subprocess
import sys
import threading
import time
import warnings
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tessera import event, memcpy, monitor, profile, stream
from tessera.analyze.overview import overview
from tessera.errors import ArgumentError
from tessera.memcpy import async_copy
from tessera.memcpy import loader as batches
from tessera.memcpy.pinned_memory import PinnedPool
from tessera.monitor import Monitor
from tessera.profile import kineto_collector as collector
from tessera.profile.export import Chrome
from tessera.profile.ranks.merge import merge
from tessera.profile.runfile import RunFile, RunWriter
from tessera.schema import Domain
from tessera.timeline import Builder, kineto, stream_names

from fakes.sensor import ScriptSensor
from places import REPOSITORY

T0 = 1_700_000_000_000_000_000


@pytest.fixture
def cpu():
    return stream.create(name="h2d", device="cpu")


class FakeRaw:
    """torch's stream as far as ours uses it; `log` says what was asked of it."""

    def __init__(self, handle, log, device="cuda:0"):
        self.cuda_stream, self.log, self.device = handle, log, torch.device(device)

    def wait_stream(self, other):
        self.log.append(("wait", self.cuda_stream, other.cuda_stream))

    def wait_event(self, event):
        self.log.append(("wait event", self.cuda_stream, event.at))

    def synchronize(self):
        self.log.append(("synchronize", self.cuda_stream))

    def query(self):
        return False


class FakeEvent:
    def __init__(self, enable_timing=False):
        self.at, self.passed = None, False

    def record(self, raw):
        self.at = raw.cuda_stream

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True


@pytest.fixture
def fake_cuda(monkeypatch):
    """torch.cuda with four streams in its pool, numbers for handles, and the null stream (0) as the current one."""
    log, given, now = [], iter(range(10_000)), [FakeRaw(0, [])]
    now[0].log = log

    @contextlib.contextmanager
    def entered(raw):
        log.append(("enter", raw.cuda_stream))
        before, now[0] = now[0], raw
        try:
            yield
        finally:
            now[0] = before

    monkeypatch.setattr(stream, "POOL", 4)
    monkeypatch.setattr(stream, "_names", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now[0])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None, priority=0: FakeRaw(100 + next(given) % 4, log))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    gc.collect()
    return log


# -- streams and events ------------------------------------------------------------------------------------------------


def test_importing_them_loads_no_torch():
    code = "import sys, tessera.stream, tessera.event, tessera.memcpy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_on_a_cpu_a_stream_is_a_name(cpu):
    assert (cpu.name, cpu.handle, cpu.raw, cpu.query()) == ("h2d", None, None, True)
    cpu.synchronize()
    assert cpu.wait().wait(stream.create(device="cpu")).wait(event.create().record(cpu)) is cpu
    order = []
    with stream.on(cpu, torch.ones(1)):
        order.append("inside")
    assert [*order, "after"] == ["inside", "after"]
    assert stream.create(device="cpu").name != stream.create(device="cpu").name


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: stream.create(name=" "), "name="),
        (lambda: stream.create(name=3), "name=3"),
        (lambda: stream.create(device="meta"), "device='meta'"),
        (lambda: stream.create(device="cuda"), "no CUDA device"),
        (lambda: stream.on("h2d").__enter__(), "stream='h2d'"),
        (lambda: stream.create(device="cpu").wait(3), "cannot wait for 3"),
        (lambda: event.create().wait(), "before it was recorded"),
        (lambda: event.create().query(), "before it was recorded"),
        (lambda: event.create().synchronize(), "before it was recorded"),
        (lambda: event.create().record("s"), "stream='s'"),
        (lambda: event.create().record().elapsed_s(event.create().record()), "without timing=True"),
        (lambda: event.create(timing=True).record().elapsed_s(3), "later=3"),
    ],
)
def test_wrong_arguments_are_named(call, said):
    with pytest.raises(ArgumentError, match=said):
        call()


def test_events_on_a_cpu_are_times(cpu):
    began = time.monotonic()
    first = event.create(timing=True).record(cpu)
    time.sleep(0.01)
    last = event.create(timing=True).record()
    assert 0.009 < first.elapsed_s(last) < time.monotonic() - began + 0.001
    assert last.query() and last.wait(cpu) is last
    last.synchronize()
    assert "on cpu" in repr(last) and "not recorded" in repr(event.create())


def test_names_go_to_streams_that_nobody_else_has(fake_cuda):
    kept = [stream.create(name=f"s{i}") for i in range(4)]
    assert sorted(s.handle for s in kept) == [100, 101, 102, 103]
    shared = stream.create(name="fifth")  # more than the pool has
    assert shared.handle in {s.handle for s in kept}
    assert stream.names()[(0, shared.handle)] == "fifth"
    handle = kept[2].handle
    del kept[2], shared
    gc.collect()
    assert stream.create(name="again").handle == handle


def test_a_stream_waits_for_what_may_have_made_its_operands(fake_cuda):
    one = stream.create(name="one")
    two = stream.create(name="two")
    assert fake_cuda == [("wait", one.handle, 0), ("wait", two.handle, 0)]  # tensors made before the streams
    fake_cuda.clear()
    with stream.on(one):
        with stream.on(one):  # no wait for itself
            pass
        with stream.on(two):
            pass
    assert fake_cuda == [
        ("wait", one.handle, 0), ("enter", one.handle), ("enter", one.handle), ("wait", two.handle, one.handle),
        ("enter", two.handle),
    ]  # fmt: skip
    fake_cuda.clear()
    event.create().record(one).wait(two)
    event.create().record(two).wait()
    two.wait(event.create().record(one))
    assert fake_cuda == [
        ("wait event", two.handle, one.handle), ("wait event", 0, two.handle), ("wait event", two.handle, one.handle)
    ]  # fmt: skip
    with (
        pytest.raises(ArgumentError, match="stream='one' is on cuda:0, a tensor on cpu"),
        stream.on(one, torch.ones(1)),
    ):
        pass


def test_the_memory_of_operands_is_kept_even_where_the_body_fails(fake_cuda):
    class Operand:
        device, is_cuda, kept = torch.device("cuda:0"), True, ()

        def record_stream(self, raw):
            self.kept += (raw.cuda_stream,)

    x, s = Operand(), stream.create(name="s")
    with pytest.raises(ZeroDivisionError), stream.on(s, x, None):
        raise ZeroDivisionError
    event.create().record(s).wait(None, x)
    assert x.kept == (s.handle, 0)


def test_a_cpu_stream_is_a_range_of_a_running_profiler(cpu, tmp_path):
    other = stream.create(name="other", device="cpu")
    run = profile.session(activities=["cpu"], path=tmp_path / "r.tessera")
    with run as session, stream.on(cpu), stream.on(cpu), stream.on(other):
        torch.ones(4, 4) @ torch.ones(4, 4)
    seen = [r.name for r in session.records() if r.kind == "region"]
    assert sorted(n for n in seen if n.startswith("stream ")) == ["stream h2d", "stream other"]


# -- copies ------------------------------------------------------------------------------------------------------------


def test_a_copy_on_a_cpu_is_made_at_once(cpu):
    dst, src = torch.zeros(3, 4), torch.arange(12.0).reshape(3, 4)
    done = memcpy.async_(dst=dst, src=src, stream=cpu)
    assert done.query() and torch.equal(dst, src)
    assert getattr(memcpy, "async") is memcpy.async_
    memcpy.async_(dst=torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
                  src=torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))  # fmt: skip
    weight = torch.nn.Parameter(torch.zeros(2))
    memcpy.async_(dst=weight, src=torch.ones(2))  # a leaf too: no gradient flows through a copy
    assert weight.sum() == 2 and weight.requires_grad


@pytest.mark.parametrize(
    ("dst", "src", "said"),
    [
        (torch.zeros(3), torch.zeros(4), "dst has the shape .3,., src .4,."),
        (torch.zeros(3), torch.zeros(1), "dst has the shape"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.half), "dst is torch.float32, src torch.float16"),
        (torch.zeros(3, 2), torch.zeros(2, 3).t(), "src does not have"),
        (torch.zeros(6)[::2], torch.zeros(3), "dst does not have"),
        (torch.zeros(3), torch.zeros(3, device="meta"), "src is a meta tensor"),
        (torch.zeros(3), [1, 2, 3], "src is a list"),
        (None, torch.zeros(3), "dst is a NoneType"),
    ],
)
def test_a_copy_that_would_be_more_than_a_copy_is_refused(dst, src, said):
    with pytest.raises(ArgumentError, match=said):
        memcpy.async_(dst=dst, src=src)


def test_a_copy_onto_itself_is_refused():
    x = torch.zeros(8)
    with pytest.raises(ArgumentError, match="share memory"):
        memcpy.async_(dst=x[:4], src=x[2:6])
    memcpy.async_(dst=x[:4], src=x[4:])


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, and logs what is asked of it."""

    @staticmethod
    def __new__(cls, log, *shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device="cuda:0")

    def __init__(self, log, *shape):
        self.log = log

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} is not part of a copy")

    def copy_(self, src, non_blocking=False):
        self.log.append(("copy", non_blocking))
        return self

    def record_stream(self, raw):
        self.log.append(("keep", raw.cuda_stream))


class Pinned(torch.Tensor):
    def is_pinned(self):
        return True


def test_a_copy_to_a_gpu_step_by_step(fake_cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(async_copy, "_warned", set())
    async_copy._in_flight.clear()
    s, src, dst = stream.create(name="h2d"), torch.ones(4).as_subclass(Pinned), OnGpu(fake_cuda, 4)
    fake_cuda.clear()
    done = memcpy.async_(dst=dst, src=src, stream=s)
    there = ("enter", s.handle), ("copy", True), ("keep", s.handle)
    assert fake_cuda == [("wait", s.handle, 0), *there]
    assert done._raw.at == s.handle and not done.query()
    assert [host is src for _, host in async_copy._in_flight] == [True]
    fake_cuda.clear()
    memcpy.async_(dst=dst, src=src, stream=s, wait=False)
    assert fake_cuda == [*there]
    fake_cuda.clear()
    memcpy.async_(dst=dst, src=src)  # on the current stream there is nothing to wait for
    assert fake_cuda == [("enter", 0), ("copy", True), ("keep", 0)]
    with pytest.warns(UserWarning, match="src is in pageable memory"):
        memcpy.async_(dst=dst, src=torch.ones(4), stream=s)
    with pytest.raises(ArgumentError, match="stream='far' is on cpu, the copy goes from cpu to cuda:0"):
        memcpy.async_(dst=dst, src=src, stream=stream.create(name="far", device="cpu"))
    async_copy._in_flight.clear()


def test_host_memory_is_held_until_its_copy_has_passed():
    async_copy._in_flight.clear()

    class Slow(event.Event):
        __slots__ = ("passed",)

        def query(self):
            return self.passed

    first, second, third = Slow(), Slow(), Slow()
    first.passed = second.passed = third.passed = False
    async_copy._keep_until(first, "a")
    async_copy._keep_until(second, "b")
    assert [h for _, h in async_copy._in_flight] == ["a", "b"]
    first.passed = True
    async_copy._keep_until(third, "c")
    assert [h for _, h in async_copy._in_flight] == ["b", "c"]
    async_copy._in_flight.clear()


def test_pageable_memory_is_said_once(monkeypatch):
    monkeypatch.setattr(async_copy, "_warned", set())
    with pytest.warns(UserWarning, match="src is in pageable memory.*memcpy.empty_pinned"):
        async_copy._warn_pageable("src")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async_copy._warn_pageable("src")
    with pytest.warns(UserWarning, match="dst is in pageable"):
        async_copy._warn_pageable("dst")


# -- pinned memory -----------------------------------------------------------------------------------------------------


def test_the_pool_counts_until_the_last_view_is_gone():
    pool = PinnedPool(limit_bytes=1000)
    first = pool.take((10, 10), torch.float32)
    view = first[2:3]
    second = pool.take((151,), torch.float32)  # over the limit: given, but counted apart
    assert second.numel() == 151
    now = pool.stats()
    assert (now.live_bytes, now.peak_bytes, now.taken, now.over_limit) == (400, 400, 2, 1)
    del first
    gc.collect()
    assert pool.stats().live_bytes == 400  # the view needs the block
    del view
    gc.collect()
    assert pool.stats().live_bytes == 0 and pool.stats().peak_bytes == 400
    assert pool.take((250,), torch.float32).shape == (250,)


def test_the_pool_is_host_memory_whatever_the_default_device():
    with torch.device("meta"):
        assert PinnedPool().take((2,), torch.float32).device.type == "cpu"
        assert PinnedPool(limit_bytes=0).take((2,), torch.float32).device.type == "cpu"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=25))
def test_the_pool_never_hands_out_more_than_its_limit(steps):
    pool, held = PinnedPool(limit_bytes=1024), []
    for size, drop in steps:
        held.append(pool.take((size,), torch.uint8))
        assert 0 <= pool.stats().live_bytes <= 1024
        if drop:
            held.pop(0)
    held.clear()
    assert pool.stats().live_bytes == 0 and pool.stats().taken == len(steps)


def test_pinned_checks_its_arguments_and_falls_back_to_plain_memory():
    made = memcpy.empty_pinned((2, 3), torch.bfloat16)
    assert made.shape == (2, 3) and made.dtype == torch.bfloat16
    assert made.is_pinned() == torch.cuda.is_available()
    assert memcpy.empty_pinned(5).dtype == torch.get_default_dtype()
    assert memcpy.stats().taken >= 2
    for wrong in (
        lambda: memcpy.empty_pinned((2, -1)),
        lambda: memcpy.empty_pinned(2, "float32"),
        lambda: memcpy.limit(-1),
    ):
        with pytest.raises(ArgumentError):
            wrong()
    before = memcpy.stats().limit_bytes
    memcpy.limit(0)
    assert memcpy.empty_pinned(4).is_pinned() is False and memcpy.stats().over_limit >= 1
    memcpy.limit(before)


# -- prefetch ----------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


class FakeStager:
    """Stages on the thread it is called on, slowly; `log` has what happened in what order."""

    def __init__(self, fail_at=None):
        self.log, self.fail_at, self.threads = [], fail_at, set()

    def stage(self, batch):
        self.threads.add(threading.get_ident())
        time.sleep(0.001)
        if batch == self.fail_at:
            raise RuntimeError(f"cannot stage {batch}")
        self.log.append(("staged", batch))
        return batch, "event"

    def take(self, batch, done):
        assert done == "event"
        self.log.append(("taken", batch))
        return batch


def loader(n, log, fail_at=None):
    for i in range(n):
        if i == fail_at:
            raise ValueError(f"batch {i} is broken")
        log.append(("loaded", i, threading.get_ident()))
        yield i


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 9), st.integers(1, 12))
def test_prefetch_keeps_order_and_loads_depth_ahead_on_the_callers_thread(n, depth):
    loads, stager = [], FakeStager()
    for i, batch in enumerate(batches._stage_ahead(loader(n, loads), depth, stager)):
        assert batch == i
        assert len(loads) == min(n, i + depth + 1)
    assert {thread for *_, thread in loads} <= {threading.get_ident()}
    assert stager.threads <= {threading.get_ident()}  # torch copies with all its cores there, see the next test
    assert [b for what, b in stager.log if what == "taken"] == list(range(n))


def test_prefetch_raises_the_loaders_error_after_the_batches_before_it():
    got = []
    with pytest.raises(ValueError, match="batch 3 is broken"):
        for batch in batches._stage_ahead(loader(9, [], fail_at=3), 2, FakeStager()):
            got.append(batch)
    assert got == [0, 1, 2]
    got = []
    with pytest.raises(RuntimeError, match="cannot stage 2"):
        for batch in batches._stage_ahead(loader(9, []), 2, FakeStager(fail_at=2)):
            got.append(batch)
    assert got == [0, 1]


def test_prefetch_stops_when_it_is_left():
    loads, before = [], threading.active_count()
    for batch in batches._stage_ahead(loader(10_000, loads), 2, FakeStager()):
        assert threading.active_count() == before
        if batch == 3:
            break
    assert len(loads) == 3 + 3


def on_a_thread(call):
    with ThreadPoolExecutor(1) as one:
        return one.submit(call).result()


class CountsCores(FakeStager):
    """With how many cores torch would copy where a batch is staged."""

    def stage(self, batch):
        self.log.append(("cores", torch.get_num_threads()))
        return batch, "event"


def test_prefetch_copies_with_all_cores_after_a_data_loaders_thread_asked_for_one():
    """What DataLoader(pin_memory=True, num_workers=1) does on its thread leaves one core to every thread after it."""
    cores, stager = torch.get_num_threads(), CountsCores()
    torch.set_num_threads(2)
    try:
        on_a_thread(lambda: torch.set_num_threads(1))
        assert on_a_thread(torch.get_num_threads) == 1
        assert list(batches._stage_ahead(range(3), 2, stager)) == [0, 1, 2]
    finally:
        torch.set_num_threads(cores)
    assert [n for what, n in stager.log if what == "cores"] == [2, 2, 2]


def test_a_loader_may_fill_the_same_buffer_again():
    buffer = torch.zeros(1000)

    class Copies(FakeStager):
        def stage(self, batch):
            time.sleep(0.001)
            return batches.copy_into(torch, torch.empty(batch.numel()), batch), "event"

    got = list(batches._stage_ahead((buffer.fill_(i) for i in range(5)), 2, Copies()))
    assert [t.unique().tolist() for t in got] == [[float(i)] for i in range(5)]


def test_prefetch_on_a_cpu_passes_batches_as_they_are(cpu):
    batches = [torch.ones(2), (torch.zeros(1), "text")]
    assert list(memcpy.prefetch(batches, device="cpu", stream=cpu)) == batches
    for wrong, said in (
        (lambda: memcpy.prefetch(batches, depth=0), "depth=0"),
        (lambda: memcpy.prefetch(3), "loader is a int"),
        (lambda: memcpy.prefetch(batches, device="meta"), "device='meta'"),
        (lambda: memcpy.prefetch(batches, device="gpu"), "device='gpu' is not a torch device"),
        (lambda: memcpy.prefetch(batches, device=[1]), r"device=\[1\] is not a torch device"),
        (lambda: memcpy.prefetch(batches, device="cuda"), "no CUDA device"),
    ):
        with pytest.raises(ArgumentError, match=said):
            wrong()


def test_batches_of_any_make_are_walked():
    a, b = torch.ones(1), torch.ones(2)
    batch = {"p": Pair(a, [b, "text"]), "q": OrderedDict(z=(a, None)), "n": 3}
    made = batches.map_batch(torch, batch, lambda t: t * 2)
    assert isinstance(made["p"], Pair) and isinstance(made["q"], OrderedDict)
    assert made["p"].x.item() == 2 and made["p"].y[0].sum() == 4 and made["p"].y[1] == "text" and made["n"] == 3
    assert made["q"]["z"][1] is None and batch["p"].x.item() == 1


def test_staging_keeps_values_and_layout():
    for made in (
        torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(20, dtype=torch.half)[::2],
        torch.empty(0, 3),
        torch.tensor(3.0),
    ):
        staged = batches.copy_into(torch, torch.empty(made.numel(), dtype=made.dtype), made)
        assert torch.equal(staged, made) and staged.dtype == made.dtype
        assert staged.stride() == torch.empty_like(made).stride()
    if not torch.cuda.is_available():
        assert batches.copy_to_pinned(torch, made) is made  # no pinned memory to be had: not copied for nothing


def test_the_stager_copies_on_its_stream_and_the_consumer_waits(fake_cuda, monkeypatch):
    """Against a fake of torch.cuda, with the meta device for the GPU's memory."""
    monkeypatch.setattr(batches, "empty_pinned", lambda size, dtype: torch.empty(size, dtype=dtype))
    s = stream.create(name="prefetch")
    stager = batches.BatchStager(torch, torch.device("meta"), s)
    fake_cuda.clear()
    batch = {"x": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), "n": [torch.arange(3), "text"]}
    moved, done = stager.stage(batch)
    assert fake_cuda == [("enter", s.handle)] and done._raw.at == s.handle
    assert moved["x"].is_meta and moved["x"].stride() == batch["x"].stride() and moved["n"][1] == "text"
    assert stager.take(moved, done) is moved
    sparse = torch.eye(2).to_sparse()
    assert stager.stage((sparse, moved["x"]))[0][1] is moved["x"]  # it is there already


# -- names on the timeline ---------------------------------------------------------------------------------------------


def named_run(path, names=None, rank=None):
    b = Builder()
    for i, number in enumerate((7, 13, 17)):
        b.add("kernel", "gemm", T0 + i * 1000, T0 + i * 1000 + 900, device=0, stream=number, correlation=i)
    b.meta = {stream_names.KEY: names} if names else {}
    timeline = b.build()
    timeline.rank = rank
    with RunWriter(path, meta={}) as out:
        out.add_timeline(timeline)
    return RunFile(path)


def thread_names(path):
    events = json.loads(path.read_text())["traceEvents"]
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0}


def test_names_reach_chrome_and_come_back_from_it(tmp_path):
    with named_run(tmp_path / "r.tessera", {"0/13": "h2d", "0/99": "unused"}) as run:
        Chrome(tmp_path / "trace.json").write(run.recording())
        assert run.timeline().meta[stream_names.KEY] == {"0/13": "h2d", "0/99": "unused"}
    assert thread_names(tmp_path / "trace.json") == {7: "stream 7", 13: "h2d (stream 13)", 17: "stream 17"}
    assert kineto.read(tmp_path / "trace.json").meta[stream_names.KEY] == {"0/13": "h2d"}


def test_names_reach_the_lanes_of_the_page(tmp_path):
    with named_run(tmp_path / "r.tessera", {"0/13": "h2d", "0/17": "compute"}) as run:
        timeline = run.timeline()
        view = overview(timeline, None, {}, run.recording().energy())
    assert [lane.label for lane in view.lanes if lane.kind == "device"] == [
        "stream 7", "h2d (stream 13)", "compute (stream 17)"
    ]  # fmt: skip


def test_windows_of_a_run_add_up_their_names(tmp_path):
    b = Builder()
    with RunWriter(tmp_path / "r.tessera", meta={}) as out:
        for names in ({"0/13": "h2d"}, {"0/17": "compute"}):
            b.meta = {stream_names.KEY: names}
            out.add_timeline(b.build())
    with RunFile(tmp_path / "r.tessera") as run:
        assert run.timeline().meta[stream_names.KEY] == {"0/13": "h2d", "0/17": "compute"}


def test_ranks_keep_their_own_names(tmp_path):
    for rank, name in enumerate(("copy", "other")):
        named_run(tmp_path / f"rank{rank}.tessera", {"0/13": name}, rank).close()
    merged = merge(tmp_path)
    assert merged.timeline.meta[stream_names.KEY] == {"0/0/13": "copy", "1/0/13": "other"}
    assert stream_names.label(merged.timeline.meta, 0, 13, 1) == "other (stream 13)"
    with merged.write(tmp_path / "all.tessera") as run:
        Chrome(tmp_path / "trace.json").write(run.recording())
    text = (tmp_path / "trace.json").read_text()
    assert "copy (stream 13)" in text and "other (stream 13)" in text


def test_ids_are_asked_of_the_library_and_follow_the_devices_numbers():
    timeline = Builder().build()
    known = {(0, 0xA0): "h2d", (0, 0xB0): "compute", (1, 0xC0): "far", (1, 0xD0): "unknown"}
    timeline.meta[stream_names.KEY] = {"0/7": "read from the trace"}
    collector.add_stream_names(timeline, collector.name_streams(known=known, ask={0xA0: 13, 0xB0: 17, 0xC0: 13}.get))
    read = "read from the trace"
    assert timeline.meta[stream_names.KEY] == {"0/7": read, "0/13": "h2d", "0/17": "compute", "1/13": "far"}
    collector.renumber_streams(timeline, [3, 5])
    assert timeline.meta[stream_names.KEY] == {"3/7": read, "3/13": "h2d", "3/17": "compute", "5/13": "far"}
    plain = Builder().build()
    collector.add_stream_names(plain, collector.name_streams(known={}))
    collector.renumber_streams(plain, [1])
    assert stream_names.KEY not in plain.meta


def test_cupti_is_asked_before_the_driver(monkeypatch):
    class Cupti:
        @staticmethod
        def cuptiGetStreamIdEx(context, handle, per_thread, out):
            ctypes.cast(out, ctypes.POINTER(ctypes.c_uint32))[0] = handle.value + 1
            return 0 if handle.value != 9 else 7

    class Driver:
        @staticmethod
        def cuStreamGetId(handle, out):
            ctypes.cast(out, ctypes.POINTER(ctypes.c_ulonglong))[0] = 500 + handle.value
            return 0 if handle.value != 10 else 1

    both = {"libcupti": Cupti, "libcuda": Driver}
    monkeypatch.setattr(collector, "_find_loaded", both.get)
    assert [collector.stream_id(h) for h in (4, 9)] == [5, 509]
    del both["libcupti"]
    assert [collector.stream_id(h) for h in (4, 10)] == [504, None]
    monkeypatch.undo()
    assert collector.by_cupti(1) is None and collector.by_driver(1) is None  # neither is loaded here
    assert collector._find_loaded("libc") is not None  # and this is how one that is loaded is found


@given(st.integers(0, 15), st.integers(0, 2**40), st.text(min_size=1, max_size=20))
def test_a_label_gives_back_its_name(device, number, name):
    meta = {stream_names.KEY: {stream_names.key(device, number): name}}
    shown = stream_names.label(meta, device, number)
    if name.strip() == name and not stream_names._NUMBERED.search(name):
        assert stream_names.name_in(shown) == name
    assert stream_names.name_in(stream_names.label({}, device, number)) is None


# -- the whole step ----------------------------------------------------------------------------------------------------


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    return importlib.import_module("three_streams")


def test_a_whole_step_on_three_streams(example, tmp_path, monkeypatch):
    """H2D copy, gemm, flash attention and all-reduce, profiled and exported: the example as it stands."""
    host = Domain(name="cpu0", source="script", resolution_s=0.02)
    monitor.use(Monitor([ScriptSensor(lambda t: 100.0, clock=time.monotonic_ns, domain=host)]).start())
    try:
        sizes = ["--steps", "3", "--batch", "2", "--length", "16"]
        losses = example.main(["--folder", str(tmp_path), "--device", "cpu", *sizes])
    finally:
        monitor.use(None)
    assert losses == sorted(losses, reverse=True)  # it learns
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = {e["name"] for e in events}
    assert {"stream h2d", "stream compute", "stream reduce", "step_0", "step_2", "aten::copy_", "aten::mm"} <= shown
    assert any("attention" in name for name in shown)
    with (tmp_path / "summary.csv").open() as f:
        rows = {r["name"]: r for r in csv.DictReader(f)}
    assert rows["stream h2d"]["calls"] == "3" and float(rows["stream compute"]["energy_j"]) > 0
    board = tmp_path / "tensorboard"
    assert list(board.glob("*.pt.trace.json.gz")) and list(board.glob("plugins/tessera/*.tessera"))
    assert list(board.glob("events.out.tfevents.*"))
    with RunFile(tmp_path / "run.tessera") as run:
        assert len(run.timeline().rows("op")) > 30


def test_streams_change_no_result(example):
    """The step on streams is the step in plain torch, to the last bit on a CPU."""
    sizes = example.Sizes(batch=2, length=8, heads=2, head_dim=4)
    trainer = example.Trainer(sizes=sizes, device=torch.device("cpu"))
    weights = [w.detach().clone().requires_grad_() for w in trainer.weights]
    for number in range(3):
        x = trainer.host[number % 2]
        q, k, v = (x @ weights[0]).view(2, 8, 3, 2, 4).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        loss = F.mse_loss(seen.transpose(1, 2).reshape(-1, 8) @ weights[1], x)
        loss.backward()
        assert torch.equal(trainer.step(number), loss.detach())
        with torch.no_grad():
            for w in weights:
                w.sub_(w.grad, alpha=trainer.rate)
                w.grad = None
    assert all(torch.equal(a, b) for a, b in zip(trainer.weights, weights, strict=True))
