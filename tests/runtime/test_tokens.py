"""Buckets of launches, warps and cp.async copies: options, what launches announce, the law, the kernel, the loop."""

from __future__ import annotations

import itertools
import json
import os
import random
import textwrap
import threading
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forked import run_forked
from tessera import monitor, schedule
from tessera.errors import ArgumentError
from tessera.monitor import Monitor
from tessera.op import hints
from tessera.runtime import control_loop
from tessera.runtime.controller import Cap, Controller, PaceCommand
from tessera.runtime.options import ScheduleOptions
from tessera.runtime.pacer import HostPacer, PaceCounts
from tessera.runtime.power_zone import TokenTally
from tessera.runtime.token_launches import TokenSpender, count_tokens

from fakes.busy import BusySensor
from fakes.plant import BURST_W, GEMM_S, IDLE_W, Bench, Op, Plant, gemms, mean_w, training

torch = pytest.importorskip("torch")

GEMM_J = (BURST_W - IDLE_W) * GEMM_S


def bench(ops, cap_w, *, seconds=4.0, every=4, seed=0, window_s=0.2, **plant):
    made = Bench(Plant(ops, every=every, rng=random.Random(seed), spends=True, **plant), Cap(cap_w, window_s))
    made.run(seconds)
    return made


# -- options ----------------------------------------------------------------------------------------------------


def test_tokens_are_joules_unless_told():
    assert ScheduleOptions(power_cap="400W").tokens == "joules"
    for kind in ("launches", "warps", "cp_async"):
        assert ScheduleOptions(power_cap="400W", cap_policy="token_bucket", tokens=kind).tokens == kind


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"power_cap": "400W", "tokens": "warp"}, "tokens='warp' is not known; did you mean 'warps'"),
        ({"power_cap": "400W", "tokens": None}, "tokens=None"),
        ({"power_cap": "400W", "tokens": 3}, "tokens=3"),
        ({"tokens": "warps"}, "tokens='warps' without a power_cap"),
        ({"power_cap": "400W", "cap_policy": "driver", "tokens": "warps"}, "tokens='warps' needs waits"),
        ({"power_cap": "node:1kW", "tokens": "cp_async"}, "tokens='cp_async' with power_cap='node:1kW'"),
    ],
)
def test_a_wrong_bucket_names_its_argument(wrong, says):
    with pytest.raises(ArgumentError) as told:
        schedule(**wrong)
    assert says in str(told.value)


def test_a_dry_run_says_what_is_counted(capsys):
    schedule(power_cap="400W", tokens="warps", dry_run=True)(lambda: None)()
    assert "hold 400 W for each GPU by waits after Tessera's own kernels, by their warps" in capsys.readouterr().out


# -- what a launch announces ------------------------------------------------------------------------------------


def test_what_a_launch_spends():
    assert [count_tokens(kind, 100, 4, 3072) for kind in ("launches", "warps", "cp_async")] == [1, 400, 307_200]


def test_nobody_hears_of_launches_unless_a_schedule_counts_them():
    assert hints.listener is None
    hints.announce_launch(100, 4, stages=3, tile_bytes=1 << 14)  # and nothing happens


ANNOUNCED = """
heard, launched = [], []
from tessera.op import hints
from tessera.op.kernels import attention, matmul, quantize, rows
from tessera.op.tile import Tile

hints.listener = lambda *launch: heard.append(launch)
Driver.launcher_cls = lambda self, source, made: (
    lambda *args: launched.append([made.name, args[0] * args[1] * args[2], made.num_warps]))

tile = Tile(128, 64, 32)
matmul.launch_matmul(rand(3, 300, 96), rand(3, 96, 200), rand(3, 300, 200), tile=tile, stages=3, warps=8)
matmul.launch_conv(rand(2, 9, 9, 64), rand(64, 3, 3, 32), rand(2, 9, 9, 64), stride=(1, 1), padding=(1, 1),
            dilation=(1, 1), groups=2, tile=Tile(64, 32, 32), stages=4, warps=4)
q, k = rand(2, 4, 130, 64), rand(2, 2, 130, 64)
attention.run_attention(q, k, k, rand(2, 4, 130, 64), scale=0.1, causal=True, tile=(64, 32), stages=2, warps=4)
x, w = rand(1000, 512), rand(512)
rows.softmax_backward(x, rows.softmax_forward(x, torch.bfloat16), torch.bfloat16)
y, summed, mean, rstd = rows.norm_forward(x, x, w, w, eps=1e-5, centered=True)
cut = rows.row_block(512)
rows.norm_backward(y, x, x, w, mean=mean, rstd=rstd, weight_grad=True, bias_grad=True)
for by_row in (True, False):
    quantize.quantize(x, "fp8", by_row=by_row)
# nothing to launch
matmul.launch_matmul(rand(1, 0, 96), rand(1, 96, 200), rand(1, 0, 200), tile=tile, stages=3, warps=8)
print(json.dumps([heard, launched, [cut.rows, cut.cols, rows.count_stages(cut, 2)]]))
"""


