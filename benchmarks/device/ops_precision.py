"""Error-bounded precision on the GPU at hand: numerics of the quantise kernels, violations, chosen precision, joules.

    PYTHONPATH=src:.carry/site python benchmarks/device/ops_precision.py RESULTS.json [--budget-s 160] [--quick]
        [--only quantise products layers random]

Four parts, in order of what matters if time runs out. quantise: the kernels bit for bit against torch's own cast, rows
scaled in the product against rows scaled after it, what fp8's fast sums lose; if named, joules of casts cut otherwise.
products: joules of one square product in each precision, with and without the casts, and the native row-wise product
beside ours. layers: the linear layers of GPT-2, BERT and a Llama, freshly initialised and with outlier channels, at three
tolerances: the way that its predicted joules chose, true error against fp64, violations, true joules of the choice
against fp32 and bf16. random: cases of the kinds of benchmarks/measure/error_bounds.py, a seed of their own, every other one with
costs by which scales a row come first, some with bf16 results. "fp8 fast" is fp8 with the tensor core's fast sums.

With `--only` the parts that are named are run and take the place of theirs in RESULTS.json, whose others stay.
`--only products` measures only bf16, fp8 and its parts at 4096 and 8192, in turns there and back: every row is the mean
of two that lie as far from one end as from the other. It replaces these sizes' rows of bf16 operands, all of them, since
they are compared with one another. Expected on an H200: 67 s for kernels and products, 45 for the layers, 25 for 1,000
cases; alone, 15 for `quantise`, 30 for `products`. `--quick` is a rehearsal on tiny shapes that also runs on a CPU, where
nothing is measured in joules. No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics as st
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from measure import error_bounds
from ops_restart import dead, replace_result
from tessera.errors import ToleranceError
from tessera.op import bounded, casting, lowprec
from tessera.op.kernels import guessed_cast
from tessera.op.kernels import quantize as kernels
from tessera.op.product_cost import predict_energy_j

Row = dict[str, Any]
Step = Callable[[], Any]
CASES_SEED = 3  # 1 tuned the constants, 2 is reported from the CPU
SETTLE_S, MEASURED_S, GRAPH_S = 0.2, 0.3, 0.004
CAPPED_S = 0.5  # more to settle where the power limit holds: its controller takes about that long to come to rest
WRITE_EVERY_S = 2.0
# In turns: two of these are one row, and the rows beside it draw about the same.
TURN_SETTLE_S, TURN_CAPPED_S, TURN_S = 0.15, 0.25, 0.2
FAST = " fast"
PARTS = {"quantise": ("quantise", "guessed", "rows", "sums", "cast"), "products": ("joules",), "layers": ("layer", "layer joules"),
         "random": ("random",)}  # fmt: skip
TURNED = (4096, 8192)


@dataclass
class Run:
    """Where results go, and how much time is left."""

    out: Path
    budget_s: float
    quick: bool
    device: str
    start: float = field(default_factory=time.perf_counter)
    results: Row = field(default_factory=lambda: {"rows": [], "skipped": [], "errors": []})
    waiting: deque[Any] = field(default_factory=deque)
    lost: str = ""
    wrote: float = 0.0

    def left(self) -> float:
        return self.budget_s - (time.perf_counter() - self.start)

    def write(self) -> None:
        replace_result(self.out, self.results)

    def add(self, row: Row) -> None:
        self.results["rows"].append(row)
        if time.perf_counter() - self.wrote > WRITE_EVERY_S:  # the whole file each time
            self.write()
            self.wrote = time.perf_counter()

    def guarded(self, what: str, fn: Step, needs_s: float = 1.0) -> Any:
        """Run it unless time is short; a failure is written down, and the others go on."""
        if self.left() < needs_s or self.lost:
            self.results["skipped"].append(what)
            return None
        try:
            return fn()
        except Exception as e:  # noqa: BLE001 - one failure must not cost the others
            self.results["errors"].append(f"{what}: {type(e).__name__}: {str(e)[:400]}")
            print(f"  {what} failed: {type(e).__name__}: {str(e)[:200]}")
            traceback.print_exc(limit=-3)
            self.lost = dead()  # nothing more can run in this process then
            self.write()
            return None

    # -- joules: a CUDA graph replayed in steady state; the sensor is read some rows later, so that nobody waits for it

    def measure(self, row: Row, fn: Step, settled: bool = False) -> None:
        """Queue a row; `settled` waits longer for a power limit to come to rest."""
        if self.device == "cpu":
            fn()
            begin = time.perf_counter()
            fn()
            self.add({**row, "ms": 1e3 * (time.perf_counter() - begin), "J": None})
            return
        replay, copies = replayed(fn)
        self.waiting.append((row, *spent(replay, settled, SETTLE_S, CAPPED_S, MEASURED_S), copies))
        self.flush(4)

    def flush(self, left: int = 0) -> None:
        from record_models import figures

        while len(self.waiting) > left:
            row, scope, n, state, copies = self.waiting.popleft()
            self.add({**row, **figures(scope, n * copies, state)})


def replayed(fn: Step) -> tuple[Step, int]:
    """A graph of several calls, to be replayed, and how many are in it."""
    from record_kernels import capture, quick_time

    for _ in range(2):
        fn()
    copies = max(1, min(200, round(GRAPH_S / quick_time(fn))))
    return capture([fn], copies, keep=False).replay, copies


def spent(replay: Step, settled: bool, settle_s: float, capped_s: float, seconds: float) -> tuple[Any, int, Row]:
    """The energy scope of a graph in steady state, not yet read."""
    from record_kernels import quick_time
    from record_models import nvml_state, states_of, steady

    for wait_s in (settle_s, capped_s):
        end = time.perf_counter() + wait_s
        while time.perf_counter() < end:
            replay()
            replay()
            torch.cuda.synchronize()
        if not settled or not states_of([nvml_state()])["throttle"] & 4:
            break
    # By the graph: a call of several launches takes longer on the host than on the device.
    return steady(replay, quick_time(replay), seconds, reads=2)


# -- 1. the quantise kernels -------------------------------------------------------------------------------------


def check_kernels(run: Run) -> None:
    shapes = ((3, 5), (17, 33), (64, 64)) if run.quick else ((1, 1), (7, 20011), (1000, 1000), (1024, 4096), (129, 65))
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for name in ("fp8", "fp16"):
                if name == "fp16" and dtype == torch.float16:
                    continue
                what = f"quantise {name} of {dtype} {shape}"
                run.guarded(what, lambda a=(shape, dtype, name): check_kernel(run, *a))  # type: ignore[misc]


def check_kernel(run: Run, shape: tuple[int, int], dtype: torch.dtype, name: str) -> None:
    rng = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    x = torch.randn(shape, generator=rng) * torch.exp(3 * torch.randn(shape, generator=rng))
    x = (x.clamp(-6e4, 6e4) if dtype == torch.float16 else x).to(dtype)
    if x.numel() > 8:
        x[0, 0], x[-1, -1] = float("nan"), float("inf")
    differing = 0
    for view in (x, x.t(), x[:, ::2]):
        for by_row in (False, True):
            want, want_scale = casting.quantize(view, name, by_row, (1, 1))  # torch's own cast, on the CPU
            where = view.to(run.device)
            if run.device == "cpu":  # no kernel there: the script's own logic is rehearsed
                got, scale = casting.quantize(where, name, by_row, (16, 16))
            else:
                got, scale = kernels.quantize(where, name, by_row=by_row, pad=(16, 16))
            rows, cols = view.shape
            bits = torch.uint8 if name == "fp8" else torch.int16
            same = got[:rows, :cols].cpu().contiguous().view(bits) == want.view(bits)
            both_nan = got[:rows, :cols].cpu().float().isnan() & want.float().isnan()
            differing += int((~(same | both_nan)).sum())
            differing += int((scale[:rows].cpu() if by_row else scale.cpu()).ne(want_scale).sum())
            padding = got[rows:].float().abs().sum() + got[:, cols:].float().abs().sum()
            differing += int(padding.item() != 0)
    run.add({"part": "quantise", "format": name, "from": str(dtype), "shape": shape, "differing": differing})


def check_centred(run: Run) -> None:
    """The casts of fp8 products by a guessed scale: bit for bit torch's cast by the scale that they give."""
    # Each shape and type is some ten variants to compile.
    shapes = ((3, 5), (17, 33)) if run.quick else ((1, 1), (1024, 4096), (129, 65))
    for shape in shapes:
        for dtype in (torch.bfloat16,) if shape != shapes[-1] else (torch.bfloat16, torch.float32, torch.float16):
            for kind in GUESSED:
                what = f"guessed scale of {dtype} {shape}, {kind}"
                run.guarded(what, lambda a=(shape, dtype, kind): one_centred(run, *a))  # type: ignore[misc]


