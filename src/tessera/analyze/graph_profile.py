"""Operators as a kernel author sees them: the tile a kernel works in, how many, how long each takes, what was fused.

::

    MatMul[256x128x64]   latency=170 us   occupancy=19%   tiles=264 in 2 waves, 85 us each   0.155 J
    FusedOp[FlashAttn]   latency=185 us   tiles=2048      softmax and two products in one kernel
    AllReduce[dp]        latency=15 us    bandwidth=1.6 TB/s

Tiles are thread blocks (CTAs); the shape is the one in the kernel's name. Occupancy is the most the launch allows
(registers, shared memory, threads): what is achieved needs counters (`tessera run --counters`).
"""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, MeasurementError
from ..graph.rewrites import Rewrite, collect_rewrites
from ..monitor.scope import synchronize
from ..profile.ranks.collectives import describe as describe_collective
from ..record import ON_DEVICE
from ..timeline import Launch, Timeline
from ..timeline.columns import NONE, Ints
from ..timeline.link import Links, link
from ..timeline.transfers import ON_HOST
from .kernel_names import category, short
from .mean_step import mean_step
from .result import encode_json
from .roofline import sum_inside

# Limits of one SM since Volta (CUDA programming guide, compute capabilities 7.0 to 10.0): registers, threads, blocks;
# shared memory by the device properties, else Hopper's.
_REGISTERS, _WARP, _BLOCKS = 65536, 32, 32
_THREADS, _SHARED_BYTES = 2048, 233_472
# The tile in the names of nvjet, cutlass, xmma, cuDNN's attention and Triton's templates.
_TILE = re.compile(r"(?<![\dx])(\d{2,3})x(\d{2,3})(?:[x_](\d{2,3}))?(?![\d])")
_FUSED = re.compile(r"triton_\w+?_fused_(.+?)_\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProfile:
    """One kind of call: its kernel, mean latency, tiles, and joules if power was recorded. None: see `why`."""

    label: str
    name: str
    op: str | None
    calls: int
    latency_s: float
    total_s: float
    occupancy_pct: float | None = None
    tiles: int | None = None
    waves: int | None = None
    tile_latency_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    dram_gbps: float | None = None
    fused: tuple[str, ...] = ()
    energy_j: float | None = None
    error_j: float | None = None
    shapes: str | None = None

    @property
    def why(self) -> dict[str, str]:
        """Return what would provide the missing figures."""
        needs = {
            "occupancy_pct": "needs a GPU kernel",
            "tiles": "needs a GPU kernel",
            "energy_j": "needs power samples",
            "dram_gbps": "needs ncu: tessera run --counters",
            "bandwidth_bytes_per_s": "only copies and collectives record their bytes",
        }
        return {field: text for field, text in needs.items() if getattr(self, field) is None}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProfile:
    """The operators of `graph.profile(step_fn)`, longest first; `rewrites` says what was fused, and what that saves.

    Rewrites of a program made by `tessera.optimize` have bytes and joules; those that were found in kernels' names are
    "seen".
    """

    rows: Sequence[OpProfile]
    rewrites: Sequence[Rewrite]
    steps: int
    step_s: float
    step_j: float | None = None
    step_error_j: float | None = None
    basis: str = "measured"
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Return the profile as JSON."""
        return encode_json(self.to_dict())

    def __repr__(self) -> str:
        return f"<GraphProfile of {self.steps} steps: {len(self.rows)} operators, {len(self.rewrites)} rewrites>"

    def __str__(self) -> str:
        from ..report.rewrite import graph_profile_text

        return graph_profile_text(self)


def profile_operators(timeline: Timeline, *, steps: int = 1, step_s: float = 0.0) -> GraphProfile:
    """Return a timeline's operators by kernel, launch and operator; with joules if it was attributed before."""
    links = link(timeline)
    rows = timeline.device_rows
    if not len(rows):
        rows = np.flatnonzero(links.parent == NONE)
        rows = rows[np.isin(rows, timeline.rows("op"))]
    op = links.op[rows]
    key = np.column_stack(
        [timeline["name"][rows], timeline["launch"][rows], np.where(op == NONE, NONE, timeline["shapes"][op])]
    )
    _, where = np.unique(key, axis=0, return_inverse=True)
    where = where.reshape(-1)
    joules, errors = (sum_inside(timeline, rows, values) for values in (timeline.energy_j, timeline.error_j))
    kinds = [np.flatnonzero(where == k) for k in range(int(where.max(initial=-1)) + 1)]
    profiles = [_profile(timeline, links, rows[of], _sum(joules[of]), _sum(errors[of])) for of in kinds]
    profiles.sort(key=lambda r: r.total_s, reverse=True)
    return GraphProfile(rows=profiles, rewrites=find_rewrites(profiles, steps), steps=steps, step_s=step_s)


def _profile(timeline: Timeline, links: Links, rows: Ints, energy_j: float | None, error_j: float | None) -> OpProfile:
    first = int(rows[0])
    launch = timeline.launches[int(timeline["launch"][first])] if timeline["launch"][first] != NONE else Launch()
    name, kind = timeline.name(first), timeline.kind(first)
    if name.startswith(ON_HOST):  # a collective of Gloo, on a thread of the host
        kind, launch = "collective", describe_collective(timeline, first)
    op = int(links.op[first])
    op_name = timeline.name(op) if op != NONE else None
    total_s = float(np.sum(timeline["end_ns"][rows] - timeline["start_ns"][rows])) * 1e-9
    latency_s = total_s / len(rows)
    tiles = math.prod(launch.grid) if launch.grid else None
    occupancy, per_sm = occupancy_pct(launch)
    sms = _sms(timeline, int(timeline["device"][first]))
    waves = math.ceil(tiles / (sms * per_sm)) if tiles and per_sm and sms else None
    moved = max(int(timeline["bytes"][first]), launch.collective_bytes or 0)
    return OpProfile(
        label=make_label(name, kind, op_name, launch),
        name=name,
        op=op_name,
        calls=len(rows),
        latency_s=latency_s,
        total_s=total_s,
        occupancy_pct=occupancy if timeline.kind(first) in ON_DEVICE else None,
        tiles=tiles,
        waves=waves,
        tile_latency_s=latency_s / waves if waves else None,
        bandwidth_bytes_per_s=moved / latency_s if moved > 0 and latency_s > 0 else None,
        dram_gbps=_dram_gbps(timeline, first),
        fused=parse_fused(name, op_name) if kind == "kernel" else (),
        energy_j=energy_j,
        error_j=error_j,
        shapes=timeline.text("shapes", op) if op != NONE else None,
    )


def _sum(values: NDArray[np.float64]) -> float | None:
    """Sum some calls, whose errors have common causes and add up. None if nothing was attributed."""
    return None if np.all(np.isnan(values)) else float(np.nansum(values))


def _dram_gbps(timeline: Timeline, row: int) -> float | None:
    extra = timeline.extra.get(row) if timeline.extra else None
    if not extra or extra.get("dram_read_gbps") is None:
        return None
    return float(extra["dram_read_gbps"]) + float(extra.get("dram_write_gbps") or 0.0)


def _sms(timeline: Timeline, device: int) -> int | None:
    for index, properties in enumerate(timeline.device_properties):
        if int(properties.get("id", index)) == device:
            return int(properties.get("numSms", 0)) or None
    return None


def occupancy_pct(launch: Launch) -> tuple[float | None, int | None]:
    """Return the most warps that a launch can have on an SM, in percent, and how many of its blocks fit there."""
    if not launch.block:
        return None, None
    threads = math.prod(launch.block)
    warps = math.ceil(threads / _WARP)
    limits = [_BLOCKS, _THREADS // max(warps * _WARP, 1)]
    if launch.registers:
        # Registers are allocated to warps in units of 256.
        per_warp = math.ceil(launch.registers * _WARP / 256) * 256
        limits.append(_REGISTERS // per_warp // warps)
    if launch.shared_bytes:
        limits.append(_SHARED_BYTES // (launch.shared_bytes + 1024))  # the driver keeps 1 KiB a block
    blocks = max(min(limits), 1)
    return min(100.0, 100.0 * blocks * warps / (_THREADS // _WARP)), blocks


_LABELS = (
    ("FusedOp[FlashAttn]", re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)),
    ("Conv", re.compile(r"conv(?!ert)|implicit_gemm|fprop|dgrad|wgrad", re.IGNORECASE)),
    ("MatMul", re.compile(r"gemm|nvjet|matmul|cutlass|gemv|splitk|::mm$|::bmm$|::addmm$|::linear$", re.IGNORECASE)),
)


def make_label(name: str, kind: str, op: str | None, launch: Launch) -> str:
    """Return what a call is, with its tile: MatMul[128x128x64], AllReduce[dp], FusedOp[FlashAttn], Softmax ..."""
    if kind == "collective":
        what = (launch.collective_type or re.sub(r"nccl(DevKernel)?_?|_.*|\(.*", "", name) or "collective").strip("_")
        return f"{_camel(what.removeprefix('gloo:'))}[{launch.group_label or launch.group or 'world'}]"
    if kind in ("memcpy", "memset"):
        return f"Memcpy[{launch.memcpy_dir}]" if kind == "memcpy" and launch.memcpy_dir else kind.capitalize()
    if _FUSED.search(name):
        return f"FusedOp[{'+'.join(parse_fused(name, op))}]"
    for text, pattern in _LABELS:
        if pattern.search(name) or (op and pattern.search(op)):
            tile = tile_of(name)
            return text if "[" in text else f"{text}[{tile}]" if tile else text
    return _camel(_plain(op)) if op else short(name, kind)


def _plain(op: str) -> str:
    """Return a plain name: softmax for aten::_softmax, MmBackward0 for autograd's "evaluate_function: MmBackward0"."""
    return op.rpartition("::")[2].removeprefix("evaluate_function: ").strip("_")


def tile_of(name: str) -> str | None:
    """Return the tile in a kernel's name, BMxBNxBK; None if there is none."""
    match = _TILE.search(name.replace("tilesize", " "))
    return "x".join(part for part in match.groups() if part) if match else None


def parse_fused(name: str, op: str | None) -> tuple[str, ...]:
    """Return the operators of a program that one kernel computes."""
    if match := _FUSED.search(name):
        words = [w for w in re.split(r"_(?=[a-z])", match.group(1)) if w]
        return tuple(dict.fromkeys(words))
    if category(name) == "attention":
        return ("matmul", "softmax", "matmul")
    if re.search(r"gelu|relu|silu", name, re.IGNORECASE) and re.search(r"gemm|nvjet|cutlass", name, re.IGNORECASE):
        return ("matmul", "bias", "activation")
    if "bias" in name or (op or "").endswith("::addmm"):
        return ("matmul", "bias")
    if "multi_tensor_apply" in name:
        return ("one update", "many tensors")
    return ()


def find_rewrites(rows: Sequence[OpProfile], steps: int) -> list[Rewrite]:
    """Return what the kernels' names say was fused, each kind once with its number in a step."""
    calls: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.fused:
            key = (_rule(row), " + ".join(row.fused), row.label)
            calls[key] = calls.get(key, 0) + row.calls
    return [
        Rewrite(
            rule=rule,
            before=before,
            after=f"one kernel ({name})",
            basis="seen",
            by="inductor" if name.startswith("FusedOp[") and rule != "flash_attention" else "library",
            times=max(1, round(count / max(1, steps))),
            why="read off the kernel's name: what it saves is not known",
        )
        for (rule, before, name), count in calls.items()
    ]


def merge_rewrites(seen: Sequence[Rewrite], reported: Sequence[Rewrite]) -> list[Rewrite]:
    """Return what a rewritten program reported, and what was seen besides: it already reports Inductor's kernels."""
    if not reported:
        return list(seen)
    rules = {r.rule for r in reported}
    return [*reported, *(r for r in seen if r.by != "inductor" and r.rule not in rules)]


def _rule(row: OpProfile) -> str:
    if row.fused == ("matmul", "softmax", "matmul"):
        return "flash_attention"
    if row.fused[0] == "matmul":
        return "fuse_epilogue"
    return "fuse_reduction" if re.search(r"triton_(red|per)_", row.name) else "fuse_elementwise"


def _camel(words: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"[_\s]+", words) if part)


def profile_steps(step_fn: Callable[[], Any], *, steps: int, warmup: int, path: str | None) -> GraphProfile:
    """Run a step a few times under a session; see `tessera.graph.profile`."""
    if not callable(step_fn):
        raise ArgumentError(
            f"step_fn is a {type(step_fn).__name__}, which cannot be called",
            fix="graph.profile(step): a function without arguments that does one step",
        )
    if steps < 1 or warmup < 0:
        raise ArgumentError(f"steps={steps}, warmup={warmup} cannot be run", fix="steps=5, warmup=2")
    from ..profile.session import session

    for _ in range(warmup):
        step_fn()
    synchronize()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(path) if path is not None else Path(folder, "steps.tessera")
        with collect_rewrites() as programs, session(mode="operators", path=target) as sess:
            for _ in range(steps):
                step_fn()
                sess.step()
            synchronize()
        timeline, notes, table = sess.timeline(), [], None
        try:
            table = sess.energy()
        except MeasurementError as exc:
            notes.append(f"no joules: {exc.what}")
    taken_s = [(s.end_ns - s.start_ns) * 1e-9 for s in timeline.linked.steps]
    profile = profile_operators(timeline, steps=steps, step_s=sum(taken_s) / max(len(taken_s), 1))
    reported = [rewrite for program in programs for rewrite in program]
    profile = dataclasses.replace(profile, rewrites=merge_rewrites(profile.rewrites, reported), notes=notes)
    if table is None or not table.steps:
        return profile
    # The mean of all steps, because its operators are of all steps: the warm-up ran before.
    mean = mean_step(table.steps, table.error_j / table.energy_j if table.energy_j > 0 else 0.0)
    return dataclasses.replace(
        profile, step_s=mean.seconds, step_j=mean.energy_j, step_error_j=mean.error_j, basis=table.basis
    )