def test_every_launch_of_ours_is_announced_as_the_driver_gets_it():
    """Blocks and warps are those of the launch; copies are those of the loop's tiles, 16 bytes each."""
    pytest.importorskip("triton")
    from op.test_launch import DRIVER

    heard, launched, (rows, cols, stages) = json.loads(run_forked(DRIVER + ANNOUNCED))
    assert [blocks_warps[:2] for blocks_warps in heard] == [run[1:] for run in launched]
    copies = {name: launch[2] for (name, *_), launch in zip(launched, heard, strict=True)}
    assert copies.pop("matmul_kernel") == 2 * (128 + 64) * 32 * 2 // 16
    assert copies.pop("conv_kernel") == 3 * (64 + 32) * 32 * 2 // 16
    assert copies.pop("attention_kernel") == 2 * 32 * 64 * 2 // 16
    assert copies.pop("_norm_backward") == (stages - 1) * 3 * rows * cols * 2 // 16
    assert set(copies.values()) == {0}  # they load nothing ahead


def test_the_copies_of_a_product_are_those_the_compiler_puts_in_flight():
    """Counted in the PTX: each thread's share of `stages - 1` tiles before the loop, and of one inside it."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from tessera.op.kernels.matmul import compile_matmul
    from tessera.op.tile import Tile

    for stages in (2, 4):
        made = compile_matmul(Tile(128, 64, 32), "bf16", stages, 4, GPUTarget("cuda", 90, 32))
        issued = made.asm["ptx"].count("cp.async.cg.shared.global")
        a_tile = (128 + 64) * 32 * 2 // 16
        assert issued * 32 * 4 == stages * a_tile


# -- the tally --------------------------------------------------------------------------------------------------


def test_rates_are_by_the_points_own_clock_and_the_fastest_pace_is_of_work_alone():
    tally = TokenTally()
    passed = PaceCounts()
    for i in range(1, 6):  # every 20 ms: 100 tokens in 10 ms of work and 10 of waiting
        passed = PaceCounts(i, i, 0.01 * i, 0.01 * i, 100 * i, 5.0 + 0.02 * i)
        assert tally.add_counts(passed, i * 20_000_000) == pytest.approx(1.0)
    assert tally.token_s == pytest.approx(1e-4)
    assert tally.duty_between(30_000_000, 90_000_000) == pytest.approx(0.5)
    assert tally.add_counts(passed, 120_000_000) == 1.0  # nothing new
    # Twice as fast: the units change, by that factor.
    assert tally.add_counts(PaceCounts(6, 6, 0.06, 0.06, 700, 5.12), 120_000_000) == pytest.approx(2.0)
    assert tally.duty_between(100_000_000, 120_000_000) == pytest.approx(0.5)
    # Two streams that work at once count twice the time: they take no longer than it passed.
    tally.add_counts(PaceCounts(7, 7, 0.06, 0.26, 1700, 5.13), 140_000_000)
    assert tally.token_s == pytest.approx(1e-5)


def test_a_pace_that_is_not_reached_any_more_is_forgotten():
    tally = TokenTally()
    tally.add_counts(PaceCounts(tokens=0, ended_s=1.0), 0)
    tally.add_counts(PaceCounts(tokens=1000, worked_s=0.01, ended_s=1.01), 1)
    factors = [
        tally.add_counts(PaceCounts(tokens=1000 + i, worked_s=0.01 + 0.1 * i, ended_s=1.01 + 0.1 * i), i)
        for i in range(1, 600)
    ]
    assert tally.token_s == pytest.approx(0.1, rel=0.01)
    assert all(f <= 1.0 for f in factors)


@given(
    rates=st.lists(st.tuples(st.integers(1, 50), st.floats(0.1, 1e6)), min_size=1, max_size=20),
    span=st.tuples(st.integers(0, 1000), st.integers(1, 500)),
)
def test_the_duty_of_a_span_is_the_mean_of_its_rates(rates, span):
    tally = TokenTally()
    tally.token_s = 1.0
    times = list(itertools.accumulate(ms for ms, _ in rates))
    tally._rates.extend((t - ms, rate) for t, (ms, rate) in zip(times, rates, strict=True))
    start, end = span[0], span[0] + span[1]

    def at(ms):  # before the first and after the last, those
        return next((r for t, (_, r) in zip(times, rates, strict=True) if ms < t), rates[-1][1])

    wanted = sum(at(ms) for ms in range(start, end)) / (end - start)
    assert tally.duty_between(start, end) == pytest.approx(wanted)


@given(factor=st.floats(0.1, 10.0), burst=st.floats(300.0, 2000.0))
def test_other_units_are_the_same_rate(factor, burst):
    """Duty times the fastest pace is what is commanded: it must not jump when that pace is found to be another."""
    controller = Controller(Cap(250.0, 0.2), idle_w=100.0, burst_w=burst)
    before = controller.predict().duty
    controller.rescale(factor)
    after = controller.predict().duty
    if 0.02 < after < 1.0 and 0.02 < before < 1.0:
        assert after * factor == pytest.approx(before)


# -- the law, on the plant --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cap_w", "each"), [(600.0, 1), (500.0, 3072), (400.0, 10**7), (300.0, 1)])
def test_a_steady_load_of_our_kernels_is_held(cap_w, each):
    """Whatever a launch spends: the mean within 3%, no window above the cap by 5%, and the price of a token learnt."""
    made = bench((Op(tokens=each) for _ in itertools.repeat(0)), cap_w)
    assert made.mean_w() == pytest.approx(cap_w, rel=0.03)
    assert made.worst_w() <= 1.05 * cap_w
    assert made.worst_w(0.5) <= 1.05 * cap_w
    assert made.zone.token_j == pytest.approx(GEMM_J / each, rel=0.05)
    held = made.plant.tokens / made.plant.now_s
    assert held == pytest.approx((made.mean_w(0.0) - IDLE_W) / (GEMM_J / each), rel=0.03)


def test_training_like_work_is_held_by_its_launches():
    made = bench(training(random.Random(3)), 400.0)
    assert made.mean_w() == pytest.approx(400.0, rel=0.03)
    assert made.worst_w() <= 1.07 * 400.0


@pytest.mark.parametrize("others", [1, 20])
def test_work_that_is_not_ours_is_held_with_ours_beside_it(others):
    def ops():
        while True:
            yield from (Op(GEMM_S, 700.0, 0) for _ in range(others))
            yield Op(tokens=64)

    assert bench(ops(), 400.0, every=1).mean_w() == pytest.approx(400.0, rel=0.03)


@pytest.mark.parametrize("period_s", [0.05, 0.2, 1.0])
def test_jumps_are_held_at_once_where_tokens_are_as_dear_everywhere(period_s):
    """The sensor tells of a jump 60-80 ms later; tokens that go with the joules need not be told."""

    def ops():
        while True:
            for power_w in (BURST_W, 350.0):
                tokens = round(power_w - IDLE_W)
                yield from (Op(GEMM_S, power_w, tokens) for _ in range(int(period_s / GEMM_S)))

    made = bench(ops(), 400.0, seconds=6.0)
    assert made.worst_w() <= 1.05 * 400.0
    assert made.mean_w() <= 400.0


def test_nothing_waits_below_the_cap():
    made = bench((Op(GEMM_S, 350.0, 7) for _ in itertools.repeat(0)), 500.0)
    assert made.plant.waited_s < 0.1
    assert made.mean_w() == pytest.approx(350.0, rel=0.02)


def test_without_a_reading_the_learnt_price_holds():
    made = bench(gemms(), 400.0, seconds=2.0)
    made.sensor.dead = True
    made.run(2.0)
    assert made.zone.blind
    assert mean_w(made.plant.power_w, 2.5) == pytest.approx(400.0, rel=0.06)


def test_a_cap_below_idle_says_what_it_paced():
    made = bench(gemms(), 90.0, seconds=3.0)
    assert "of the pace of Tessera's own kernels" in made.zone.notes["floor"]
    assert made.plant.done > 100  # it still runs


def test_a_zone_that_goes_over_to_tokens_goes_on_from_its_duty():
    made = Bench(Plant(gemms(), every=4), Cap(400.0, 0.2))
    made.run(2.0)
    duty = made.zone.command.duty
    made.zone.count_tokens(TokenTally())
    made.zone.begin(made.sampler, made.now_ns())
    assert made.zone.command.duty == pytest.approx(duty, rel=0.1)


# -- points that spend ------------------------------------------------------------------------------------------


class Time:
    def __init__(self):
        self.now_ns, self.slept_ns = 10**12, 0

    def clock(self):
        return self.now_ns

    def sleep(self, seconds):
        self.slept_ns += round(seconds * 1e9)
        self.now_ns += round(seconds * 1e9) or 1


@settings(deadline=None)
@example([(0, 0), (0, 1910), (0, 0), (0, 476)], 1e-7, 20.0)  # a point without tokens is not a release
@given(
    st.lists(st.tuples(st.integers(0, 20_000_000), st.integers(0, 2000)), min_size=1, max_size=60),
    st.floats(1e-7, 1e-4),
    st.floats(0.01, 20.0),
)
def test_no_span_spends_more_than_was_refilled_and_saved(work, token_s, ratio):
    """The bucket's promise, for any work: at most rate x time + what may be saved + what was not waited for."""
    time_, command = Time(), PaceCommand(ratio, 0.001, token_s)
    pacer = HostPacer(time_.clock, time_.sleep)
    pacer.obey(command)
    pacer.point(restart=True, tokens=0)
    ended = []
    for busy_ns, tokens in work:
        time_.now_ns += busy_ns
        pacer.point(tokens=tokens)
        ended.append((time_.now_ns, tokens))
    kept_ns = (command.saved_s + command.slice_s) * 1e9
    for i, (start_ns, _) in enumerate(ended):
        tokens = 0
        for end_ns, more in ended[i + 1 :]:
            tokens += more
            assert tokens * command.token_ns <= end_ns - start_ns + kept_ns + 1e4  # sleeps are of whole nanoseconds
    every = sum(tokens for _, tokens in work)
    assert pacer.counts().tokens == every
    assert time_.slept_ns <= every * command.token_ns + 1e4  # and nobody waits for more than it spent