GUESSED: dict[str, Callable[[torch.Tensor], None]] = {
    "ordinary": lambda x: None,
    "heavy tails": lambda x: x.mul_(torch.exp(2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))),
    "NaN": lambda x: x[0, :1].fill_(math.nan),
    "inf": lambda x: x[-1, -1:].fill_(math.inf),
    "one far off": lambda x: x[-1, -1:].fill_(3e4),
    "zeros": lambda x: x.zero_(),
    "small": lambda x: x.mul_(1e-4),
}  # fmt: skip


def one_centred(run: Run, shape: tuple[int, int], dtype: torch.dtype, kind: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0] * 1000 + shape[1]))
    GUESSED[kind](x)
    x = (x.clamp(-6e4, 6e4) if kind == "heavy tails" else x).to(dtype)
    other = torch.randn(shape[1], 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    differing, scaled = 0, []
    for view in (x, x.t(), x[:, ::2]):
        for given in ([view], [other, view]):
            there = [m.to(run.device) for m in given]
            if run.device == "cpu":  # no kernel there: the script's own logic is rehearsed
                found = [casting.quantize(m, "fp8", False, (16, 16)) for m in there]
            else:
                found = guessed_cast.cast_by_guess(there, (16, 16))
            for matrix, (got, scale) in zip(given, found, strict=True):
                rows, cols = matrix.shape
                wide = matrix.float() / scale.cpu()
                want = torch.where(wide.isfinite(), wide.clamp(-448, 448), torch.nan).to(torch.float8_e4m3fn)
                mine = got[:rows, :cols].cpu().contiguous()
                both_nan = mine.float().isnan() & want.float().isnan()
                differing += int((~((mine.view(torch.uint8) == want.view(torch.uint8)) | both_nan)).sum())
                differing += int((got[rows:].float().abs().sum() + got[:, cols:].float().abs().sum()).item() != 0)
                if matrix is view:
                    scaled.append(float(wide.nan_to_num(0, 0, 0).abs().max()))
    run.add({"part": "guessed", "from": str(dtype), "shape": shape, "kind": kind, "differing": differing,
             "largest_scaled": max(scaled)})  # fmt: skip


def fast_sums(run: Run) -> None:
    """What the short sums of fp8 lose beside fp32 ones, by their length."""
    for k in (64, 256) if run.quick else (512, 4096, 32768, 131072):
        a, b = torch.randn(256, k, device=run.device), torch.randn(k, 256, device=run.device)
        wide, fast = (product(a, b, way) for way in ("fp8", "fp8 fast"))
        run.add({"part": "sums", "k": k, "lost": float((fast - wide).norm() / wide.norm())})


def check_rows(run: Run) -> None:
    """The product that multiplies by its rows' scales itself against the one whose result is multiplied afterwards."""
    shapes = (
        ((33, 47, 65), (5, 16, 32)) if run.quick else ((33, 47, 65), (1, 5, 300), (1000, 1000, 1000), (4096, 512, 2048))
    )
    for shape in shapes:
        for out in (torch.bfloat16, torch.float32, torch.float16):
            for sums in ("fp32", "fast"):
                call = lambda shape=shape, out=out, sums=sums: one_by_rows(run, shape, out, sums)  # noqa: E731
                run.guarded(f"rows of {shape} to {out}, {sums} sums", call)


def one_by_rows(run: Run, shape: tuple[int, int, int], out: torch.dtype, sums: str) -> None:
    m, n, k = shape
    a = torch.randn(m, k, device=run.device) * torch.logspace(-3, 1, m, device=run.device)[:, None]
    b = torch.randn(k, n, device=run.device) * torch.logspace(1, -2, n, device=run.device)
    where = torch.device(run.device, 0) if run.device == "cuda" else torch.device("cpu")
    inside, asked = lowprec.mm(a, b, "fp8_row", sums, out).double(), lowprec.has_row_scaling
    lowprec.has_row_scaling = lambda *_: False
    try:
        after = lowprec.mm(a, b, "fp8_row", sums, out).double()
    finally:
        lowprec.has_row_scaling = asked
    # Of each column, since theirs are the sizes that differ most within a row; fp16's least step lies beneath.
    off = (inside - after).norm(dim=0) / (after.norm(dim=0) + 6e-8 * m**0.5)
    worst = float(off.max())
    most = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}.get(out, 1e-5) + (1e-2 if sums == "fast" else 1e-5)
    run.add({
        "part": "rows", "shape": shape, "out": str(out), "sums": sums, "in_product": asked(where, out),
        "worst": worst, "wrong": not worst <= most,
    })  # fmt: skip


