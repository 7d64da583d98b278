"""What `tessera run --nproc 2` costs a step of DDP over Gloo on the CPU, against torchrun alone, in turns.

`python benchmarks/measure/rank_overhead.py [--rounds 3] [--steps 120]`. Every step is traced (--limit 0); by default only
those of the first five seconds are. On a busy machine the CPU time of a step is the surer figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

TRAIN = """
import json, statistics, sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(256, 512)
wall, cpu = [], []
for _ in range(int(sys.argv[2])):
    begun = time.perf_counter(), time.process_time()
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    wall.append(time.perf_counter() - begun[0])
    cpu.append(time.process_time() - begun[1])
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump({"wall_ms": 1e3 * statistics.median(wall[10:]), "cpu_ms": 1e3 * statistics.median(cpu[10:])}, file)
dist.destroy_process_group()
"""


def run(folder: Path, steps: int, traced: bool, number: int) -> dict[str, float]:
    said = folder / f"{traced}-{number}.json"
    launcher = ["tessera", "run", "--nproc", "2", "--limit", "0", "--json"]
    if not traced:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv = [sys.executable, "-m", *launcher, "train.py", str(said), str(steps)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(argv, cwd=folder, env=env, check=True, capture_output=True, timeout=300)
    return json.loads(said.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "rank_overhead.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        pairs = [[run(folder, args.steps, traced, i) for traced in (False, True)] for i in range(args.rounds)]
    result = {"rounds": args.rounds, "steps": args.steps, "ranks": 2}
    for key in ("wall_ms", "cpu_ms"):
        alone, traced = (statistics.median(pair[i][key] for pair in pairs) for i in (0, 1))
        ratio = statistics.median(pair[1][key] / pair[0][key] for pair in pairs)
        result |= {f"alone_{key}": alone, f"traced_{key}": traced, f"ratio_{key.removesuffix('_ms')}": ratio}
    print(
        f"a step takes {result['alone_wall_ms']:.1f} ms with torchrun alone, {result['traced_wall_ms']:.1f} ms recorded:"
    )
    print(
        f"  {100 * (result['ratio_wall'] - 1):+.1f}% of wall time, {100 * (result['ratio_cpu'] - 1):+.1f}% of CPU time"
    )
    write_result(args.out, result)


if __name__ == "__main__":
    main()