def test_before_tokens_have_a_price_their_time_is_paid_for():
    time_ = Time()
    pacer = HostPacer(time_.clock, time_.sleep)
    pacer.obey(PaceCommand(2.0, 0.001))
    pacer.point(restart=True, tokens=0)
    for _ in range(10):
        time_.now_ns += 3_000_000
        pacer.point(tokens=5)
    assert time_.slept_ns == pytest.approx(10 * 6_000_000, rel=0.1)


def test_a_release_ends_the_wait_and_the_debt():
    time_ = Time()
    pacer = HostPacer(time_.clock, lambda s: (time_.sleep(s), pacer.obey(PaceCommand())))
    pacer.obey(PaceCommand(40.0, 0.001, 1e-3))
    pacer.point(restart=True, tokens=0)
    pacer.point(tokens=100)  # four seconds
    assert time_.slept_ns <= 10_000_000
    slept = time_.slept_ns
    pacer.obey(PaceCommand(1.0, 0.001, 1e-3))
    pacer.point(tokens=3)  # 6 ms
    assert time_.slept_ns - slept <= 10_000_000


class Waits:
    """Notes what is spent; nothing waits."""

    def __init__(self):
        self.seen = []

    def spend(self, tokens, *, restart=False):
        self.seen.append((restart, tokens))

    def count_queued(self):
        return 1