def cut_otherwise(run: Run) -> None:
    """Joules of casts as they are cut, and of others that could be."""
    for n in (64,) if run.quick else TURNED:
        x = torch.randn(n, n, device=run.device).bfloat16()
        rows, turned = partial(quantized, x, True), partial(quantized, x.mT, True)
        for at_once in (16384, 8192, 4096):
            cast_joules(run, rows, n, f"{at_once} elements at once", kernels, "AT_ONCE", at_once)
        for tile in ((64, 128), (128, 64)):
            named = {**kernels.AMAX_TILES, "columns": tile}
            cut = f"transposing, largest values of {tile[0]} x {tile[1]}"
            cast_joules(run, turned, n, cut, kernels, "AMAX_TILES", named)
        for registers in (64, 80):
            cast_joules(run, partial(both, x), n, f"both, {registers} registers", guessed_cast, "REGISTERS", registers)
        for tile in ((128, 128), (128, 64)):
            cast_joules(run, partial(both, x), n, f"both, {tile[0]} x {tile[1]} across", guessed_cast, "ACROSS", tile)
    if run.waiting:
        run.guarded("the last joules of casts", run.flush, needs_s=0.0)


def cast_joules(run: Run, call: Step, n: int, named: str, module: Any, constant: str, value: Any) -> None:
    """It is read when a cast is launched: the graph keeps what was launched."""
    before = getattr(module, constant)
    row: Row = {"part": "cast", "n": n, "cut": named, "as_is": before == value}
    setattr(module, constant, value)
    try:
        run.guarded(f"cast of {n}, {named}", lambda: run.measure(row, call))
    finally:
        setattr(module, constant, before)


