"""The bound on the error of a product, the choice of its precision, and what each costs."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from op.test_lowprec import pair, relative, seen_products
from tessera import op
from tessera.errors import ArgumentError, ToleranceError
from tessera.op import bounded, casting, lowprec, product_cost
from tessera.op import error_bounds as bounds
from tessera.op.bounded import bounded_mm
from tessera.op.product_cost import layout_of, order_candidates, predict_energy_j

from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks" / "measure"))

import error_bounds


@pytest.fixture(autouse=True)
def _fresh():
    bounded.forget()
    yield
    bounded.forget()


# -- the bound -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp8", "bf16", "tf32"])
def test_the_probes_bracket_the_true_error(precision):
    a, b = pair(200, 300, 150)
    c = lowprec.mm(a, b, precision)
    found, true = bounds.measure_error(a, b, c), relative(c, a, b)
    assert true <= found.upper < 1.25 * true
    assert 0.85 * true < found.error < 1.15 * true


def test_the_probes_find_an_error_in_one_entry():
    """Rank one: the worst case for random probes, which Hutch++'s first half takes away."""
    a, b = pair(256, 256, 256)
    c = (a.double() @ b.double()).float()
    c[17, 200] += 30.0
    found = bounds.measure_error(a, b, c)
    assert relative(c, a, b) <= found.upper < 1.05 * relative(c, a, b)


@given(seed=st.integers(0, 10_000), rank=st.integers(1, 40), decay=st.floats(0.0, 2.0))
@settings(max_examples=40, deadline=None)
def test_the_upper_end_holds_for_errors_of_any_rank(seed, rank, decay):
    rng = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(96, 96, generator=rng, dtype=torch.float64) for _ in range(2))
    left, right = (torch.randn(96, rank, generator=rng, dtype=torch.float64) for _ in range(2))
    error = (left * torch.arange(1, rank + 1) ** -decay) @ right.T
    true = float(error.norm() / (a @ b).norm())
    assert true <= bounds.measure_error(a, b, a @ b + error).upper
    assert true <= bounds.bound_error(a, b, a @ b + error, 0.1, lossless=False)


def test_pieces_give_what_the_whole_gives(monkeypatch):
    a, b = pair(80, 90, 100)
    c = lowprec.mm(a, b, "bf16")
    whole = bounds.measure_error(a, b, c).upper
    monkeypatch.setattr(bounds, "_CHUNK", 700)
    assert bounds.measure_error(a, b, c).upper == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_probes_in_the_operands_own_type_see_what_fp64_sees(dtype):
    a, b = pair(160, 200, 180, dtype=dtype)
    c = lowprec.mm(a, b, "fp8")
    y = torch.randn(200, 32, dtype=torch.float64)
    exact = b.double() @ y
    assert float((bounds._multiply_columns(b, y) - exact).norm() / exact.norm()) < 1e-6
    assert relative(c, a, b) <= bounds.bound_error(a, b, c, 0.1, lossless=False) <= 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["normal", "constant", "cancelling", "bad_rows", "tiny"])
def test_norms_bound_what_sums_and_result_lose(kind, dtype):
    a, b = (x.to(dtype) for x in error_bounds.KINDS[kind](40, 48, 300, torch.Generator().manual_seed(5)))
    c = lowprec.mm(a, b, casting.FULL[dtype])
    assert error_bounds.relative(c, a.double() @ b.double()) <= bounds._bound_by_norms(a, b, c)


def test_products_that_underflow_to_nothing_are_noticed():
    a, b = (1e-25 * x for x in pair(96, 96, 96))
    c = lowprec.mm(a, b, "fp32")
    assert not c.any() and bounds.bound_error(a, b, c, 0.1, lossless=True) > 0.1
    assert bounds.bound_error(0 * a, b, 0 * c, 0.1, lossless=True) == 0.0


# -- the choice ----------------------------------------------------------------------------------------------------