def test_a_wait_comes_after_every_few_launches_with_all_their_tokens():
    waits = Waits()
    spender = TokenSpender(waits)
    spender.enter_call()
    spender.leave_call()
    spender.enter_call()  # something is queued: the device was not idle
    spender.every = 3
    for tokens in (1, 10, 100, 1000, 10_000):
        spender.spend(tokens)
    assert waits.seen == [(True, 0), (False, 1), (False, 1110)]


def spend_ten(spender, times=1):
    for _ in range(times):
        spender._left = 1
        spender.every = 10
        spender.spend(1)


def test_how_often_waits_come_follows_the_time_of_launches():
    spender = TokenSpender(Waits())
    spend_ten(spender, 10)
    spender.adapt(PaceCounts(10, 0, 0.0, 0.01), PaceCommand(1.0, 0.006))  # 100 launches in 10 ms
    assert spender.every == 20  # three waits in a slice of 6 ms
    spend_ten(spender)
    spender.adapt(PaceCounts(11, 0, 0.0, 5.01), PaceCommand(1.0, 0.006))  # then a launch takes half a second
    assert spender.every == 1
    spender.adapt(PaceCounts(11, 0, 0.0, 5.01), PaceCommand(1.0, 0.006))  # nothing new: no change
    assert spender.every == 1