def quantized(x: torch.Tensor, by_row: bool) -> Any:
    return kernels.quantize(x, "fp8", by_row=by_row) if x.is_cuda else casting.quantize(x, "fp8", by_row, (1, 1))


def both(x: torch.Tensor) -> Any:
    return guessed_cast.cast_by_guess([x, x.mT]) if x.is_cuda else [quantized(m, False) for m in (x, x.mT)]


# -- 2. joules of a square product -------------------------------------------------------------------------------


WAYS = ("fp8", "fp8 fast", "fp8_row fast")


def product(a: torch.Tensor, b: torch.Tensor, way: str, out: torch.dtype | None = None) -> torch.Tensor:
    """The product in a precision, with fast sums where its name says so."""
    return lowprec.mm(a, b, way.removesuffix(FAST), "fast" if way.endswith(FAST) else "fp32", out)


def alone(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[str, str, Step]]:
    """The parts of an fp8 product: casts, and torch's own product of what they give."""
    x, w = (kernels.quantize(y, "fp8", by_row=False) for y in (a, b.mT))
    xr, wr = (kernels.quantize(y, "fp8", by_row=True) for y in (a, b.mT))
    one = {"scale_a": x[1].reshape(()), "scale_b": w[1].reshape(()), "out_dtype": torch.bfloat16}
    rows = {"scale_a": xr[1][:, None], "scale_b": wr[1][None, :], "out_dtype": torch.bfloat16}
    for fast, label in ((False, ""), (True, FAST)):
        counted = "the product alone"
        yield f"fp8{label}", counted, partial(torch._scaled_mm, x[0], w[0].t(), use_fast_accum=fast, **one)
        yield (
            f"fp8_row native{label}",
            counted,
            partial(torch._scaled_mm, xr[0], wr[0].t(), use_fast_accum=fast, **rows),
        )
    yield "fp8", "one cast alone", partial(guessed_cast.cast_by_guess, [a])
    yield "fp8", "one transposing cast alone", partial(guessed_cast.cast_by_guess, [b.mT])
    yield "fp8", "both casts alone", partial(guessed_cast.cast_by_guess, [a, b.mT])
    far = a.clone()
    far[-1, -1] = 3e4
    yield "fp8", "both casts alone, one value far off", partial(guessed_cast.cast_by_guess, [far, b.mT])
    yield "fp8", "both casts alone, largest values first", lambda: [quantized(x, False) for x in (a, b.mT)]
    yield "fp8_row", "one cast alone", partial(quantized, a, True)
    yield "fp8_row", "one transposing cast alone", partial(quantized, b.mT, True)


def product_calls(n: int, device: str) -> Iterator[tuple[str, str, Step]]:
    """(precision, what is counted, call); operands are bf16 as in a model, or fp32."""
    wide = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    half = wide[0].bfloat16(), wide[1].bfloat16()
    with torch.no_grad():
        yield "bf16", "bf16 operands", lambda: lowprec.mm(*half, "bf16")
        yield "torch.mm", "bf16 operands", lambda: torch.mm(*half)
        for p in WAYS:
            yield p, "bf16 operands, both cast", lambda p=p: product(*half, p)  # type: ignore[misc]
        for p in WAYS:
            casting.prepare(half[1], p.removesuffix(FAST))
            yield p, "bf16 operands, weight prepared", lambda p=p: product(*half, p)  # type: ignore[misc]
        casting.forget(half[1])
        for p in ("fp32", "tf32", "fp16", "bf16", "fp8", "fp8_row"):
            yield p, "fp32 operands, casts included", lambda p=p: lowprec.mm(*wide, p)  # type: ignore[misc]
        if device == "cuda":
            yield from alone(*half)


