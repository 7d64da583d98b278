"""EnergyBenchmark on matrix products: joules per call at steady state, TFLOPS, TFLOPS/W, with an interval on each.

    python examples/energy_benchmark.py
    python examples/energy_benchmark.py --size 8192 --precisions fp32,bf16 --max-s 30      # on a GPU

The benchmark drops what comes before the steady state, repeats until the 90% interval is under the target, and says so
where it did not get there.
"""

from __future__ import annotations

import argparse

import torch

from tessera import EnergyBenchmark

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--precisions", default="fp32")
    parser.add_argument("--target", type=float, default=0.05, help="the relative half-width to reach")
    parser.add_argument("--max-s", type=float, default=6.0, help="the longest one row may take")
    parser.add_argument("--price-per-kwh", type=float, default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    bench = EnergyBenchmark(target=args.target, min_s=1.0, budget_s=args.max_s, price_per_kwh=args.price_per_kwh)
    for precision in args.precisions.split(","):
        a = torch.randn(args.size, args.size, device=args.device).to(DTYPES[precision])

        @bench.measure(flops=2.0 * args.size**3, name=f"{args.size}³ {precision}")
        def product(a: torch.Tensor = a) -> torch.Tensor:
            return a @ a

        product()
    bench.print_results()


if __name__ == "__main__":
    main()