def test_launches_that_have_yet_to_run_do_not_count():
    """A host launches a step at once and then stands for a while: by that, waits came in heaps."""
    spender, ran = TokenSpender(Waits()), 0
    for tick in range(200):
        if tick % 10 == 0:
            spend_ten(spender, 50)
        ran += 5
        spender.adapt(PaceCounts(ran, 0, 0.0, ran * 0.001), PaceCommand(1.0, 0.006))
        assert spender.every == 20  # 10 launches take a millisecond, whenever they were launched


def test_waits_of_a_replayed_graph_teach_nothing():
    spender = TokenSpender(Waits())
    spend_ten(spender, 10)
    spender.adapt(PaceCounts(10, 0, 0.0, 0.010), PaceCommand(1.0, 0.006))
    assert spender.every == 20
    spender.adapt(PaceCounts(500, 0, 0.0, 0.9), PaceCommand(1.0, 0.006))
    assert spender.every == 20


# -- the kernel -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles_and_shares_one_bucket_by_atomics(capability):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tessera.runtime import wait_kernel

    types = dict.fromkeys(("control", "bucket", "state", "stats"), "*i64") | {"tokens": "i64", "restart": "i64"}
    made = triton.compile(
        ASTSource(fn=wait_kernel.tessera_spend, signature=types),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 1},
    )
    ptx = made.asm["ptx"]
    assert "%globaltimer" in ptx and "nanosleep.u32" in ptx and "ld.volatile.global" in ptx
    assert ".reqntid 32" in ptx  # one warp
    for atomic in ("max.s64", "add.u64", "min.s64"):
        assert f"atom.global.gpu.acq_rel.{atomic}" in ptx


SPENT = """
import contextlib, json, random
import torch, triton.language as tl
from tessera.runtime import pacer as pace, token_stream, wait_kernel as k
from tessera.runtime.controller import PaceCommand

class Timer:
    now, release = 10**12, None
def now_ns():
    return tl.full((), Timer.now, tl.int64)
def nap(nap_ns):
    Timer.now += int(nap_ns.handle.data.item())
    if Timer.release is not None:
        pacer.obey(Timer.release)
    return now_ns()
jit = k.tessera_spend.fn.__globals__
jit["_now_ns"], jit["_nap"] = now_ns, nap
jit["_NAP_NS"] = tl.constexpr(10**9)  # half of what is left at a time: few naps to interpret

class Cuda:
    cuda_stream, capturing = 7, False
torch.Tensor.pin_memory = lambda self: self
torch.cuda.current_stream = lambda device=None: Cuda
torch.cuda.synchronize = lambda device=None: None
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.is_current_stream_capturing = lambda: Cuda.capturing

Cuda.capturing = True
try:
    token_stream.TokenStream(torch.device("cpu"))
    refused = ""
except Exception as exc:
    refused = str(exc)
Cuda.capturing = False
pacer = token_stream.TokenStream(torch.device("cpu"))

class Host:
    now = Timer.now
def sleep(seconds):
    Host.now += round(seconds * 1e9) or 1
host = pace.HostPacer(lambda: Host.now, sleep)
rng, rows = random.Random(4), []
Timer.now = Host.now
for both in (pacer, host):
    both.spend(0, restart=True)
for i in range(60):
    command = PaceCommand(rng.uniform(0.0, 9.0) * (i % 10 != 9), rng.uniform(3e-4, 5e-3), 0.0 if i < 5 else 3e-6)
    busy, tokens = rng.randrange(5_000_000), rng.choice([1, 16, 999, 2**33 // 10**6])
    Timer.now += busy
    Host.now += busy
    for both in (pacer, host):
        both.obey(command)
        both.spend(tokens)
    a, b = pacer.counts(), host.counts()
    rows.append([a.waited_s, b.waited_s, a.worked_s, b.worked_s, a.tokens, b.tokens, a.waits, b.waits])

Cuda.cuda_stream = 8  # another stream draws from the same bucket
pacer.obey(PaceCommand(1.0, 3e-4, 1e-3))
before = pacer.counts().waited_s
for stream in (7, 8, 7, 8):
    Cuda.cuda_stream = stream
    pacer.spend(5)  # 10 ms each
shared = pacer.counts().waited_s - before
Timer.release = PaceCommand()
pacer.obey(PaceCommand(40.0, 3e-4, 1e-3))
before = pacer.counts().waited_s
pacer.spend(2**40)
released = pacer.counts().waited_s - before
ended = pacer.counts().ended_s - Timer.now * 1e-9

queued = [pacer.count_queued()]
Cuda.capturing, Cuda.cuda_stream = True, 9  # torch captures on a stream of its own
pacer.spend(1)  # runs once here as a replay would: counted as run, not as launched
queued += [pacer.count_queued(), len(pacer._slots)]
Cuda.capturing, Cuda.cuda_stream = False, 8
pacer.spend(1)
queued.append(pacer.count_queued())
k.spend = lambda *a, **b: None
pacer.ahead, token_stream.GIVE_UP_S = 4, 0.05
for _ in range(7):  # a stream that stands still: the host waits, then gives up
    pacer.spend(1)
queued.append(pacer.count_queued())
print(json.dumps([refused, rows, shared, released, ended, queued]))
"""


