"""Finds the GPUs that CUDA_VISIBLE_DEVICES makes visible: by index, UUID (whole or a prefix) or MIG slice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuBoard:
    """A physical GPU as the driver lists it, with the UUIDs of its MIG slices."""

    index: int
    uuid: str
    mig_uuids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VisibleBoard:
    """A board this process may use; `mig` names the slices if it may use only those."""

    board: GpuBoard
    mig: tuple[str, ...] = ()


# A number as strtoul reads it: "1gpu" is 1, "-0" is 0.
_ORDINAL = re.compile(r"\s*([+-]?\d+)", re.ASCII)


def visible_boards(boards: Sequence[GpuBoard], text: str | None) -> list[VisibleBoard]:
    """Return the boards that CUDA_VISIBLE_DEVICES makes visible, in its order; all boards if it is not set (None).

    The rules are CUDA's: the list ends at the first entry that names no device ("-1" and "" hide all), a device named
    twice hides all, a UUID may be shortened to any unambiguous prefix (tried on a machine with one H200, driver 580).
    The list also ends where it changes between indices and UUIDs; torch.cuda assumes the same of CUDA. Several slices
    of one board give that board once.
    """
    if text is None:
        return [VisibleBoard(b) for b in boards]
    chosen: dict[int, VisibleBoard] = {}
    entries = text.split(",")
    kind = _kind(entries[0])
    named: set[tuple[int, str | None]] = set()
    for entry in entries:
        match = _find(boards, entry) if _kind(entry) == kind else None
        if match is None:
            break
        board, mig = match
        if (board.index, mig) in named:
            return []
        named.add((board.index, mig))
        before = chosen.get(board.index)
        slices = (*(before.mig if before else ()), *((mig,) if mig else ()))
        chosen[board.index] = VisibleBoard(board, slices)
    return list(chosen.values())


def _kind(entry: str) -> str:
    return entry[:4] if entry.startswith(("GPU-", "MIG-")) else "ordinal"


def _find(boards: Sequence[GpuBoard], entry: str) -> tuple[GpuBoard, str | None] | None:
    uuid = entry.rstrip().lower()
    if entry.startswith("MIG-GPU-"):  # before driver 470: MIG-GPU-<uuid>/<gpu instance>/<compute instance>
        whole = uuid.removeprefix("mig-").split("/", maxsplit=1)[0]
        return next(((b, uuid) for b in boards if b.uuid.lower() == whole), None)
    hits: list[tuple[GpuBoard, str | None]] = []
    if uuid in ("gpu-", "mig-"):  # CUDA wants at least one digit of a UUID, even where it would be unambiguous
        pass
    elif entry.startswith("GPU-"):
        hits = [(b, None) for b in boards if b.uuid.lower().startswith(uuid)]
    elif entry.startswith("MIG-"):
        hits = [(b, m) for b in boards for m in b.mig_uuids if m.lower().startswith(uuid)]
    elif ordinal := _ORDINAL.match(entry):
        hits = [(b, None) for b in boards if b.index == int(ordinal[1])]
    return hits[0] if len(hits) == 1 else None
