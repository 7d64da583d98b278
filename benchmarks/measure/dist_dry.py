"""Dry runs: a training step of Llama-3 405B, and a chain of 1M x 1M products, on up to 16,384 GPUs, counted on one CPU.

    python benchmarks/measure/dist_dry.py [--only NAME ...]

Each case runs in a process of its own, as one rank of a fake process group: tensor and sequence parallel by torch's
`parallelize_module`, data parallel by FSDP2, one stage of the pipeline, two microbatches, AdamW. Tensors have shapes
but no values. It prints seconds and peak memory, and compares the bytes of every collective, axis by axis, with formulas
that are written out below and use the model's dimensions alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

OUT = Path(__file__).parents[1] / "results" / "dist_dry.json"
HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 16384, 126, 128, 8, 53248  # arXiv 2407.21783, table 3
HEAD = HIDDEN // HEADS
SEQ, MICROBATCHES = 8192, 2
BF16, FP32 = 2, 4
SIDE = 1_000_000
PRODUCTS = 4
GOAL_BYTES = 2 * 2**30
Bytes = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLayout:
    """How 405B is cut. `sequence` parallel gathers and scatters between products where plain TP adds everything."""

    gpus: int
    tp: int
    pp: int
    sequence: bool = True

    @property
    def dp(self) -> int:
        return self.gpus // self.tp // self.pp

    @property
    def stage_layers(self) -> int:
        return -(-LAYERS // self.pp)


TRAINING = {
    "72 GPUs": TrainingLayout(gpus=72, tp=8, pp=3),
    "1,024 GPUs": TrainingLayout(gpus=1024, tp=8, pp=16),
    "16,384 GPUs": TrainingLayout(gpus=16384, tp=8, pp=16),
    "512 GPUs, all-reduce": TrainingLayout(gpus=512, tp=4, pp=8, sequence=False),
    "256 GPUs, FSDP and pipeline": TrainingLayout(gpus=256, tp=1, pp=16),
}
CHAINS = {"chain, 72 GPUs": 72, "chain, 1,024 GPUs": 1024, "chain, 16,384 GPUs": 16384}
CHAIN_SHAPES = {72: (8, 3, 3), 1024: (8, 4, 32), 16384: (8, 4, 512)}


def expected_training_bytes(cut: TrainingLayout) -> Bytes:
    """Bytes that one rank of a middle stage hands to collectives in a step, by hand.

    tp   A block has two pairs of products. With sequence parallel the activation (SEQ x HIDDEN in bf16, 1/tp of it
         here) is gathered before each pair, and the sum scattered after it; backward does the opposite. So forward
         and backward each gather twice (input: 1/tp of the activation) and scatter twice (input: all of it). The
         gradients of the two norms of a block are added over tp, HIDDEN numbers each. Without sequence parallel there
         are two all-reduces of the activation forward and two backward.
    dp   FSDP gathers a block's parameters before forward and again before backward, for each microbatch; a rank hands
         in its part. That is a share of the rows of each matrix, after tp cut it (outputs of q, k, v, gate and up, inputs
         of o and down), rounded up. Gradients are scattered once a step, after the last microbatch: dp parts, fp32.
    pp   Forward a stage receives and sends its part of an activation, backward that of a gradient.
    """
    activation = SEQ * HIDDEN * BF16
    norms = 2 * HIDDEN
    outputs = [HIDDEN, KV_HEADS * HEAD, KV_HEADS * HEAD, FFN, FFN]
    rows = [-(-n // cut.tp // cut.dp) for n in outputs]
    part = sum(rows) * HIDDEN + -(-HIDDEN // cut.dp) * (HIDDEN // cut.tp + FFN // cut.tp + 2)
    calls = MICROBATCHES * cut.stage_layers
    moved = activation // cut.tp if cut.sequence else activation
    found: Bytes = {
        "dp": {
            "all_gather": calls * 2 * part * BF16,
            "reduce_scatter": cut.stage_layers * cut.dp * part * FP32,
        },
        "pp": {"send": 2 * MICROBATCHES * moved, "receive": 2 * MICROBATCHES * moved},
    }
    if cut.tp > 1 and cut.sequence:
        found["tp"] = {
            "all_gather": calls * 4 * activation // cut.tp,
            "reduce_scatter": calls * 4 * activation,
            "all_reduce": calls * norms * BF16,
        }
    elif cut.tp > 1:
        found["tp"] = {"all_reduce": calls * 4 * activation}
    return found


def expected_chain_bytes(gpus: int) -> Bytes:
    """Rows are cut over tp, columns over pp. A product gathers the left factor's columns and the right one's rows."""
    tp, pp, _ = CHAIN_SHAPES[gpus]
    part = -(-SIDE // tp) * -(-SIDE // pp) * FP32
    return {"tp": {"all_gather": PRODUCTS * part}, "pp": {"all_gather": PRODUCTS * part}}


def run_chain(gpus: int) -> Bytes:
    from tessera import dist

    mesh = dist.Mesh(axes=["tp", "pp", "dp"], devices=range(gpus), shape=CHAIN_SHAPES[gpus])
    rows, columns = dist.ShardSpec(("row",), ("tp",)), dist.ShardSpec(("col",), ("pp",))
    both = dist.ShardSpec(partition=("row", "col"), mesh_axes=("tp", "pp"))
    with dist.dry(gpus) as counted:
        y = dist.tensor(shape=(SIDE, SIDE), layout=both, mesh=mesh).dtensor
        for _ in range(PRODUCTS):
            w = dist.tensor(shape=(SIDE, SIDE), layout=both, mesh=mesh).dtensor
            left = y.redistribute(placements=rows.placements(2, mesh))
            y = left @ w.redistribute(placements=columns.placements(2, mesh))
        assert tuple(y.placements) == tuple(both.placements(2, mesh))
    return {axis: counted.bytes_along(mesh, axis) for axis in mesh.axes}


def run_training(cut: TrainingLayout) -> Bytes:
    import torch
    import torch.distributed as c10d
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Shard

    from tessera import dist

    mesh = dist.Mesh(["pp", "dp", "tp"], cut.gpus, (cut.pp, cut.dp, cut.tp), order=["tp", "dp", "pp"])
    stage = cut.pp // 2
    rank = mesh.rank_at((stage, 0, 0))
    before, after = mesh.rank_at((stage - 1, 0, 0)), mesh.rank_at((stage + 1, 0, 0))
    with dist.dry(cut.gpus, rank=rank) as counted:
        whole = mesh.device_mesh
        pipe = mesh.process_group("pp")
        blocks = [make_block(whole["tp"], cut) for _ in range(cut.stage_layers)]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in blocks:
            fully_shard(block, mesh=whole["dp"], mp_policy=policy, reshard_after_forward=True)
        parameters = [p for block in blocks for p in block.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=False)
        shape = (1, SEQ // (cut.tp if cut.sequence else 1), HIDDEN)
        for number in range(MICROBATCHES):
            for block in blocks:
                block.set_requires_gradient_sync(number == MICROBATCHES - 1)
            arrived = torch.empty(shape, dtype=torch.bfloat16)
            c10d.recv(arrived, before, group=pipe)
            first = y = arrived.requires_grad_()
            if cut.tp > 1 and cut.sequence:
                y = DTensor.from_local(y, whole["tp"], [Shard(1)], run_check=False)
            for block in blocks:
                y = block(y)
            y = y.to_local() if isinstance(y, DTensor) else y
            c10d.send(y.detach(), after, group=pipe)
            gradient = torch.empty_like(y)
            c10d.recv(gradient, after, group=pipe)
            y.backward(gradient)
            c10d.send(first.grad, before, group=pipe)
        optimizer.step()
    return {axis: counted.bytes_along(mesh, axis) for axis in mesh.axes}


def make_block(tp_mesh: Any, cut: TrainingLayout) -> Any:
    """A decoder block in bf16 compute, cut over tp by torch's own styles."""
    import torch
    from torch import nn
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )
    from torch.nn import functional as F  # noqa: N812

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
            self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
            self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
            return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
            self.down = nn.Linear(FFN, HIDDEN, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
            self.attention, self.ffn = Attention(), FeedForward()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attention(self.norm1(x))
            return x + self.ffn(self.norm2(x))

    block = Block()
    if cut.tp == 1:
        return block
    columns = {f"attention.{n}": ColwiseParallel() for n in "qkv"} | {
        f"ffn.{n}": ColwiseParallel() for n in ("gate", "up")
    }
    cut_along = Shard(1) if cut.sequence else Replicate()
    inputs = {
        name: PrepareModuleInput(input_layouts=(cut_along,), desired_input_layouts=(Replicate(),))
        for name in ("attention", "ffn")
    }
    rows = {
        name: RowwiseParallel(output_layouts=cut_along, use_local_output=not cut.sequence)
        for name in ("attention.o", "ffn.down")
    }
    norms = {name: SequenceParallel() for name in ("norm1", "norm2") if cut.sequence}
    return parallelize_module(block, tp_mesh, columns | inputs | rows | norms)


def run_case(name: str) -> dict[str, Any]:
    import torch  # noqa: F401  (its import is not the dry run's)

    import tessera.dist.modes  # noqa: F401

    begun, used = time.perf_counter(), time.process_time()
    if name in CHAINS:
        counted, truth = run_chain(CHAINS[name]), expected_chain_bytes(CHAINS[name])
    else:
        counted, truth = run_training(TRAINING[name]), expected_training_bytes(TRAINING[name])
    counted = {axis: kinds for axis, kinds in counted.items() if kinds}
    return {
        "name": name,
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - used,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "bytes": counted,
        "by_hand": truth,
        "equal": counted == truth,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*TRAINING, *CHAINS])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(args.case)))
        return
    rows = []
    for name in args.only:
        command = [sys.executable, "-W", "ignore", __file__, "--case", name]
        rows.append(row := json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
        print(f"{name:28} {row['seconds']:6.1f} s ({row['cpu_seconds']:.1f} s of CPU) {row['peak_bytes'] / 2**30:6.2f} GiB   "
              f"bytes {'equal' if row['equal'] else 'DIFFERENT'}")  # fmt: skip
        for axis, kinds in row["by_hand"].items():
            for kind, nbytes in kinds.items():
                found = row["bytes"].get(axis, {}).get(kind, 0)
                print(f"    {axis:3} {kind:15} {found:>22,} by hand {nbytes:>22,}")
        extra = {
            a: {k: v for k, v in kinds.items() if k not in row["by_hand"].get(a, {})}
            for a, kinds in row["bytes"].items()
        }
        if any(extra.values()):
            print("    not expected:", extra)
    layouts = {name: asdict(cut) for name, cut in TRAINING.items()}
    result = {"goal_bytes": GOAL_BYTES, "rows": rows, "layouts": layouts, "chain_shapes": CHAIN_SHAPES}
    write_result(args.out, result)


if __name__ == "__main__":
    main()