def test_the_kernel_computes_in_the_interpreter_what_the_host_does():
    """The same random commands and work through both; streams share the bucket; a release ends any wait."""
    pytest.importorskip("triton")
    refused, rows, shared, released, ended, queued = json.loads(run_forked(SPENT, interpreted=True))
    assert "captured" in refused  # the kernel was not loaded before
    assert queued[:4] == [0, 0, 2, 0]  # timed with the stream before it; no count is left that would never run
    assert queued[4] <= 4
    for device_waited, host_waited, device_worked, host_worked, *counts in rows:
        assert device_waited == pytest.approx(host_waited, rel=2e-3, abs=1e-5)
        assert device_worked == pytest.approx(host_worked, rel=1e-3, abs=1e-5)
        assert counts[0] == counts[1]
        assert counts[2] == counts[3]
    assert rows[-1][0] > 0.1
    assert shared == pytest.approx(0.04, rel=0.25)  # not half of it: two streams are not two buckets
    assert released == pytest.approx(1.0, rel=0.01)  # the first nap of five seconds
    assert ended == pytest.approx(0.0, abs=1e-3)


BOUND = """
    import json, torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    calls = []
    class Launcher:  # what Triton's own launcher is called with
        def __init__(self, src, metadata):
            pass
        def __call__(self, *args):
            words = [a.data_ptr() if hasattr(a, "data_ptr") else a for a in args]
            calls.append([w for w in words if isinstance(w, int)])  # not the hooks and what they would be told
    class Utils:
        def load_binary(self, *args):
            return 1, 2, 16, 0, 1024
        def get_device_properties(self, device):
            return {"max_shared_mem": 232448}
    class Driver:
        utils, launcher_cls = Utils(), Launcher
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 7)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    driver.set_active(Driver())
    from tessera.runtime import wait_kernel as k

    control, bucket, state, stats = (torch.zeros(k.WORDS, dtype=torch.int64) for _ in range(4))
    k.make_launcher(k.spend(control, bucket, state, stats, 5, restart=True), control, bucket, state, stats)(7, 5, 1)
    print(json.dumps(calls))
"""


def test_a_bound_wait_is_launched_as_triton_launches_it():
    """The same arguments in the same places, without looking for the kernel again."""
    pytest.importorskip("triton")
    calls = json.loads(run_forked(textwrap.dedent(BOUND)))
    assert [len(call) for call in calls] == [11, 11]  # grid, stream, function, arguments
    assert calls[0] == calls[1]


# -- the loop, in real time: nothing here depends on how long anything takes -----------------------------------------


@pytest.fixture
def device(monkeypatch, tmp_path):
    """A fresh loop over a device that is a sleep."""
    monkeypatch.setenv("TESSERA_RUNTIME_DIR", str(tmp_path))
    sensor = BusySensor()
    sensor.start()
    monitor.use(Monitor([sensor]).start())
    monkeypatch.setattr(control_loop, "_loop", None)
    yield sensor
    control_loop.get_loop().stop()
    monitor.use(None)