def joules(run: Run) -> None:
    for n in (64,) if run.quick else (4096, 8192, 2048):
        run.guarded(f"products of {n}", lambda n=n: joules_of(run, n), needs_s=3.0)  # type: ignore[misc]
        if run.waiting:
            run.guarded(f"the last joules of {n}", run.flush, needs_s=0.0)


def joules_of(run: Run, n: int) -> None:
    for precision, counted, fn in product_calls(n, run.device):
        row = product_row(run, n, precision, counted)
        run.guarded(f"joules {n} {precision} {counted}", partial(run.measure, row, fn, heavy(row)), needs_s=3.0)


def product_row(run: Run, n: int, precision: str, counted: str) -> Row:
    row: Row = {"part": "joules", "n": n, "precision": precision, "counted": counted}
    if precision.removesuffix(FAST) in casting.PRECISIONS and "operands" in counted:
        dtype = torch.bfloat16 if counted.startswith("bf16") else torch.float32
        row["J_predicted"] = predicted(run, precision, n, dtype, "prepared" in counted)
    return row


def heavy(row: Row) -> bool:
    """Whether it may meet the power limit."""
    return row["n"] >= 4096 and (row["counted"].startswith("bf16 operands") or "product alone" in row["counted"])


def predicted(run: Run, way: str, n: int, dtype: torch.dtype, kept: bool) -> float:
    sums = "fast" if way.endswith(FAST) else "fp32"
    inside = lowprec.has_row_scaling(torch.device("cuda", 0), dtype) if run.device == "cuda" else None
    return predict_energy_j(
        way.removesuffix(FAST), n, n, n, 1, dtype, dtype, accumulate=sums, prepared=kept, row_scaling=inside
    )


def turned_calls(n: int, device: str) -> Iterator[tuple[str, str, Step]]:
    """What the saving of fp8 at a size is made of; graphs of all are held at once, so that prepared weights stay."""
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    kept = b.clone()
    for p in ("fp8", "fp8_row"):
        casting.prepare(kept, p)
    yield "bf16", "bf16 operands", lambda: lowprec.mm(a, b, "bf16")
    for p in ("fp8 fast", "fp8_row fast"):
        yield p, "bf16 operands, weight prepared", partial(product, a, kept, p)
        yield p, "bf16 operands, both cast", partial(product, a, b, p)
    if device == "cuda":
        parts = [(p, counted, fn) for p, counted, fn in alone(a, b) if "cast" in counted or p.endswith(FAST)]
        yield from sorted(parts, key=lambda part: "cast" in part[1])  # those at the power limit beside one another


def in_turns(run: Run) -> None:
    for n in (64,) if run.quick else TURNED:
        run.guarded(f"products of {n} in turns", lambda n=n: turns_of(run, n), needs_s=8.0)  # type: ignore[misc]


@torch.no_grad()
def turns_of(run: Run, n: int) -> None:
    """Every call there and back, from graphs that were captured once."""
    calls = list(turned_calls(n, run.device))  # they hold what their graphs read
    rows = [product_row(run, n, p, counted) for p, counted, _ in calls]
    if run.device == "cpu":
        for row, (_, _, fn) in zip(rows, calls, strict=True):
            run.measure(row, fn)
        return
    from record_models import figures

    graphs = [replayed(fn) for _, _, fn in calls]
    there = list(range(len(calls)))
    found: list[list[Row]] = [[] for _ in calls]
    unread: deque[Any] = deque()

    def read(left: int) -> None:  # some rows later, so that nobody waits for the sensor
        while len(unread) > left:
            at, *measured = unread.popleft()
            found[at].append(figures(*measured))

    for i in (*there, *reversed(there)):
        replay, copies = graphs[i]
        scope, times, state = spent(replay, heavy(rows[i]), TURN_SETTLE_S, TURN_CAPPED_S, TURN_S)
        unread.append((i, scope, times * copies, state))
        read(4)
    read(0)
    for row, turns in zip(rows, found, strict=True):
        run.add({**row, **mean_of(turns)})


def mean_of(turns: list[Row]) -> Row:
    """One row of several measurements."""
    mean = {name: st.fmean(turn[name] for turn in turns) for name in ("ms", "W", "J", "sm_mhz", "temp_c")}
    error = sum(turn["J_error"] ** 2 for turn in turns) ** 0.5 / len(turns)
    capped = 0
    for turn in turns:
        capped |= turn["throttle"]
    return {**mean, "J_error": error, "throttle": capped, "J_turns": [turn["J"] for turn in turns]}


# -- 3. layers of models -----------------------------------------------------------------------------------------


