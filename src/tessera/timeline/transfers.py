"""Reads what the names and arguments of copies, collectives and launch calls tell."""

from __future__ import annotations

import re

from .columns import NONE, Launch
from .events import Args

DTYPE_BYTES = {
    "double": 8, "float64": 8, "long": 8, "int64": 8, "uint64": 8, "complexfloat": 8, "complexdouble": 16,
    "float": 4, "float32": 4, "int": 4, "int32": 4, "uint32": 4, "half": 2, "float16": 2, "bfloat16": 2, "short": 2,
    "int16": 2, "byte": 1, "char": 1, "bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip
ON_HOST = ("gloo:", "mpi:", "ucc:")
"""How the names of collectives begin that run on the host."""
GRAPH_LAUNCH = ("cudaGraphLaunch", "hipGraphLaunch", "cuGraphLaunch")
"""How the names of calls begin that launch a whole graph."""
UNEVEN = ("scatter", "gather", "all_to_all", "barrier")
"""Collectives for which ranks may state different tensors: only the root's, or those of one side."""
_ALGORITHM = re.compile(
    r"_(RING|TREE|NVLS_TREE|NVLS|COLLNET_DIRECT|COLLNET_CHAIN|PAT)_(LL128|LL|SIMPLE)(?![A-Z0-9])", re.IGNORECASE
)
_DIRECTION = re.compile(r"(?:\b|Memcpy)([HDPAM])(?:to|2)([HDPAM])\b", re.IGNORECASE)
_DIRECTION_IN_WORDS = re.compile(r"(?:Copy|\b)(Host|Device)_?To_?(Host|Device)", re.IGNORECASE)
_COLLECTIVES = (
    ("allreduce", "all_reduce"), ("allgather", "all_gather"), ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"), ("broadcast", "broadcast"), ("sendrecv", "send_recv"), ("send", "send"),
    ("recv", "recv"), ("barrier", "barrier"), ("reduce", "reduce"), ("gather", "gather"), ("scatter", "scatter"),
)  # fmt: skip


def is_collective(name: str) -> bool:
    """Return whether a kernel is NCCL's, RCCL's or HCCL's (ncclKernel_..., ncclDevKernel_..., ncclSymDevKernel_...)."""
    return name.removeprefix("void ").startswith(("nccl", "mscclKernel", "rccl", "hccl"))


def collective_type(text: str) -> str | None:
    """Return all_reduce, all_gather, ... by c10d's name ('_allgather_base') or a kernel's; None if neither tells."""
    plain = re.sub(r"[^a-z]", "", text.lower())
    return next((kind for word, kind in _COLLECTIVES if word in plain), None)


def collective_bytes(args: Args) -> int | None:
    """Return the message size as nccl-tests counts it, the larger of input and output; else the stated bytes."""
    size = DTYPE_BYTES.get((args.dtype or "").lower().removeprefix("torch."))
    elements = max(args.elements_in, args.elements_out)
    if size is not None and 0 < elements < 2**50:
        return elements * size
    return None if (stated := stated_bytes(args)) == NONE else stated


def stated_bytes(args: Args) -> int:
    """Return the size that the arguments of a copy, fill or collective state; `NONE` if they state none."""
    size = args.bytes if args.bytes != NONE else args.size
    if isinstance(size, int):
        return size
    return int(size) if size.isdecimal() and len(size) < 19 else NONE


def collective(name: str, args: Args, op_args: Args | None) -> Launch:
    """Return a collective's launch; `op_args` of the operator that launched it fill in what its own do not say."""
    source = args if args.collective or op_args is None else op_args
    size = collective_bytes(source)
    return Launch(
        grid=None if isinstance(args.grid, str) else args.grid, block=args.block, registers=args.registers,
        shared_bytes=args.shared,
        collective_type=collective_type(source.collective or "") or collective_type(name.partition("(")[0]),
        collective_bytes=collective_bytes(args) if size is None else size, group=source.group,
        group_size=source.group_size, dtype=source.dtype, group_label=group_label(source.group_description),
    )  # fmt: skip


def group_label(description: str | None) -> str | None:
    """Return what people call a process group: `dp` for DeviceMesh's "mesh_dp", `world` for the default one."""
    if not description or description == "undefined":
        return None
    return "world" if description == "default_pg" else description.removeprefix("mesh_")


def collective_algorithm(name: str) -> str | None:
    """Return "ring LL128" for NCCL's ncclDevKernel_AllReduce_Sum_f32_RING_LL128; None if the name does not tell."""
    match = _ALGORITHM.search(name.partition("(")[0])
    return f"{match[1].lower().replace('_', ' ')} {match[2]}" if match else None


def copy(name: str) -> Launch:
    """Return direction and pinning from a copy's name, such as 'Memcpy HtoD (Pageable -> Device)'."""
    direction = None
    if match := _DIRECTION.search(name):
        direction = f"{match[1].upper()}to{match[2].upper()}".replace("M", "H")
    elif match := _DIRECTION_IN_WORDS.search(name):
        direction = f"{match[1][0].upper()}to{match[2][0].upper()}"
    pinned = False if "Pageable" in name else True if "Pinned" in name else None
    return Launch(memcpy_dir=direction, pinned=pinned)