def until(done, step):
    """Call a step until something has come of it; a minute is an error."""
    give_up = time.monotonic() + 600.0
    while not done():
        assert time.monotonic() < give_up
        step()


def test_our_launches_spend_and_wait_and_are_reported(device):
    launched = 0

    @schedule(power_cap="300W", tokens="warps")
    def step():
        nonlocal launched
        assert torch._C._len_torch_function_stack() == 0  # nothing stands between other operators
        for _ in range(10):
            device.work(0.001)
            hints.announce_launch(32, 4)
            launched += 1

    until(lambda: step.report().waits >= 5 and step.report().tokens.energy_per_token_j, step)
    assert hints.listener is None
    report = step.report()
    assert report.tokens.kind == "warps"
    assert 0 <= 128 * launched - report.tokens.spent <= 128 * 256  # but for those after the last point
    assert report.tokens.spent % 128 == 0
    assert report.tokens.per_s > 0
    assert report.waited_s > 0
    text = str(report)
    assert "warps spent by Tessera's own kernels" in text and "other work spends no tokens" in text


def test_launches_of_other_threads_are_heard(device):
    with schedule(power_cap="300W", tokens="launches") as held:
        worker = threading.Thread(target=lambda: [hints.announce_launch(8, 4) for _ in range(3)])  # as autograd's
        worker.start()
        worker.join()
        assert control_loop.get_loop().find_spender().pacer.counts().points >= 1
    assert held.report().tokens.spent >= 1


def test_a_schedule_that_saw_no_kernel_of_ours_says_so(device):
    with schedule(power_cap="300W", tokens="cp_async") as held:
        torch.add(1, torch.ones(2))
        hints.announce_launch(8, 4)  # loads nothing ahead: no copy is in flight
    report = held.report()
    assert (report.tokens.spent, report.waits) == (0, 0)
    assert any("no cp_async of Tessera's own kernels were seen" in note for note in report.notes)


def test_beside_a_bucket_of_joules_all_are_of_joules(device):
    with schedule(power_cap="500W") as outer, schedule(power_cap="300W", tokens="launches") as inner:
        engine = control_loop.get_loop()
        assert engine.own.tokens == "joules"
        for _ in range(300):
            hints.announce_launch(8, 4)
        assert engine.find_spender().pacer.counts().tokens == 0
    assert any("held by joules" in note for note in inner.report().notes)
    assert outer.report().tokens is None
    assert inner.report().tokens.spent == 0


def test_one_after_the_other_each_has_its_own_and_in_turn_what_suits_both(device, monkeypatch):
    monkeypatch.setattr(control_loop, "LINGER_NS", 10**18)  # none is forgotten, however slow this machine is

    def kind_of(tokens):
        return schedule(power_cap="300W", tokens=tokens)(lambda: control_loop.get_loop().own.tokens)

    first, second, third = kind_of("warps"), kind_of("joules"), kind_of("launches")
    assert [first(), first(), second(), second(), third()] == ["warps", "warps", "joules", "joules", "launches"]
    assert not any("held by joules" in note for note in third.report().notes)  # those that only linger do not count
    assert [first(), third(), first()] == ["joules", "joules", "joules"]
    assert any("held by joules" in note for note in third.report().notes)


def test_each_counts_its_own_kind_alone(device, monkeypatch):
    monkeypatch.setattr(control_loop, "LINGER_NS", 10**18)
    monkeypatch.setattr(TokenSpender, "adapt", lambda *_: None)  # a wait after every launch
    first, second = (schedule(power_cap="300W", tokens=kind) for kind in ("warps", "launches"))
    for held, launches in ((first, 3), (second, 2)):
        with held:
            for _ in range(launches):
                hints.announce_launch(8, 4)
    assert first.report().tokens.spent == 3 * 32
    assert second.report().tokens.spent == 2
    assert first.report().tokens.spent == 3 * 32  # whoever asks, and how often


def test_an_exception_or_a_fork_leaves_nobody_listening(device):
    @schedule(power_cap="300W", tokens="warps")
    def fails():
        assert hints.listener is not None
        pid = os.fork()
        if pid == 0:
            os._exit(0 if hints.listener is None else 1)
        assert os.waitpid(pid, 0)[1] == 0
        raise KeyError("x")

    with pytest.raises(KeyError):
        fails()
    assert hints.listener is None