def relative(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Against the whole product in fp64."""
    exact = a.double() @ b.double()
    size, error = float(exact.norm()), float((c.double() - exact).norm())
    return 0.0 if error == 0 else error / size if size > 0 else float("inf")


def bounded_row(
    a: torch.Tensor, b: torch.Tensor, tolerance: float, costs: Any = None, out: torch.dtype | None = None, **more: Any
) -> Row:
    """What is chosen, by `costs` or else by the predicted joules of this very product, and how far off it is."""
    bounded.forget()
    row = {**more, "shape": (a.shape[0], b.shape[1], a.shape[1]), "tolerance": tolerance}
    begin = time.perf_counter()
    try:
        _, choice = bounded.multiply_within(a, b, tolerance=tolerance, costs=costs, out_dtype=out)
    except ToleranceError as e:
        return {**row, "chosen": None, "why": e.what}
    took = time.perf_counter() - begin
    way = choice.precision + (FAST if choice.accumulate == "fast" else "")
    error = relative(product(a, b, way, out), a, b)
    return {
        **row, "chosen": way, "true_error": error, "said": choice.sampled_error,
        "violated": error > tolerance, "check_ms": 1e3 * took, "why": choice.why,
    }  # fmt: skip


def models(quick: bool) -> Iterator[tuple[str, Step, int]]:
    """Two blocks of each, of real width, built from a configuration: nothing is downloaded."""
    import transformers as t

    if quick:
        small = t.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=100, bos_token_id=0, eos_token_id=0)
        yield "gpt2", lambda: t.GPT2LMHeadModel(small), 100
        return
    yield "gpt2", lambda: t.GPT2LMHeadModel(t.GPT2Config(n_layer=2)), 50257
    yield "bert", lambda: t.BertModel(t.BertConfig(num_hidden_layers=2)), 30522
    llama = t.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000,
    )  # fmt: skip
    yield "llama", lambda: t.LlamaForCausalLM(llama), 32000


def with_outliers(model: Any) -> None:
    """Channels that a trained model has and a fresh one lacks: a few gains of each norm thirty times larger (LLM.int8())."""
    for name, parameter in model.named_parameters():
        if ("norm" in name.lower() or "ln_" in name) and name.endswith("weight"):
            with torch.no_grad():
                parameter[: max(1, parameter.numel() // 128)] *= 30.0


def layers(model: Any, vocab: int, device: str) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, input as a matrix, weight as the right operand) of each linear layer, run on random tokens."""
    found: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def hook(name: str) -> Callable[..., None]:
        def see(module: Any, args: Any, _: Any) -> None:
            weight = module.weight.detach()
            right = weight if type(module).__name__ == "Conv1D" else weight.mT  # GPT-2 keeps its weights the other way
            found.append((name, args[0].detach().reshape(-1, args[0].shape[-1]), right))

        return see

    for name, module in model.named_modules():
        if type(module).__name__ in ("Linear", "Conv1D") and "lm_head" not in name and "pooler" not in name:
            module.register_forward_hook(hook(name))
    tokens = torch.randint(0, vocab, (1, 16) if vocab == 100 else (4, 512), device=device)
    with torch.no_grad():
        model(tokens)
    return found


def model_layers(run: Run) -> list[tuple[str, Row, torch.Tensor, torch.Tensor]]:
    """Rows of every layer and tolerance; the distinct ones come back to be measured."""
    to_measure: dict[Any, tuple[str, Row, torch.Tensor, torch.Tensor]] = {}
    torch.manual_seed(0)
    for name, make, vocab in models(run.quick):
        run.guarded(f"layers of {name}", lambda: one_model(run, name, make, vocab, to_measure), needs_s=4.0)  # noqa: B023
    return list(to_measure.values())


def one_model(
    run: Run, name: str, make: Step, vocab: int, to_measure: dict[Any, tuple[str, Row, torch.Tensor, torch.Tensor]]
) -> None:
    with torch.device(run.device):
        model = make().eval()
    for variant in ("fresh", "outliers"):
        if variant == "outliers":
            with_outliers(model)
        for layer, a, b in layers(model, vocab, run.device):
            for tolerance in error_bounds.TOLERANCES:
                what = f"{name} {variant} {layer} {tolerance}"
                row = run.guarded(
                    what,
                    lambda: bounded_row(a, b, tolerance, part="layer", model=name, variant=variant, layer=layer),  # noqa: B023
                    needs_s=4.0,
                )
                if row is not None:
                    run.add(row)
                    key = (tuple(row["shape"]), row["chosen"])
                    to_measure.setdefault(key, (what, row, a, b))
                    for other in ("fp32", "bf16"):
                        to_measure.setdefault((tuple(row["shape"]), other), (what, {**row, "chosen": other}, a, b))


def layer_joules(run: Run, rows: list[tuple[str, Row, torch.Tensor, torch.Tensor]]) -> None:
    for _, row, a, b in rows:
        if row["chosen"] is None:
            continue
        kept: Row = {"part": "layer joules", "shape": row["shape"], "precision": row["chosen"]}
        fn = lambda a=a, b=b, p=row["chosen"]: product(a, b, p)  # noqa: E731
        run.guarded(f"joules of {kept['shape']} {kept['precision']}", lambda: run.measure(kept, fn), needs_s=2.0)  # noqa: B023
    if run.waiting:
        run.guarded("the last layer joules", run.flush, needs_s=0.0)


# -- 4. random cases ---------------------------------------------------------------------------------------------


# Of 4096^3, so that every precision is worth its cast whatever the shape.
COSTS = error_bounds.costs()
COSTS |= {
    p + FAST: predict_energy_j(p, 4096, 4096, 4096, 1, torch.float32, torch.float32, accumulate="fast")
    for p in ("fp8", "fp8_row")
}
BY_ROWS = {**COSTS, "fp8": COSTS["fp8_row"], "fp8_row": COSTS["fp8"]}
BY_ROWS |= {"fp8 fast": COSTS["fp8_row fast"], "fp8_row fast": COSTS["fp8 fast"]}


def random_cases(run: Run, count: int) -> None:
    """Made where they are multiplied; of five, four have sides of up to 360, one of up to 1,448."""
    rng, there = torch.Generator().manual_seed(CASES_SEED), torch.Generator(run.device).manual_seed(CASES_SEED)
    names = list(error_bounds.KINDS)
    for index in range(count):
        if run.left() < 2.0:
            run.results["skipped"].append(f"random cases from {index} of {count}")
            return
        largest = 5.0 if run.quick else 10.5 if index % 5 == 0 else 8.5
        m, n, k = (int(2 ** (float(torch.rand((), generator=rng)) * (largest - 4) + 4)) for _ in range(3))
        name, tolerance = names[index % len(names)], error_bounds.TOLERANCES[index % 3]
        of_kind = index // len(names)
        costs = BY_ROWS if of_kind % 2 else COSTS
        # Two of four, but where a bf16 result itself is too coarse.
        out = torch.bfloat16 if of_kind % 4 >= 2 and tolerance >= 1e-2 else torch.float32
        case = partial(one_case, run, there, name, (m, n, k), tolerance, costs, out)
        run.guarded(f"case {index} {name}", case)


def one_case(
    run: Run, rng: Any, name: str, shape: tuple[int, int, int], tolerance: float, costs: Row, out: torch.dtype
) -> None:
    with torch.device(run.device):
        a, b = error_bounds.KINDS[name](*shape, rng)
    run.add(bounded_row(a, b, tolerance, costs, out, part="random", kind=name, result=str(out)))


# -- what it comes to --------------------------------------------------------------------------------------------


def summary(run: Run) -> Row:
    rows = run.results["rows"]
    of = lambda part: [r for r in rows if r.get("part") == part]  # noqa: E731
    found: Row = {
        "quantise_checked": len(of("quantise")), "quantise_differing": sum(r["differing"] for r in of("quantise")),
        "guessed_checked": len(of("guessed")), "guessed_differing": sum(r["differing"] for r in of("guessed")),
        "rows_checked": len(of("rows")), "rows_wrong": sum(r["wrong"] for r in of("rows")),
        "seconds": time.perf_counter() - run.start,
    }  # fmt: skip
    for part in ("random", "layer"):
        if not of(part):
            continue
        chosen = [r for r in of(part) if r["chosen"]]
        found[f"{part}_cases"] = len(of(part))
        found[f"{part}_violations"] = sum(r["violated"] for r in chosen)
        found[f"{part}_refused"] = len(of(part)) - len(chosen)
        for tolerance in error_bounds.TOLERANCES:
            picked = Counter(r["chosen"] or "refused" for r in of(part) if r["tolerance"] == tolerance)
            found[f"{part}_chosen_{tolerance:g}"] = dict(picked.most_common())
        if chosen:
            found[f"{part}_median_check_ms"] = st.median(r["check_ms"] for r in chosen)
    found |= saved_on_layers(of("layer"), of("layer joules"))
    spent = {(r["n"], r["precision"], r["counted"]): r.get("J") for r in of("joules")}
    for (n, precision, counted), joule in spent.items():
        same = "fp32 operands, casts included" if counted.startswith("fp32") else "bf16 operands"
        base = spent.get((n, "bf16", same))
        if joule and base and precision.startswith("fp8") and ("operands" in counted or "product" in counted):
            found[f"saved_against_bf16 {n} {precision}, {counted}"] = f"{100 * (1 - joule / base):.1f}%"
    return found


def saved_on_layers(cases: list[Row], measured: list[Row]) -> Row:
    """By tolerance, what all layers together save in the ways that were chosen, against bf16 and against fp32."""
    joules = {(tuple(r["shape"]), r["precision"]): r["J"] for r in measured if r.get("J")}
    found = {}
    for tolerance in error_bounds.TOLERANCES:
        picked = [(tuple(r["shape"]), r["chosen"]) for r in cases if r["tolerance"] == tolerance and r["chosen"]]
        for base in ("bf16", "fp32"):
            both = [(joules[s, c], joules[s, base]) for s, c in picked if (s, c) in joules and (s, base) in joules]
            if both:
                share = 1 - sum(ours for ours, _ in both) / sum(theirs for _, theirs in both)
                found[f"layers_saved_against_{base}_{tolerance:g}"] = f"{100 * share:.1f}% ({len(both)} layers)"
    return found


def show(run: Run) -> None:
    for r in run.results["rows"]:
        if r.get("part") == "joules":
            joule = "-" if r.get("J") is None else f"{1e3 * r['J']:9.2f} mJ"
            told = f"{1e3 * r['J_predicted']:9.2f} predicted" if "J_predicted" in r else ""
            print(f"  {r['n']:5} {r['precision']:19} {r['counted']:32} {r['ms']:8.4f} ms {joule} {told}")
    for r in run.results["rows"]:
        if r.get("part") == "sums":
            print(f"  sums of {r['k']:6} in fp8: fast ones lose {r['lost']:.1e}")
    for r in run.results["rows"]:
        if r.get("part") == "cast":
            joule = "-" if r.get("J") is None else f"{1e3 * r['J']:9.2f} mJ"
            print(f"  cast of {r['n']:5} {r['cut']:48} {r['ms']:8.4f} ms {joule}{' as it is' if r['as_is'] else ''}")
    for name, value in run.results["summary"].items():
        print(f"  {name:48} {value}")
    for what in ("errors", "skipped"):
        print(f"  {what}: {len(run.results[what])}", *run.results[what][:8], sep="\n    ")


def kept(results: Row, only: list[str]) -> list[Row]:
    """The rows of a file that are not measured anew."""
    replaced = [part for name in only for part in PARTS[name]]

    def stays(row: Row) -> bool:
        if row["part"] == "joules" and "products" in only:
            return row["n"] not in TURNED or row["counted"].startswith("fp32 operands")
        return row["part"] not in replaced

    return [row for row in results["rows"] if stays(row)]


def resume(run: Run, only: list[str]) -> str:
    """Go on with what the file has; why not, where that was measured elsewhere."""
    if not run.out.exists():
        return ""
    before = json.loads(run.out.read_text())
    for name in ("device", "quick"):
        if before["machine"][name] != run.results["machine"][name]:
            return f"{run.out} is of {name} {before['machine'][name]}, not of {run.results['machine'][name]}"
    run.results |= {name: before[name] for name in ("skipped", "errors")}
    run.results["rows"] = kept(before, only)
    run.results["summary"] = before.get("summary", {})
    run.results["parts"] = before.get("parts", dict.fromkeys(PARTS, before["machine"]))
    return ""


def measure(run: Run, only: list[str], cases: int) -> None:
    """The parts that are wanted: all, where none is named."""
    if not only or "quantise" in only:
        check_kernels(run)
        check_centred(run)
        check_rows(run)
        run.guarded("fast sums", lambda: fast_sums(run))
    if "quantise" in only or run.quick:
        cut_otherwise(run)
    if not only:
        joules(run)
    elif "products" in only:
        in_turns(run)
    if not only or "layers" in only:
        rows = run.guarded("the models' layers", lambda: model_layers(run), needs_s=5.0) or []
        layer_joules(run, rows)
    if not only or "random" in only:
        random_cases(run, cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=160.0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=[])
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.quick:
        parser.error("no CUDA device: --quick rehearses on a CPU")
    run = Run(args.out, args.budget_s, args.quick, device)
    machine = run.results["machine"] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
        "date": str(date.today()), "quick": args.quick,
    }  # fmt: skip
    if args.only and (why := resume(run, args.only)):
        parser.error(why)
    # What each part was measured with: `--only` may bring them together from several days.
    run.results["parts"] = run.results.get("parts", {}) | dict.fromkeys(args.only or PARTS, machine)
    if device == "cuda":
        import pynvml

        from tessera import monitor

        pynvml.nvmlInit()
        monitor.default()
    measure(run, args.only, 12 if args.quick else args.cases)
    run.results["summary"] = run.results.get("summary", {}) | summary(run)
    # A thousand random cases are most of the file: those whose bound held are only counted.
    run.results["rows"] = [r for r in run.results["rows"] if r["part"] != "random" or r.get("violated")]
    run.write()
    show(run)


if __name__ == "__main__":
    main()
