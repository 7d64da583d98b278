"""Error-bounded precision on random products, easy and hard: violations of the bound, sharpness of the choice.

    python benchmarks/measure/error_bounds.py [RESULTS.json] [--cases 1000] [--seed 2]

Every case is a pair of matrices of one of the kinds below, of random shape, with a tolerance drawn from the issue's
three (5e-2, 1e-2, 1e-3) or log-uniformly between 1e-4 and 0.3. Precisions are emulated on the CPU, exactly as
`lowprec.mm` does it; costs are those of a 4096^3 product on an H200, so that every precision is worth its cast. The
true error is against the whole product in fp64. Constants of `op/error_bounds.py` were set with seed 1; seed 2 is reported.

Then the same under changing data: in each of 20 rows of calls a choice is made on easy data, and 50 products of other kinds
follow, of one shape. And what a call costs with its check, against the product alone in full precision: of fp32 on the
CPU, of bf16 on a GPU where there is one.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tessera.errors import ToleranceError
from tessera.op import bounded, casting, error_bounds, lowprec
from tessera.op.product_cost import predict_energy_j

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

TOLERANCES = (5e-2, 1e-2, 1e-3)
Pair = tuple[torch.Tensor, torch.Tensor]


def costs() -> dict[str, float]:
    """Joules of each precision at 4096^3 from fp32 operands."""
    return {p: predict_energy_j(p, 4096, 4096, 4096, 1, torch.float32, torch.float32) for p in casting.PRECISIONS}


# -- kinds of matrices -------------------------------------------------------------------------------------------


def normal(m: int, n: int, k: int, rng: Any) -> Pair:
    return torch.randn(m, k, generator=rng), torch.randn(k, n, generator=rng)


def uniform(m: int, n: int, k: int, rng: Any) -> Pair:
    """All positive: sums grow with k, not with its root."""
    return torch.rand(m, k, generator=rng), torch.rand(k, n, generator=rng)


def wide_range(m: int, n: int, k: int, rng: Any) -> Pair:
    """Entries over many octaves: log-normal with a large sigma."""
    a, b = normal(m, n, k, rng)
    return a * torch.exp(4 * torch.randn(m, k, generator=rng)), b * torch.exp(3 * torch.randn(k, n, generator=rng))


def outlier_columns(m: int, n: int, k: int, rng: Any) -> Pair:
    """A few columns of the left are a thousand times larger, as some channels of language models are."""
    a, b = normal(m, n, k, rng)
    a[:, torch.randint(0, k, (max(1, k // 64),), generator=rng)] *= 1000.0
    return a, b


def matched_outliers(m: int, n: int, k: int, rng: Any) -> Pair:
    """Large columns of the left meet tiny rows of the right: fp8 loses what the result is made of."""
    a, b = normal(m, n, k, rng)
    size = torch.exp(4 * torch.randn(k, generator=rng))
    return a * size, b / size[:, None]


def cancelling(m: int, n: int, k: int, rng: Any) -> Pair:
    """|AB| far below |A||B|: the second half of k takes the first half away but for a little."""
    half = max(1, k // 2)
    a, b = normal(m, n, half, rng)
    little = 10.0 ** (-3 * float(torch.rand((), generator=rng)))
    rest = torch.randn(m, half, generator=rng) * little
    return torch.cat([a, -a + rest], 1), torch.cat([b, b], 0)


def tiny(m: int, n: int, k: int, rng: Any) -> Pair:
    """Under the smallest fp16 and fp8 numbers unless scaled."""
    a, b = normal(m, n, k, rng)
    return a * 1e-12, b * 1e-9


def huge(m: int, n: int, k: int, rng: Any) -> Pair:
    a, b = normal(m, n, k, rng)
    return a * 1e14, b * 1e12


def constant(m: int, n: int, k: int, rng: Any) -> Pair:
    """Every entry rounds alike: errors add up instead of averaging out."""
    x, y = torch.randn(2, generator=rng).tolist()
    return torch.full((m, k), x), torch.full((k, n), y)


def few_values(m: int, n: int, k: int, rng: Any) -> Pair:
    values = torch.randn(3, generator=rng)
    return (values[torch.randint(0, 3, s, generator=rng)] for s in ((m, k), (k, n)))  # type: ignore[return-value]


def sparse(m: int, n: int, k: int, rng: Any) -> Pair:
    a, b = normal(m, n, k, rng)
    return a * (torch.rand(m, k, generator=rng) < 0.03), b * (torch.rand(k, n, generator=rng) < 0.2)


def rank_one(m: int, n: int, k: int, rng: Any) -> Pair:
    (u, v), (w, x) = normal(m, k, 1, rng), normal(k, n, 1, rng)
    return u @ v, w @ x


def bad_rows(m: int, n: int, k: int, rng: Any) -> Pair:
    """Rows of the left and columns of the right over twelve decades."""
    a, b = normal(m, n, k, rng)
    rows, cols = (10 ** (12 * torch.rand(s, generator=rng) - 6) for s in (m, n))
    return a * rows[:, None], b * cols


def one_large(m: int, n: int, k: int, rng: Any) -> Pair:
    """One entry sets the scale of the whole matrix."""
    a, b = normal(m, n, k, rng)
    a[0, 0] = 1e6
    return a, b


def nearly_zero_sum(m: int, n: int, k: int, rng: Any) -> Pair:
    """Columns of equal sign against rows that sum to nearly nothing: coherent rounding errors survive the sum."""
    a = 1.0 + 1e-3 * torch.randn(m, k, generator=rng)
    b = torch.randn(k, n, generator=rng)
    return a, b - b.mean(0) * (1 - 1e-2)


def relu(m: int, n: int, k: int, rng: Any) -> Pair:
    a, b = normal(m, n, k, rng)
    return a.relu(), b / math.sqrt(k)


KINDS: dict[str, Callable[[int, int, int, Any], Pair]] = {
    f.__name__: f
    for f in (
        normal, uniform, wide_range, outlier_columns, matched_outliers, cancelling, tiny, huge, constant, few_values,
        sparse, rank_one, bad_rows, one_large, nearly_zero_sum, relu,
    )
}  # fmt: skip


# -- cases -------------------------------------------------------------------------------------------------------


def relative(c: torch.Tensor, exact: torch.Tensor) -> float:
    size, error = float(exact.norm()), float((c.double() - exact).norm())
    return 0.0 if error == 0 else error / size if size > 0 else math.inf


def case(index: int, rng: Any, joules: dict[str, float]) -> dict[str, Any]:
    name = list(KINDS)[index % len(KINDS)]
    m, n, k = (int(2 ** (float(torch.rand((), generator=rng)) * 6 + 3)) for _ in range(3))
    a, b = KINDS[name](m, n, k, rng)
    drawn = int(torch.randint(0, 6, (), generator=rng))
    spread = 10 ** (float(torch.rand((), generator=rng)) * 3.5 - 4)
    tolerance = TOLERANCES[drawn] if drawn < 3 else spread
    exact = a.double() @ b.double()
    errors = {p: relative(lowprec.mm(a, b, p), exact) for p in casting.PRECISIONS[:6]}
    begin = time.perf_counter()
    bounded.forget()
    row: dict[str, Any] = {"kind": name, "shape": (m, n, k), "tolerance": tolerance, "errors": errors}
    try:
        _, choice = bounded.multiply_within(a, b, tolerance=tolerance, costs=joules)
    except ToleranceError:
        return {**row, "chosen": None, "true_error": errors["fp32"], "best": best(errors, tolerance, joules)}
    seconds = time.perf_counter() - begin
    return {
        **row, "chosen": choice.precision, "true_error": errors[choice.precision], "said": choice.sampled_error,
        "seconds": seconds, "best": best(errors, tolerance, joules),
    }  # fmt: skip


def best(errors: dict[str, float], tolerance: float, joules: dict[str, float]) -> str | None:
    """The cheapest that truly holds, known afterwards."""
    return min((p for p, e in errors.items() if e <= tolerance), key=joules.__getitem__, default=None)


def run(cases: int, seed: int) -> list[dict[str, Any]]:
    rng, joules = torch.Generator().manual_seed(seed), costs()
    return [case(i, rng, joules) for i in range(cases)]


def summary(rows: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    joules = costs()
    chosen = [r for r in rows if r["chosen"] is not None]
    wrong = [r for r in chosen if r["true_error"] > r["tolerance"]]
    over = [r for r in chosen if r["true_error"] > r["said"] * (1 + 1e-12)]
    sharp = [r for r in rows if r["chosen"] == r["best"]]
    refused = [r for r in rows if r["chosen"] is None]
    spent = sum(joules[r["chosen"]] for r in chosen if r["best"])
    least = sum(joules[r["best"]] for r in chosen if r["best"])
    return {
        "torch": torch.__version__, "seed": seed, "cases": len(rows), "violations": len(wrong),
        "said_too_little": len(over), "refused": len(refused),
        "refused_although_fp32_holds": sum(r["true_error"] <= r["tolerance"] for r in refused),
        "cheapest_chosen_pct": 100 * len(sharp) / len(rows), "joules_over_cheapest_pct": 100 * (spent / least - 1),
        "chosen": dict(Counter(r["chosen"] or "refused" for r in rows)),
        "median_check_ms": 1e3 * sorted(r["seconds"] for r in chosen)[len(chosen) // 2],
    }  # fmt: skip


def change_data(rows: int = 20, calls: int = 50, seed: int = 3) -> dict[str, Any]:
    """Violations where data change from call to call: what is kept was chosen on constants."""
    rng, joules, wrong, worst = torch.Generator().manual_seed(seed), costs(), 0, 0.0
    for row in range(rows):
        bounded.forget()
        tolerance, (m, n, k) = (
            TOLERANCES[row % 3],
            [int(2 ** (float(torch.rand((), generator=rng)) * 3 + 5)) for _ in "mnk"],
        )
        for _ in range(3):
            bounded.multiply_within(torch.ones(m, k), torch.ones(k, n), tolerance=tolerance, costs=joules)
        for index in range(calls):
            a, b = KINDS[list(KINDS)[(row + index) % len(KINDS)]](m, n, k, rng)
            a, b = a[:, : min(a.shape[1], b.shape[0])], b[: min(a.shape[1], b.shape[0])]
            product, _ = bounded.multiply_within(a, b, tolerance=tolerance, costs=joules, refuse=False)
            exact = a.double() @ b.double()
            if relative(a @ b, exact) <= tolerance:  # what fp32 itself does not hold is a ToleranceError
                worst = max(worst, relative(product, exact) / tolerance)
                wrong += relative(product, exact) > tolerance
    return {"changing_calls": rows * calls, "changing_violations": wrong, "changing_worst_of_tolerance": worst}


def check_cost(sizes: tuple[int, ...] = (256, 512, 1024, 2048), tolerance: float = 1e-2) -> list[dict[str, Any]]:
    """Milliseconds of a product of n x n x n alone and with its check, and of an fp8 one that is emulated on a CPU."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for n in (*sizes, 4096, 8192) if where == "cuda" else sizes:
        a, b = (x.to(where, torch.bfloat16 if where == "cuda" else torch.float32) for x in normal(n, n, n, None))
        alone = least_ms(lambda a=a, b=b: a @ b)
        bounded.forget()
        checked = least_ms(lambda a=a, b=b: bounded.multiply_within(a, b, tolerance=tolerance))
        chosen = bounded.choices()[-1].precision
        product = lowprec.mm(a, b, "bf16", "fp32", torch.float32)
        probed = least_ms(lambda a=a, b=b, c=product: error_bounds.bound_error(a, b, c, tolerance, lossless=False))
        rows.append(
            {"n": n, "device": where, "product_ms": alone, "checked_ms": checked, "chosen": chosen, "probe_ms": probed}
        )
    return rows


