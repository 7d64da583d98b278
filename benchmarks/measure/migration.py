"""A 4-rank training job is moved while it runs: whether its losses are those of a run that never stopped, seconds lost.

    python benchmarks/measure/migration.py                    (about six minutes on 2 cores)

Real processes by torchrun over Gloo. A small decoder trains with AdamW, a cosine schedule and shuffled data; at some step
the order comes by file (`tessera fleet migrate`), the job saves itself through torch.distributed.checkpoint and ends,
and is started again in new processes: with 4 ranks (FSDP2 and DDP), with 2, and on another mesh (tensor parallel 2 x 2
before, 4 x 1 after). "Lost" is from the end of the last step
before the move to the start of the first one after it: saving, ending, starting Python and torch again, loading.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

OUT = Path(__file__).parents[1] / "results" / "migration.json"
STEPS, ORDER_AFTER, BATCH, VOCABULARY, LENGTH, WIDTH = 60, 20, 16, 256, 32, 64


# -- one rank ---------------------------------------------------------------------------------------------------------


def train(folder: str, log: str, kind: str) -> None:
    import torch
    import torch.distributed as c10d
    from torch import nn

    from tessera import fleet

    torch.set_num_threads(1)
    c10d.init_process_group("gloo")
    torch.manual_seed(1)
    model: Any = make_decoder(nn)
    tensor_ranks = 1
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model[2:4]:
            fully_shard(block)
        fully_shard(model)
    elif kind.startswith("mesh"):
        tensor_ranks = split_decoder(model, int(kind[-1]))
    else:
        # Without this DDP orders its buckets anew after the first step, and so sums in another order after a restart.
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=kind == "ddp-fixed")
    # One at a time: torch's grouped update cannot take parameters of several meshes.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    words = torch.randint(0, VOCABULARY, (512, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    job = fleet.migratable(model, optimizer, folder=folder, states={"schedule": schedule}, seed=3)
    ended, waits = None, []
    for step in job.steps(STEPS):
        if ended is not None:
            waits.append(time.perf_counter() - ended)
        batch = words[job.indices(len(words), BATCH, rank=job.rank // tensor_ranks, ranks=job.ranks // tensor_ranks)]
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        mean = loss.detach().clone()
        c10d.all_reduce(mean)
        if job.rank == 0:
            with Path(log).open("a") as file:
                file.write(json.dumps([step, mean.item() / job.ranks]) + "\n")
        ended = time.perf_counter()
    if job.rank == 0:
        about = (
            {}
            if job.migration is None
            else {k: getattr(job.migration, k) for k in ("save_s", "load_s", "lost_s", "step")}
        )
        Path(log).with_suffix(".done").write_text(json.dumps({"vote_s": statistics.median(waits), **about}))
    c10d.destroy_process_group()


def split_decoder(model: Any, tensor_ranks: int) -> int:
    """The wide layers of each block split over so many ranks, all of it sharded over the others."""
    import torch.distributed as c10d
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    shape = (c10d.get_world_size() // tensor_ranks, tensor_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    for block in model[2:4]:
        if tensor_ranks > 1:
            parallelize_module(block, mesh["tp"], {"wide.1": ColwiseParallel(), "wide.3": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return tensor_ranks


def make_decoder(nn: Any) -> Any:
    import torch

    class Positions(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)

        def forward(self, x: Any) -> Any:
            return x + self.table[: x.shape[1]]

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mixed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)
            self.wide = nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )

        def forward(self, x: Any) -> Any:
            heads = [h.unflatten(2, (4, -1)).transpose(1, 2) for h in self.mixed(self.norm(x)).chunk(3, 2)]
            seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.out(seen)
            return x + self.wide(x)

    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Positions(), Block(), Block(), nn.Linear(WIDTH, VOCABULARY))


# -- the job and its moves -----------------------------------------------------------------------------------------------


def run_job(
    folder: Path, kind: str, ranks: int, move_to: int | None, kind_after: str | None = None
) -> tuple[list[list[float]], dict[str, float]]:
    """The losses of a job, moved once where `move_to` is given; and what its last process measured."""
    from tessera.fleet.migration_order import OrderFile
    from tessera.fleet.relaunch import run_until_done

    log = folder / "losses.jsonl"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node={ranks}", __file__,
               "train", str(folder / "job"), str(log), "{node}"]  # fmt: skip

    def order() -> None:
        while not log.exists() or log.read_text().count("\n") < ORDER_AFTER:
            time.sleep(0.02)
        OrderFile(folder / "job").write(ranks=move_to, node=kind_after)

    if move_to is not None:
        threading.Thread(target=order, daemon=True).start()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": env}

    def start(words: Any) -> int:
        done = subprocess.run(words, check=False, timeout=900, **quiet)  # type: ignore[call-overload]
        if done.returncode:
            print(done.stderr[-3000:])
        return int(done.returncode)

    starts = len(list(run_until_done(command, folder / "job", ranks=ranks, node=kind, run=start)))
    assert starts == (1 if move_to is None else 2), f"started {starts} times"
    return [json.loads(line) for line in log.read_text().splitlines()], json.loads(log.with_suffix(".done").read_text())


def compare(moved: list[list[float]], whole: list[list[float]]) -> dict[str, Any]:
    assert [s for s, _ in moved] == [s for s, _ in whole] == list(range(STEPS)), "a step is missing or was done twice"
    apart = [abs(a - b) / abs(b) for (_, a), (_, b) in zip(moved, whole, strict=True)]
    return {"identical": moved == whole, "largest_difference": max(apart)}


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="moves of the first kind, for the seconds lost")
    parser.add_argument("--write", action="store_true", help="write results/migration.json")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wholes = {
            kind: run_job(folder / f"whole-{kind}", kind, 4, None) for kind in ("fsdp", "ddp", "ddp-fixed", "mesh2")
        }
        two, _ = run_job(folder / "whole-2", "fsdp", 2, None)
        cases = [("fsdp", "fsdp", 4)] * arguments.repeats
        cases += [("ddp", "ddp", 4), ("ddp-fixed", "ddp-fixed", 4), ("fsdp", "fsdp", 2), ("mesh2", "mesh1", 4)]
        for number, (kind, kind_after, after) in enumerate(cases):
            moved, about = run_job(folder / f"moved-{number}", kind, 4, after, kind_after)
            row = {
                "kind": kind,
                "kind_after": kind_after,
                "ranks": [4, after],
                **compare(moved, wholes[kind][0]),
                **about,
            }
            rows.append(row)
            apart = (
                "identical to the last bit" if row["identical"] else f"apart by {row['largest_difference']:.1e} at most"
            )
            print(f"{kind:>9} on 4 -> {kind_after} on {after}: moved at step {about['step']:.0f}, {apart}; "
                  f"lost {about['lost_s']:.1f} s (saving {about['save_s']:.2f}, loading {about['load_s']:.2f})")  # fmt: skip
        never_moved = compare(two, wholes["fsdp"][0])["largest_difference"]
    votes = [r["vote_s"] for r in rows if r["ranks"][1] == 4]
    print(f"a run of 2 ranks that never moved is apart from one of 4 by {never_moved:.1e}")
    print(f"what a step pays for being movable: {1e3 * statistics.median(votes):.2f} ms between two steps")
    if arguments.write:
        lost = [r["lost_s"] for r in rows]
        write_result(OUT, {
            "load_average": os.getloadavg()[2], "steps": STEPS, "rows": rows, "two_ranks_never_moved": never_moved,
            "lost_s": statistics.median(lost), "save_s": statistics.median(r["save_s"] for r in rows),
            "load_s": statistics.median(r["load_s"] for r in rows), "between_steps_s": statistics.median(votes),
            "another_mesh": max(r["largest_difference"] for r in rows if r["kind"] != r["kind_after"]),
            "resharded": max((r["largest_difference"] for r in rows if r["ranks"][1] == 2), default=math.nan),
        })  # fmt: skip
        print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
