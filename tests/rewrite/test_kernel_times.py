"""What kernels took, whose they were, and that a trace priced by them adds up to what was measured."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._inductor.utils import run_and_get_code

import tessera
from tessera.errors import ArgumentError, MeasurementError
from tessera.graph.rewrites import Rewrite
from tessera.hardware import lookup
from tessera.monitor.iteration import IterationMeasurement
from tessera.report.rewrite import rewrite_line
from tessera.rewrite import kernel_times, optimize, program_cost, variants
from tessera.rewrite.compilation import Compilation
from tessera.rewrite.eager_ops import EagerOp, make_spec
from tessera.rewrite.inductor import make_backend
from tessera.rewrite.kernel_times import KernelGroup, KernelProfile, KernelTotal
from tessera.rewrite.passes import fuse_attention
from tessera.rewrite.program_cost import estimate_program, set_kernel_times
from tessera.rewrite.savings import trace_rewrites
from tessera.timeline.kineto import read

from places import REPOSITORY
from rewriting import in_turns

# Torch's compiler warns of itself (deprecated parts it still imports, recompilations): none of our business here.
pytestmark = pytest.mark.filterwarnings("ignore")
RECORDED = json.loads((REPOSITORY / "benchmarks/results/optimize.json").read_text())["models"]
FLASH = "aten._scaled_dot_product_flash_attention"
BATCH_NORM = "_native_batch_norm_legit_no_training"


class Residual(nn.Module):
    """What a ResNet is made of, once each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.norms, self.head = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3)), nn.Linear(16, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norms[0](self.first(x))), 3, stride=1, padding=1)
        y = F.relu(self.norms[1](self.second(x)) + x)
        return self.head(F.relu(self.norms[2](self.third(y)) + y).mean((2, 3)))