COSTS = error_bounds.costs()


def chosen(a, b, **how):
    return bounded.multiply_within(a, b, **how)[1]


def choose(a, b, tolerance, **more):
    return chosen(a, b, tolerance=tolerance, costs=COSTS, **more)


@pytest.mark.parametrize(
    ("tolerance", "wanted"), [(5e-2, {"fp8", "fp8_row"}), (1e-2, {"bf16"}), (1e-3, {"fp16", "tf32"})]
)
def test_the_issues_tolerances_on_random_data(tolerance, wanted):
    choice = choose(*pair(256, 256, 256), tolerance)
    assert choice.precision in wanted
    assert choice.checked and choice.sampled_error <= tolerance
    assert choice.candidates[-1].verdict == "taken"


def test_no_violation_in_random_and_hard_cases():
    rows = error_bounds.run(160, seed=7)
    assert not [r for r in rows if r["chosen"] and r["true_error"] > r["tolerance"]]
    assert sum(r["chosen"] == r["best"] for r in rows) >= 0.9 * len(rows)
    assert {r["chosen"] for r in rows} >= {"fp8", "bf16", "fp32"}


def test_no_violation_with_scales_of_rows_in_the_product(monkeypatch):
    """As above, on the path of a GPU with fp8 units, with costs by which scales a row come first."""
    products = seen_products(monkeypatch)
    by_rows = {**COSTS, "fp8": COSTS["fp8_row"], "fp8_row": COSTS["fp8"]}
    rng = torch.Generator().manual_seed(11)
    rows = [error_bounds.case(index, rng, by_rows) for index in range(96)]
    assert not [r for r in rows if r["chosen"] and r["true_error"] > r["tolerance"]]
    assert sum(r["chosen"] == "fp8_row" for r in rows) >= 10
    assert sum(p["scale_a"].dim() == 2 for p in products) >= 20


def test_full_precision_runs_and_says_so():
    choice = choose(*pair(64, 64, 64), 1e-5)
    assert choice.precision == "fp32" and "nothing cheaper holds" in choice.why
    assert [c.precision for c in choice.candidates][-1] == "fp32"


def test_small_products_are_cheapest_as_they_are():
    choice = chosen(*pair(64, 64, 64, dtype=torch.bfloat16), tolerance=0.5)
    assert choice.precision == "bf16" and "cheapest" in choice.why


def test_a_named_precision_is_tried_first_then_finer_ones():
    a, b = pair(128, 128, 128)
    assert chosen(a, b, tolerance=5e-2, first="fp8").precision == "fp8"  # though a CPU emulates it
    seen = chosen(a, b, tolerance=1e-3, first="fp8")  # the seed guide's own example
    assert seen.precision == "fp32" and [c.precision for c in seen.candidates] == ["fp8", "fp32"]
    assert seen.candidates[0].verdict == "too coarse"
    seen = choose(a, b, 1e-3, first="fp8")
    assert seen.precision in ("tf32", "fp16") and "fp8 too coarse" in seen.why
    assert choose(a, b, 5e-2, first="bf16").precision == "bf16"


def test_allowed_limits_the_candidates_but_not_the_last_resort():
    a, b = pair(128, 128, 128)
    assert choose(a, b, 5e-2, allowed=("bf16",)).precision == "bf16"
    assert choose(a, b, 1e-4, allowed=("bf16",)).precision == "fp32"


@pytest.mark.parametrize("tolerance", [0.0, -1.0, float("nan"), float("inf"), 1e-9, "1%"])
def test_a_tolerance_that_cannot_be_met(tolerance):
    with pytest.raises(ToleranceError, match="error_tolerance"):
        choose(*pair(32, 32, 32), tolerance)


def test_fp64_operands_have_a_limit_too():
    a, b = pair(48, 48, 48, dtype=torch.float64)
    assert choose(a, b, 1e-12).precision == "fp64"
    assert choose(a, b, 1e-5).precision == "fp32"
    with pytest.raises(ToleranceError):
        choose(a, b, 1e-17)