def least_ms(run: Callable[[], Any], times: int = 7) -> float:
    """The least of some runs after one that is not counted."""
    taken = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - begin))
    return min(taken[1:])


def by_kind(rows: list[dict[str, Any]]) -> list[str]:
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for r in rows:
        groups[r["kind"]].append(r)
    lines = [f"  {'kind':18} {'cases':>5} {'violations':>10} {'sharp':>6}  chosen"]
    for name, group in groups.items():
        bad = sum(r["chosen"] is not None and r["true_error"] > r["tolerance"] for r in group)
        sharp = sum(r["chosen"] == r["best"] for r in group) / len(group)
        picked = ", ".join(f"{p} {n}" for p, n in Counter(r["chosen"] or "refused" for r in group).most_common())
        lines.append(f"  {name:18} {len(group):5} {bad:10} {sharp:6.0%}  {picked}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    begin = time.perf_counter()
    rows = run(args.cases, args.seed)
    found = {**summary(rows, args.seed), "seconds": time.perf_counter() - begin}
    found |= change_data() | {"check_cost": check_cost()}
    print("\n".join(by_kind(rows)))
    for name, value in found.items():
        print(f"  {name:28} {value}")
    if args.out:
        write_result(args.out, found)


if __name__ == "__main__":
    main()