@pytest.fixture(scope="module")
def residual():
    """A compilation of it, and the code that came of it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    watch = Compilation()
    compiled = torch.compile(Residual().eval(), backend=make_backend(watch, [], {}))
    with torch.no_grad():
        _, code = run_and_get_code(compiled, torch.randn(2, 16, 16, 16))
    return watch, code[0]


def piece(name, *, size=4096):
    tensor = make_spec((size,), (1,), "bf16")
    return EagerOp(name=name, nodes=(name,), reads=(("a", tensor),), writes=(("b", tensor),))


def pieces(*names):
    return {i: piece(name) for i, name in enumerate(names)}


# -- what was seen -------------------------------------------------------------------------------------------------


def trace_of(operators, spans):
    """A trace of Kineto's: operators (id, thread, name, start, end) and kernels (name, start, end, operator's id)."""
    rows = [
        {"cat": "cpu_op", "name": name, "tid": thread, "ts": start, "dur": end - start, "args": {"External id": number}}
        for number, thread, name, start, end in operators
    ]
    rows += [
        {
            "cat": "kernel",
            "name": name,
            "tid": 99,
            "ts": start,
            "dur": end - start,
            "args": {"External id": op} if op else {},
        }
        for name, start, end, op in spans
    ]
    return read(json.dumps({"traceEvents": [{"ph": "X", "pid": 1, **row} for row in rows]}).encode())


def test_a_kernel_is_told_with_the_operators_around_it():
    ops = [
        (3, 7, "aten::cudnn_convolution", 20, 30),
        (1, 7, "aten::conv2d", 0, 100),
        (9, 7, "my step", 0, 200),
        (2, 7, "aten::convolution", 10, 90),
        (4, 7, "aten::relu_", 110, 120),
        (5, 8, "aten::mm", 15, 25),
    ]
    spans = [("conv", 1000, 1400, 3), ("conv", 2000, 2400, 3), ("clip", 1400, 1500, 4), ("gemm", 3000, 3100, 5)]
    spans += [("Memset (Device)", 4000, 4002, 0)]
    found = {(k.name, k.operators): k.time_s for k in kernel_times.sum_kernels(trace_of(ops, spans), 2)}
    assert found == {
        ("conv", ("aten::cudnn_convolution", "aten::convolution", "aten::conv2d")): pytest.approx(400e-6),
        ("clip", ("aten::relu_",)): pytest.approx(50e-6),
        ("gemm", ("aten::mm",)): pytest.approx(50e-6),  # another thread's: nothing is around it
        ("Memset (Device)", ()): pytest.approx(1e-6),
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 50)), min_size=1, max_size=30), st.integers(1, 4))
def test_kernels_that_overlap_take_together_as_long_as_the_device_was_busy(given_, iterations):
    spans = [(f"k{i % 3}", start, start + took, 0) for i, (start, took) in enumerate(given_)]
    busy = len({us for start, took in given_ for us in range(start, start + took)})
    found = KernelProfile(kernels=kernel_times.sum_kernels(trace_of([], spans), iterations), iteration_s=1.0)
    assert found.busy_s == pytest.approx(busy * 1e-6 / iterations)


def test_where_nothing_can_be_seen_the_reason_is_said(monkeypatch):
    with pytest.raises(MeasurementError) as caught:
        kernel_times.profile_kernels(lambda: torch.ones(3) + 1, 0.1)
    assert "showed no kernels" in caught.value.why
    other = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with other, pytest.raises(MeasurementError) as caught:
        kernel_times.profile_kernels(lambda: None, 0.1)
    assert caught.value.why == "another profiler is running"

    def refuses(iteration, count):
        raise RuntimeError("Can't start\nand more")

    monkeypatch.setattr(kernel_times, "_run_profiler", refuses)
    with pytest.raises(MeasurementError) as caught:
        kernel_times.profile_kernels(lambda: None, 0.1)
    assert caught.value.why == "torch.profiler: Can't start"


@pytest.mark.parametrize(("iteration_s", "count"), [(1e-3, 5), (0.1, 2), (3.0, 1)])
def test_long_iterations_are_profiled_once(monkeypatch, iteration_s, count):
    asked = []
    monkeypatch.setattr(
        kernel_times, "_run_profiler", lambda run, n: asked.append(n) or trace_of([], [("k", 0, 6 * n, 0)])
    )
    assert kernel_times.profile_kernels(lambda: None, iteration_s).busy_s == pytest.approx(6e-6)
    assert asked == [1, count]


# -- whose kernels they are ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operators", "name"),
    [
        (("aten::add_",), "aten.add"),
        (("aten::cudnn_convolution", "aten::_convolution", "aten::convolution", "aten::conv2d"), "aten.convolution"),
        (("aten::add_", "aten::_convolution", "aten::convolution", "aten::conv2d"), "aten.convolution"),
        (("aten::native_batch_norm", "aten::_batch_norm_impl_index", "aten::batch_norm"), f"aten.{BATCH_NORM}"),
        (("aten::cudnn_batch_norm", "aten::_batch_norm_impl_index", "aten::batch_norm"), f"aten.{BATCH_NORM}"),
        (("aten::clamp_min_", "aten::relu_"), "aten.relu"),
        (("aten::copy_", "aten::_to_copy", "aten::to"), "aten._to_copy"),
        (("aten::copy_", "aten::clone", "aten::contiguous"), "aten.clone"),
        (("aten::_scaled_dot_product_cudnn_attention",), FLASH),
        (("aten::_scaled_dot_product_efficient_attention_backward",), f"{FLASH}_backward"),
        (("aten::convolution_backward",), "aten.convolution_backward"),
        (("aten::_foreach_mul_",), "aten._foreach_mul"),
        (("aten::_fused_adamw_",), "aten._fused_adamw"),
    ],
)
def test_a_kernel_belongs_to_the_outermost_operator_that_is_a_piece(operators, name):
    names = dict.fromkeys(
        (
            name,
            "aten.add",
            "aten.copy",
            "aten.mm",
            "aten.convolution",
            FLASH,
            f"{FLASH}_backward",
        )
    )
    found = kernel_times.group_by_operator(pieces(*names), [KernelTotal("kernel", 2.0, operators)])
    assert [(g.members, g.time_s) for g in found if g.name != kernel_times.LEFT_OVER] == [((0,), 2.0)]
    assert sum(g.time_s for g in found) == 2.0


def test_what_has_no_name_goes_by_its_kind_and_then_together():
    before = pieces("aten.mm", "aten.full", "aten.sin", "aten.cos", "aten.view")
    found = kernel_times.group_by_operator(
        before,
        [
            KernelTotal("gemm", 5.0, ("aten::addmm", "aten::linear")),
            KernelTotal("fill", 1.0, ("aten::fill_", "aten::zero_")),
            KernelTotal("mystery", 0.5, ("other::thing",)),
            KernelTotal("Memset (Device)", 0.25),
        ],
    )
    assert found == [
        KernelGroup("other gemm", (0,), 5.0),
        KernelGroup("other fill", (1,), 1.0),
        KernelGroup(kernel_times.LEFT_OVER, (2, 3), 0.75),
    ]


NAMES = ("aten.add", "aten.mm", f"aten.{BATCH_NORM}", "aten.view", "aten._softmax", "aten.clone")
OPERATORS = ("aten::add_", "aten::addmm", "aten::batch_norm", "aten::softmax", "aten::copy_", "x::y", "aten::clone")


@settings(max_examples=100, deadline=None)
@given(
    names=st.lists(st.sampled_from(NAMES), max_size=12),
    kernels=st.lists(st.tuples(st.floats(1e-6, 1.0), st.lists(st.sampled_from(OPERATORS), max_size=3)), max_size=12),
)
def test_every_second_and_every_piece_is_in_one_group(names, kernels):
    before = pieces(*names)
    groups = kernel_times.group_by_operator(before, [KernelTotal("k", seconds, tuple(ops)) for seconds, ops in kernels])
    assert sum(g.time_s for g in groups) == pytest.approx(sum(seconds for seconds, _ in kernels))
    members = [i for g in groups for i in g.members]
    assert sorted(members) == [i for i, p in before.items() if p.launches]


def test_generated_kernels_are_called_what_inductor_calls_them(residual):
    watch, code = residual
    piece_of = {node: piece for piece in watch.ops for node in piece.nodes}
    names = {kernel_times.make_generated_name(k, piece_of) for k in watch.kernels if k.call is None}
    written = set(re.findall(r"^cpp_(fused\w*)_\d+ = ", code, re.MULTILINE))
    # A CPU's other kernels also lay weights out anew, in the same loop.
    assert names & written == {f"fused_{BATCH_NORM}_add_mean_relu", "fused_convolution"}


def test_recorded_kernels_of_a_replay_find_those_that_were_seen_compiled(residual):
    """ResNet-50's kernels on an H200: the names are Inductor's there, the program is a small one of the same parts."""
    watch, _ = residual
    ms = RECORDED["resnet50"]["optimize"]["kernel_ms"]
    launches = [KernelTotal(name, took * 1e-3, ("aten::clone",) if "DtoD" in name else ()) for name, took in ms.items()]
    groups = {g.name: g for g in kernel_times.group_by_kernel(watch.kernels, watch.ops, launches, replayed=True)}
    assert sum(g.time_s for g in groups.values()) == pytest.approx(sum(ms.values()) * 1e-3)
    added = groups[f"fused_{BATCH_NORM}_add_relu"]
    exact = [took for name, took in ms.items() if re.fullmatch(rf"triton_poi_fused_{BATCH_NORM}_add_relu_\d+", name)]
    assert len(exact) > 5
    assert added.time_s == pytest.approx(sum(exact) * 1e-3)
    assert all(watch.kernels[i].call is None for i in added.members)
    calls = {i for i, k in enumerate(watch.kernels) if k.call is not None}
    assert set(groups[kernel_times.LIBRARY].members) == calls
    moved = sum(took for name, took in ms.items() if name.lower().startswith(("memset", "memcpy")))
    assert (groups[kernel_times.OUTSIDE].members, groups[kernel_times.OUTSIDE].time_s) == (
        (),
        pytest.approx(moved * 1e-3),
    )


def test_library_calls_that_were_launched_one_by_one_go_by_operator(residual):
    watch, _ = residual
    launches = [
        KernelTotal("nvjet", 2.0, ("aten::addmm",)),
        KernelTotal("sm90_xmma", 3.0, ("aten::cudnn_convolution", "aten::convolution")),
    ]
    found = {g.name: g for g in kernel_times.group_by_kernel(watch.kernels, watch.ops, launches, replayed=False)}
    assert (found["aten.addmm"].time_s, found["aten.convolution"].time_s) == (2.0, 3.0)
    assert len(found["aten.convolution"].members) == 3


# -- priced by it --------------------------------------------------------------------------------------------------


def side_of(*names):
    return estimate_program([piece(name, size=1 << 22) for name in names], lookup("h200"), replayed=True)


def test_a_group_takes_what_was_seen_and_the_rest_of_the_iteration_is_a_wait():
    side = side_of("aten.add", "aten.mul", "aten.sin")
    add, mul, sin = side.costs
    groups = [
        KernelGroup("a", (0, 1), 3 * (add.time_s + mul.time_s)),
        KernelGroup("b", (2,), sin.time_s),
        KernelGroup("c", (), 1e-6),
    ]
    found = set_kernel_times(side, groups, 1e-3)
    assert found.costs[0].time_s == pytest.approx(3 * add.time_s)
    assert found.costs[2].energy_j == pytest.approx(sin.energy_j)
    # Three times as long: the watts of board and SMs go on, bytes and operations are the same.
    assert found.costs[1].energy_j == pytest.approx(mul.energy_j + 2 * mul.lasting_j)
    assert side.static_w * mul.time_s < mul.lasting_j < mul.energy_j
    assert found.time_s == pytest.approx(1e-3)
    assert found.wait_j == pytest.approx(found.wait_s * side.static_w)
    assert found.other.time_s == 1e-6
    assert set_kernel_times(side, groups, 1e-9).wait_s == 0.0


def test_no_kernel_draws_more_than_the_board_sustains_and_one_that_never_ran_draws_nothing():
    side = side_of("aten.add", "aten.mul")
    found = set_kernel_times(
        side, [KernelGroup("a", (0,), side.costs[0].time_s / 20), KernelGroup("left over", (1,), 0.0)], 1e-3
    )
    assert found.costs[0].energy_j == pytest.approx(side.limit_w * found.costs[0].time_s)
    assert (found.costs[1].time_s, found.costs[1].energy_j) == (0.0, 0.0)
    assert found.costs[1].nbytes == side.costs[1].nbytes


def before_of(ms, iteration_s):
    """Launches of an eager program, milliseconds by operator."""
    return KernelProfile(
        kernels=tuple(KernelTotal(f"k{i}", took * 1e-3, (op,)) for i, (op, took) in enumerate(ms.items())),
        iteration_s=iteration_s,
    )


def test_a_trace_of_what_was_seen_adds_up_to_what_was_measured(residual):
    watch, _ = residual
    then = before_of(
        {
            "aten::convolution": 0.9,
            "aten::batch_norm": 1.2,
            "aten::relu_": 0.4,
            "aten::add": 0.3,
            "aten::mean": 0.02,
            "aten::max_pool2d_with_indices": 0.25,
            "aten::addmm": 0.03,
            "aten::copy_": 0.1,
        },
        5e-3,
    )
    now = KernelProfile(
        iteration_s=2.1e-3,
        kernels=(
            KernelTotal("nvjet_sm90", 0.9e-3),
            KernelTotal(f"triton_poi_fused_{BATCH_NORM}_max_pool2d_with_indices_relu_3", 0.05e-3),
            KernelTotal(f"triton_poi_fused_{BATCH_NORM}_relu_0", 0.2e-3),
            KernelTotal(f"triton_poi_fused_{BATCH_NORM}_add_relu_1", 0.3e-3),
            KernelTotal("Memset (Device)", 0.01e-3),
            KernelTotal(f"triton_per_fused_{BATCH_NORM}_add_mean_relu_2", 0.35e-3),
        ),
    )
    found = trace_rewrites(watch, lookup("h200"), replayed=True, profiles=(then, now))
    assert (found.before_s, found.after_s) == (pytest.approx(5e-3), pytest.approx(2.1e-3))
    assert sum(r.saved_s or 0.0 for r in found.rewrites) == pytest.approx(2.9e-3, rel=1e-9)
    assert sum(r.saved_j or 0.0 for r in found.rewrites) == pytest.approx(found.before_j - found.after_j, rel=1e-9)
    (waits,) = [r for r in found.rewrites if r.rule == "cuda_graph"]
    assert waits.saved_s == pytest.approx((5.0 - 3.2 - (2.1 - 1.81)) * 1e-3)
    assert waits.before.endswith("launches, the device waits 1.80 ms")
    (fused,) = [r for r in found.rewrites if r.before == "batch_norm + relu"]
    assert fused.basis == found.basis == "timed"
    # Its batch norm is one of three of a size: a third of what those took, and its relu likewise, less its own kernel.
    assert fused.saved_s == pytest.approx((1.2 + 0.4) / 3 * 1e-3 - 0.2e-3, rel=1e-6)
    (pooled,) = [r for r in found.rewrites if r.rule == "generated"]
    assert (pooled.before, pooled.saved_s) == ("max_pool2d_with_indices", pytest.approx(0.2e-3))
    assert 0 < pooled.saved_j < 0.2e-3 * 690, "the same work in fewer seconds"
    usual = trace_rewrites(watch, lookup("h200"), replayed=True)
    assert {r.basis for r in usual.rewrites} == {"modelled"}
    assert "generated" not in {r.rule for r in usual.rewrites}


def test_what_our_passes_replaced_is_priced_by_what_eager_torch_ran_there():
    def fn(q, k, v):
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    torch._dynamo.reset()
    watch = Compilation()
    with torch.no_grad():
        torch.compile(fn, backend=make_backend(watch, [fuse_attention], {}))(
            *(torch.randn(2, 4, 64, 64) for _ in range(3))
        )
    assert len(watch.replacements) == 1
    then = before_of({"aten::bmm": 0.5, "aten::_softmax": 0.3}, 1e-3)
    now = KernelProfile(kernels=(KernelTotal("flash_fwd", 0.1e-3),), iteration_s=0.2e-3)
    found = trace_rewrites(watch, lookup("h200"), replayed=True, profiles=(then, now))
    (ours,) = [r for r in found.rewrites if r.rule == "flash_attention"]
    assert (ours.by, ours.basis) == ("tessera", "timed")
    assert ours.saved_s == pytest.approx(0.8e-3 - 0.1e-3)
    assert (found.before_s, found.after_s) == (pytest.approx(1e-3), pytest.approx(0.2e-3))
    assert sum(r.saved_s or 0.0 for r in found.rewrites) == pytest.approx(0.8e-3, rel=1e-3)


# -- in `optimize` -------------------------------------------------------------------------------------------------


@pytest.fixture
def at_hand(monkeypatch):
    """An H200 that is said to be here; eager takes 4 ms and 2 J, compiled and replayed 1 ms and 0.5 J."""
    torch._dynamo.reset()
    eager, fast = (IterationMeasurement(time_s=s, energy_j=j) for s, j in ((4e-3, 2.0), (1e-3, 0.5)))
    taken = iter(in_turns(eager, fast))
    monkeypatch.setattr(variants.Variant, "is_replayed", property(lambda variant: variant.mode == "default"))
    monkeypatch.setattr(program_cost, "find_chip", lambda on, cuda: lookup(on or "h200"))
    monkeypatch.setattr("tessera.rewrite.variants.measure_iteration", lambda run, within_s: next(taken))


def small():
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
    return model, torch.randn(16, 32)


def test_the_trace_is_priced_by_what_was_seen_and_nothing_is_left_changed(at_hand, monkeypatch):
    model, x = small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    ran = []

    def profiled(iteration, count):
        for _ in range(count):
            iteration()
        ran.append(count)
        eager = len(ran) <= 2
        name = "gemm" if eager else "triton_poi_fused_relu_0"
        return trace_of([(1, 1, "aten::addmm", 0, 9)], [(name, 10 * i, 10 * i + 5, int(eager)) for i in range(count)])

    monkeypatch.setattr(kernel_times, "_run_profiler", profiled)
    fast = tessera.optimize(model, x, mode="train", variants=["default"])
    assert ran == [1, 5, 1, 5]
    assert fast.trace.basis == "timed"
    assert fast.trace.before_s == pytest.approx(4e-3)
    assert fast.trace.after_s == pytest.approx(1e-3)
    assert (fast.trace.before_j, fast.trace.after_j) == (pytest.approx(2.0), pytest.approx(0.5))
    assert sum(r.saved_j or 0.0 for r in fast.rewrites) == pytest.approx(1.5, rel=2e-3)
    assert "timed, divided by the model on h200" in str(fast)
    assert any("cost its host more" in note for note in fast.notes)
    assert "[inductor]" in str(fast), "said once, not on every line"
    assert rewrite_line(fast.rewrites[0]).endswith("[inductor, timed]")
    assert "[inductor, modelled on h200]" in rewrite_line(replace(fast.rewrites[0], basis="modelled"), usual="timed")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_without_kernels_the_model_prices_and_a_note_says_why(at_hand):
    fast = tessera.optimize(*small(), variants=["default"])
    assert fast.trace.basis == "modelled"
    (note,) = [n for n in fast.notes if n.startswith("savings are modelled alone")]
    assert "torch.profiler showed no kernels" in note
    assert math.isfinite(fast.trace.before_j)


@pytest.mark.parametrize("options", [{"budget_s": 0}, {"on": "h200"}, {"explain": False}])
def test_nothing_is_profiled_where_nothing_is_measured_or_the_chip_is_another(at_hand, monkeypatch, options):
    monkeypatch.setattr(kernel_times, "profile_kernels", lambda *given: pytest.fail("profiled"))
    fast = tessera.optimize(*small(), variants=["default"], **options)
    assert fast.chosen == "default"
    assert not any("modelled alone" in note for note in fast.notes)


def test_a_variant_that_launches_is_not_profiled(at_hand, monkeypatch):
    """CUPTI would stay in the process, and slow its launches."""
    monkeypatch.setattr(variants.Variant, "is_replayed", property(lambda variant: False))
    monkeypatch.setattr(kernel_times, "profile_kernels", lambda *given: pytest.fail("profiled"))
    fast = tessera.optimize(*small(), variants=["default"])
    assert fast.trace.basis == "modelled"
    assert any("would slow the launches" in note for note in fast.notes)


def test_profiling_can_be_switched_off(at_hand, monkeypatch):
    monkeypatch.setattr(kernel_times, "profile_kernels", lambda *given: pytest.fail("profiled"))
    fast = tessera.optimize(*small(), variants=["default"], explain="modelled")
    assert fast.trace.basis == "modelled"
    assert not any("profiled" in note for note in fast.notes)
    with pytest.raises(ArgumentError, match="explain='timed'"):
        tessera.optimize(*small(), explain="timed")


def side_with(*joules, wait_j=15.0, other_j=5.0):
    return program_cost.ProgramCost(
        costs=tuple(program_cost.OpCost(1.0, j, 0.1 * j, 8.0, 0.4 * j) for j in joules),
        wait_s=1.0,
        wait_j=wait_j,
        launches=len(joules),
        host_s=0.0,
        static_w=15.0,
        limit_w=100.0,
        watts_error=0.1,
        other=program_cost.OpCost(0.5, other_j),
    )


def test_measured_joules_are_shared_out_and_a_kernel_that_both_run_takes_the_same():
    before, after = side_with(50.0, 30.0, 20.0), side_with(25.0, 50.0, wait_j=0.0)
    then, now = program_cost.share_measured_joules(before, after, [(0, 1)], 130.0, 95.0)
    assert (then.energy_j, now.energy_j) == (pytest.approx(130.0), pytest.approx(95.0))
    assert then.costs[0].energy_j == pytest.approx(now.costs[1].energy_j)
    assert then.costs[0].energy_j > 50.0, "the second total lacks joules that the first has"
    assert then.costs[1].energy_j / then.costs[2].energy_j == pytest.approx(1.5)
    assert (then.wait_j, then.other.energy_j, now.wait_j) == (pytest.approx(15.0 * program_cost.WAIT_SHARE), 5.0, 0.0)
    share = then.costs[0].energy_j / 50.0
    assert then.costs[0].error_j == pytest.approx(5.0 * share)
    assert then.costs[0].lasting_j == pytest.approx(20.0 * share)
    assert (then.costs[0].nbytes, then.time_s) == (8.0, before.time_s)


def test_factors_on_the_joules_are_as_near_to_one_as_the_totals_allow():
    before, after = side_with(50.0, 40.0, wait_j=0.0), side_with(50.0, 20.0, wait_j=0.0)
    then, now = program_cost.share_measured_joules(before, after, [(0, 0)], 103.0, 82.0)

    def off(one):
        """The square of how far from 1 the factors are, where half of what is off is off in both."""
        own, later = (98.0 - 50.0 * one) / 40.0 - 1.0, (77.0 - 50.0 * one) / 20.0 - 1.0
        common = program_cost.COMMON_ERROR
        return (one - 1.0) ** 2 + (own**2 - 2 * common * own * later + later**2) / (1 - common**2)

    one = then.costs[0].energy_j / 50.0
    assert now.costs[0].energy_j == pytest.approx(then.costs[0].energy_j)
    assert off(one) == pytest.approx(min(off(0.5 + 0.001 * i) for i in range(1000)), abs=1e-5)
    assert off(one) < off(one + 0.01)


@pytest.mark.parametrize(
    ("same", "before_j", "after_j"),
    [([], 220.0, 10.0), ([(0, 0), (1, 1)], 130.0, 110.0), ([(0, 0)], 130.0, 1.0)],
    ids=["far from the model", "the same kernels, other joules", "nearly nothing"],
)
def test_totals_that_no_such_factors_have_are_shared_out_program_by_program(same, before_j, after_j):
    before, after = side_with(50.0, 30.0), side_with(50.0, 20.0)
    then, now = program_cost.share_measured_joules(before, after, same, before_j, after_j)
    assert (then.energy_j, now.energy_j) == (pytest.approx(before_j), pytest.approx(after_j))
    assert then.wait_j == pytest.approx(15.0 * before_j / 100.0)
    assert now.costs[1].energy_j == pytest.approx(20.0 * after_j / 90.0)


def test_without_both_totals_the_joules_are_the_models():
    before, after = side_with(50.0), side_with(40.0)
    assert program_cost.share_measured_joules(before, after, [], None, 90.0) == (before, after)
    assert program_cost.share_measured_joules(before, after, [], 90.0, None) == (before, after)


def test_iterations_longer_than_the_budget_has_room_for_are_not_profiled(at_hand, monkeypatch):
    monkeypatch.setattr(kernel_times, "profile_kernels", lambda *given: pytest.fail("profiled"))
    monkeypatch.setattr(optimize, "_PROFILE_S", 0.0)
    monkeypatch.setattr("tessera.rewrite.variants.VariantSearch.left_s", 9e-3)
    monkeypatch.setattr(variants, "guess_compile_s", lambda modules, *, trains: 0.0)
    fast = tessera.optimize(*small(), variants=["default"])
    assert any("budget_s leaves no time to profile" in note for note in fast.notes)


def test_what_is_left_in_the_rest_explains_nothing(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks" / "device"))
    monkeypatch.delitem(sys.modules, "optimize", raising=False)
    script = importlib.import_module("optimize")
    monkeypatch.delitem(sys.modules, "optimize")
    lines = [
        Rewrite(rule=rule, before="a", after="b", by="inductor", saved_s=s, saved_j=10 * s)
        for rule, s in (("fuse_elementwise", 0.3), ("cuda_graph", 0.5), ("rest", 0.2))
    ]
    tried = [
        variants.Variant(mode="eager", time_s=2.0, energy_j=20.0),
        variants.Variant(mode="default", time_s=1.0, energy_j=10.0),
    ]
    found = script.explained(SimpleNamespace(rewrites=lines, variants=tried, chosen="default"))
    assert found["explained_s"] == pytest.approx(0.8)
    assert found["told_over_true_j"] == pytest.approx(0.8)
    assert (found["rest_ms"], found["rest_j"]) == (pytest.approx(200.0), pytest.approx(2.0))