@pytest.mark.parametrize("scale", [0.0, 1e-35, 1e-60])
def test_small_fp64_operands_are_as_exact_as_others(scale):
    """Their norms are not those of fp32, which loses squares below 1e-38; a matrix of zeros rounds nothing."""
    a, b = pair(48, 48, 48, dtype=torch.float64)
    choose(a * scale, b, 1e-12, allowed=())


def test_products_without_inner_terms_are_exact():
    empty = torch.zeros(3, 0, dtype=torch.float64)
    assert not op.matmul(empty, empty.T, error_tolerance=1e-12).any()


def test_fp64_zeros_that_cancelled_are_refused():
    """A sum that cancels may be anything in another order: that it is zero tells nothing of its error."""
    a, b = torch.ones(4, 8, dtype=torch.float64), torch.ones(8, 4, dtype=torch.float64)
    b[4:] = -1.0
    with pytest.raises(ToleranceError):
        choose(a, b, 0.1, allowed=())


def test_a_narrow_result_has_its_own_error():
    a, b = pair(64, 64, 64, dtype=torch.bfloat16)
    with pytest.raises(ToleranceError, match="bf16") as caught:
        choose(a, b, 1e-3)
    assert "fp32" in caught.value.fix
    assert choose(a, b, 1e-3, out_dtype=torch.float32).precision == "bf16"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_operands_that_are_not_finite_run_in_full(value):
    a, b = pair(16, 16, 16)
    b[3, 3] = value
    choice = choose(a, b, 5e-2)
    assert choice.precision == "fp32" and choice.sampled_error is None and "not finite" in choice.why


def test_zeros_meta_vectors_and_batches():
    a, b = pair(16, 16, 16)
    assert choose(a * 0, b, 1e-3).precision in ("fp8", "fp8_row")
    meta = choose(a.to("meta"), b.to("meta"), 1e-3)
    assert meta.precision == "fp32" and not meta.checked
    assert choose(a[:1], b, 0.2).shape == (1, 16, 16)
    many = torch.randn(4, 40, 48), torch.randn(4, 48, 40)
    assert choose(*many, 5e-2).precision in ("fp8", "fp8_row")
    assert choose(torch.randn(2, 3, 16), b, 5e-2).shape == (6, 16, 16)


def test_a_choice_is_kept_and_listed():
    a, b = pair(64, 64, 64)
    first = choose(a, b, 1e-2)
    assert all(choose(*pair(64, 64, 64, seed=s), 1e-2) is first for s in range(5))
    assert bounded.choices() == (first,)
    assert choose(a, b, 1e-3) is not first


def test_each_parameter_has_a_choice_of_its_own():
    a, b = pair(64, 64, 64)
    plain, bad = torch.nn.Parameter(b), torch.nn.Parameter(error_bounds.matched_outliers(64, 64, 64, None)[1])
    assert choose(a, plain, 5e-2) is choose(a, plain, 5e-2)
    assert choose(a, bad, 5e-2) is not choose(a, plain, 5e-2)
    assert choose(a, plain.mT, 5e-2) is choose(a, plain.mT, 5e-2)


def test_cheaper_precisions_are_tried_again_after_so_many_uses():
    hard, easy = pair(64, 64, 64), (torch.ones(64, 64), torch.ones(64, 64))
    assert choose(*hard, 1e-3, recheck_every=4).precision == "fp16"
    chosen = [choose(*easy, 1e-3, recheck_every=4).precision for _ in range(5)]
    assert chosen == ["fp16"] * 3 + ["fp8"] * 2


# -- data that change after the choice ------------------------------------------------------------------------------


def spoil(name, a, b, rng):
    """Operands of the same shape that no longer hold what held before."""
    if name == "scale jump":
        a[: len(a) // 2] *= 1e-6
        b[:, : b.shape[1] // 2] *= 1e6
    elif name == "outliers in one row":
        a[3] *= 1e4
    elif name == "sparse rows":
        a *= (torch.rand(len(a), generator=rng) < 0.05)[:, None]
        a[0, 0] = 1e3
    elif name == "cancellation":
        half = a.shape[1] // 2
        a[:, half:], b[half:] = -a[:, :half] * (1 + 1e-2), b[:half].clone()
    return a, b


CHANGES = ["random", "scale jump", "outliers in one row", "sparse rows", "cancellation"]
CALLS = {
    "matmul": op.matmul,
    "gemm": lambda a, b, **how: op.gemm(a, b, alpha=2.0, **how) / 2,
    "linear": lambda a, b, **how: op.linear(a, b.mT, **how),
    "stack": lambda a, b, **how: op.matmul(a.expand(2, *a.shape), b.expand(2, *b.shape), **how)[1],
    "tile": lambda a, b, **how: op.matmul(a, b, tile_shape=(64, 64, 32), **how),
}


@pytest.fixture
def on_gpu_costs(monkeypatch):
    """Candidates and costs as on a GPU, where narrower formats save energy."""
    monkeypatch.setattr(product_cost, "saves_energy", lambda device: True, raising=False)
    monkeypatch.setattr(product_cost, "predict_energy_j", lambda p, *_, **__: COSTS[p])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_bound_holds_at_every_call_whatever_the_data_do(on_gpu_costs, call, change):
    rng = torch.Generator().manual_seed(9)
    for _ in range(3):  # ones are exact in every format
        CALLS[call](torch.ones(96, 96), torch.ones(96, 96), error_tolerance=1e-3)
    assert bounded.choices()[-1].precision == "fp8"
    for _ in range(12):
        a, b = spoil(change, torch.randn(96, 96, generator=rng), torch.randn(96, 96, generator=rng), rng)
        assert relative(CALLS[call](a, b, error_tolerance=1e-3), a, b) <= 1e-3
        assert relative(CALLS[call](a, b, error_tolerance=1e-3, precision="fp8"), a, b) <= 1e-3


@pytest.mark.parametrize("at", [1, 16, 17, 33])
def test_a_bound_holds_when_the_data_change_at_any_call(on_gpu_costs, at):
    for _ in range(at):
        op.matmul(torch.ones(64, 64), torch.ones(64, 64), error_tolerance=1e-2)
    a, b = pair(64, 64, 64)
    assert relative(op.matmul(a, b, error_tolerance=1e-2), a, b) <= 1e-2


@pytest.mark.parametrize("call", CALLS)
def test_a_compiled_graph_holds_the_bound_when_the_data_change(on_gpu_costs, call):
    torch._dynamo.reset()
    run = torch.compile(lambda a, b: CALLS[call](a, b, error_tolerance=1e-3), backend="aot_eager", fullgraph=True)
    run(torch.ones(96, 96), torch.ones(96, 96))
    assert bounded.choices()[-1].precision == "fp8"
    for change in CHANGES:
        rng = torch.Generator().manual_seed(4)
        a, b = spoil(change, torch.randn(96, 96, generator=rng), torch.randn(96, 96, generator=rng), rng)
        assert relative(run(a, b), a, b) <= 1e-3


def test_gradients_hold_the_bound_when_the_data_change(on_gpu_costs):
    def run(a, b):
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
        op.matmul(a, b, error_tolerance=1e-3).backward(a.detach() @ b.detach())
        return a.grad, b.grad

    run(torch.ones(64, 64), torch.ones(64, 64))
    assert {c.precision for c in bounded.choices()} == {"fp8"}
    a, b = pair(64, 64, 64)
    to_a, to_b = run(a, b)
    assert relative(to_a, a @ b, b.mT) <= 1e-3 and relative(to_b, a.mT, a @ b) <= 1e-3


def test_full_precision_is_checked_at_every_call_too():
    a, b = pair(64, 64, 64)
    op.matmul(a, b, error_tolerance=1e-5)
    rng = torch.Generator().manual_seed(4)
    a, b = spoil("cancellation", a, b, rng)
    a[:, 32:] = -a[:, :32] * (1 + 2**-20)
    with pytest.raises(ToleranceError, match="error_tolerance"):
        op.matmul(a, b, error_tolerance=1e-5)


def test_a_cpu_never_takes_a_format_that_it_emulates():
    a, b = pair(512, 512, 512)
    for tolerance in (0.3, 1e-1, 1e-2):
        assert chosen(a, b, tolerance=tolerance).precision == "fp32"
        assert chosen(a.bfloat16(), b.bfloat16(), tolerance=max(tolerance, 1e-2)).precision == "bf16"


def test_under_compile_one_operator_chooses_and_multiplies():
    a, b = (x.requires_grad_() for x in pair(64, 64, 64))

    def step(x, y):
        return bounded_mm(x, y, tolerance=1e-2).relu().sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(a, b), (a, b))
    want = torch.autograd.grad((a @ b).relu().sum(), (a, b))
    assert len(bounded.choices()) == 3  # the product and its two gradients
    for x, y in zip(got, want, strict=True):
        assert float((x - y).norm() / y.norm()) < 0.2  # entries near zero pass relu's corner the other way


def test_bounded_products_of_every_shape_have_gradients_within_the_bound():
    for left, right in (((4, 6), (6, 5)), ((2, 3, 4, 6), (6, 5)), ((2, 3, 4, 6), (3, 6, 5)), ((1, 4, 6), (7, 6, 5))):
        a, b = torch.randn(left, requires_grad=True), torch.randn(right, requires_grad=True)
        c = bounded_mm(a, b, tolerance=1e-2)
        assert c.shape == (a @ b).shape
        seed = torch.randn(c.shape)
        for x, y in zip(torch.autograd.grad(c, (a, b), seed), torch.autograd.grad(a @ b, (a, b), seed), strict=True):
            assert x.shape == y.shape and float((x - y).norm() / y.norm()) < 1e-2


def test_fast_sums_are_tried_where_there_are_such_and_nobody_asked_for_others(monkeypatch):
    a, b = pair(256, 256, 256)
    assert choose(a, b, 5e-2).accumulate == "fp32"  # a CPU sums in fp32 whatever is asked
    monkeypatch.setattr(product_cost, "multiplies_fp8", lambda device: True)
    bounded.forget()
    choice = choose(a, b, 5e-2)
    assert (choice.precision, choice.accumulate) == ("fp8", "fast") and "with fast sums" in choice.why
    assert {(c.precision, c.accumulate) for c in choice.candidates} == {("fp8", "fast")}
    assert choose(a, b, 5e-2, accumulate="fp32").accumulate == "fp32"
    assert choose(a, b, 1e-2).accumulate == "fp32"  # bf16: no other sums are tried
    assert choose(a, b, 5e-2, first="fp8").accumulate == "fast"
    with pytest.raises(ArgumentError, match="accumulate"):
        choose(a, b, 5e-2, accumulate="slow")


@pytest.mark.parametrize("asked", [None, "fp32"])
def test_an_operator_runs_the_sums_that_were_chosen(asked, monkeypatch, on_gpu_costs):
    monkeypatch.setattr(product_cost, "multiplies_fp8", lambda device: True)
    ran, real = [], lowprec.mm
    monkeypatch.setattr(lowprec, "mm", lambda *args, **more: ran.append(args[2:4]) or real(*args, **more))
    a, b = pair(64, 64, 64)
    op.matmul(a, b, error_tolerance=6e-2, accumulate=asked)
    assert ran == [("fp8", "fp32" if asked else "fast")]  # what was checked is what is returned
    ran.clear()
    bounded_mm(a, b, tolerance=6e-2, accumulate=asked)
    assert ran[-1] == ("fp8", "fp32" if asked else "fast")
    ran.clear()
    op.matmul(a, b, precision="fp8")
    assert ran == [("fp8", "fp32")]


def test_a_prepared_weight_is_cheaper_and_chosen_anew():
    a, b = pair(64, 64, 64, dtype=torch.bfloat16)
    before = chosen(a, b, tolerance=0.5)
    casting.prepare(b, "fp8")
    after = chosen(a, b, tolerance=0.5)
    assert before is not after and len(bounded.choices()) == 2
    casting.forget(b)
    assert chosen(a, b, tolerance=0.5) is before
    one = {"on": "h200", "layout": "nt"}
    shape = (4096, 4096, 4096, 1, torch.bfloat16, torch.bfloat16)
    assert predict_energy_j("fp8", *shape, **one, prepared=True) < 0.95 * predict_energy_j("fp8", *shape, **one)


def test_layouts_have_the_names_of_the_time_model():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    assert layout_of(a, b) == "nn"
    assert layout_of(a, torch.ones(5, 4).mT) == "nt"
    assert layout_of(torch.ones(4, 3).mT, b) == "tn"


# Joules of n x n x n on an H200, 2026-11-15, fp8 (with fast sums) a day later (benchmarks/device/ops_precision.py). Of
# bf16 operands, row by row.
MEASURED = {
    "bf16": {2048: 0.01802, 4096: 0.13735, 8192: 1.08273},
    "fp8": {4096: 0.10151, 8192: 0.71292},
    "fp32": {2048: 0.21839, 4096: 1.76681, 8192: 14.50866},
    "tf32": {2048: 0.03833, 4096: 0.28617, 8192: 2.16470},
}
# Products and casts alone, in millijoules: fast ones and casts of 2026-11-16, the others a day older.
ALONE = {
    4096: {"fp8": 85.07, "fp8 fast": 79.19, "fp8_row": 87.63, "fp8_row fast": 78.65, "result": 10.77},
    8192: {"fp8": 633.49, "fp8 fast": 627.60, "fp8_row": 634.51, "fp8_row fast": 593.06, "result": 42.87},
}
CAST = {
    4096: {"fp8": (8.86, 10.43), "fp8_row": (8.76, 16.53)},
    8192: {"fp8": (36.21, 41.83), "fp8_row": (34.18, 75.22)},
}


@pytest.mark.parametrize("precision", MEASURED)
def test_costs_come_within_a_tenth_of_what_was_measured(precision):
    dtype = torch.float32 if precision in ("fp32", "tf32") else torch.bfloat16
    for n, joules in MEASURED[precision].items():
        sums = "fast" if precision == "fp8" else "fp32"
        assert predict_energy_j(precision, n, n, n, 1, dtype, dtype, accumulate=sums) == pytest.approx(joules, rel=0.1)


@pytest.mark.parametrize("precision", ["fp8", "fp8_row"])
@pytest.mark.parametrize("sums", ["fp32", "fast"])
def test_costs_of_fp8_are_those_of_its_parts(precision, sums):
    way = precision if sums == "fp32" else f"{precision} fast"
    for n in CAST:
        (along, across), product = CAST[n][precision], ALONE[n][way]
        told = functools.partial(
            predict_energy_j, precision, n, n, n, 1, torch.bfloat16, torch.bfloat16, accumulate=sums, row_scaling=True
        )
        assert 1e3 * told(prepared=True) == pytest.approx(product + along, rel=0.1)
        assert 1e3 * told() == pytest.approx(product + along + across, rel=0.125)
        assert 1e3 * told(layout="nt") == pytest.approx(product + 2 * along, rel=0.125)


def test_scales_a_row_are_cheaper_in_the_product_and_dearer_after_it():
    """Where rows lie along memory: no launch that mends, or one over the result more. Columns take a pass more."""
    for n in CAST:
        told = functools.partial(
            predict_energy_j, m=n, n=n, k=n, batch=1, dtype=torch.bfloat16, out_dtype=torch.bfloat16
        )
        assert told("fp8") < told("fp8_row")
        told = functools.partial(told, layout="nt")
        after = told("fp8_row", row_scaling=False)
        assert told("fp8_row") < told("fp8") < after
        assert 1e3 * (after - told("fp8_row")) == pytest.approx(ALONE[n]["result"], rel=0.3)
        assert 0.9 * told("fp8") < told("fp8", accumulate="fast") < told("fp8")
        wide = functools.partial(predict_energy_j, m=n, n=n, k=n, batch=1, dtype=torch.float32, out_dtype=torch.float32)
        assert wide("fp8_row", row_scaling=True) < wide("fp8_row") == wide("fp8_row", row_scaling=False)


@pytest.mark.parametrize("n", [2048, 4096, 8192])
def test_a_loose_tolerance_takes_the_rows_scales_where_the_product_has_them(n, monkeypatch):
    monkeypatch.setattr(product_cost, "multiplies_fp8", lambda device: True)
    meta = (
        torch.empty(n, n, device="meta", dtype=torch.bfloat16),
        torch.empty(n, n, device="meta", dtype=torch.bfloat16),
    )
    asked = {"allowed": None, "first": None, "accumulate": None, "costs": None}
    for b, first in ((meta[1], "fp8"), (meta[1].mT, "fp8_row")):  # columns cost a pass more
        ways = order_candidates(meta[0], b, torch.bfloat16, **asked)
        assert ways[0][:2] == (first, "fast") and ways[-1].precision == "bf16"
        wide = order_candidates(meta[0].float(), b.float(), torch.float32, **asked)
        assert wide[0].precision == "fp8"  # with results that the product is not known to scale


def test_costs_are_ordered_as_measured_on_the_h200():
    joules = {p: predict_energy_j(p, 8192, 8192, 8192, 1, torch.bfloat16, torch.bfloat16) for p in ("fp8", "bf16")}
    assert joules["fp8"] < 0.75 * joules["bf16"]  # casts included
    product = predict_energy_j("bf16", 8192, 8192, 8192, 1, torch.bfloat16, torch.bfloat16)
    assert product == pytest.approx(1.13, rel=0.1)  # 1.65 ms at 689 W (shared/design.md)
    small = {p: predict_energy_j(p, 64, 64, 64, 1, torch.bfloat16, torch.bfloat16) for p in ("fp8", "bf16")}
    assert small["fp8"] > small["bf16"]


@pytest.mark.parametrize("how", [{"precision": p} for p in ("fp8", "fp8_row", "bf16")] + [{"error_tolerance": 1e-2}])
@pytest.mark.parametrize(
    ("left", "right"),
    [((0, 7), (3, 7, 4)), ((3, 0, 7), (7, 4)), ((2, 5, 0), (0, 4)), ((0, 5, 7), (0, 7, 4)), ((2, 0), (3, 0, 4))],
)
def test_products_of_nothing_have_the_shape_torch_gives_them(how, left, right):
    a, b = torch.randn(left), torch.randn(right)
    assert torch.equal(op.matmul(a, b, **how), a @ b)


def test_gradients_beyond_every_tolerance_run_in_full_precision():
    """Sums that cancel to nothing: no precision keeps them, and a backward is no place to refuse."""
    a = torch.tensor([[1.0, 2.0]], requires_grad=True)
    b = torch.tensor([[1.0, 1.0], [0.5, 2.0]])
    grad = torch.tensor([[1e8, -1e8 + 1]])
    y = bounded_mm(a, b, tolerance=1e-6, first=None)
    y.backward(grad)
    assert torch.isfinite(a.grad).all()
    nothing = torch.randn(0, 4, requires_grad=True)
    op.matmul(torch.randn(2, 3, 0), nothing, error_tolerance=1e-2).sum().backward()
    assert nothing.grad.shape == (0, 4)
