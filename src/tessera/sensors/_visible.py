"""Which GPUs a process may see: CUDA_VISIBLE_DEVICES by index, UUID (whole or a prefix) and MIG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Board:
    """A physical GPU as the driver lists it, with the UUIDs of its MIG slices."""

    index: int
    uuid: str
    mig_uuids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Visible:
    """A board this process may use; `mig` names the slices when it may use only those."""

    board: Board
    mig: tuple[str, ...] = ()


def visible_boards(boards: Sequence[Board], text: str | None) -> list[Visible]:
    """The boards that CUDA_VISIBLE_DEVICES leaves visible, in its order. None: not set, all are.

    As CUDA does, the list ends at the first entry that names no device ("-1" and "" hide all), and a UUID may be
    shortened to any unambiguous prefix. Several slices of one board give that board once.
    """
    if text is None:
        return [Visible(b) for b in boards]
    chosen: dict[int, Visible] = {}
    for token in (t.strip() for t in text.split(",")):
        found = _find(boards, token)
        if found is None:
            break
        board, mig = found
        before = chosen.get(board.index)
        slices = (*(before.mig if before else ()), *((mig,) if mig else ()))
        chosen[board.index] = Visible(board, slices)
    return list(chosen.values())


def _find(boards: Sequence[Board], token: str) -> tuple[Board, str | None] | None:
    if token.lstrip("+").isdigit():
        return next(((b, None) for b in boards if b.index == int(token)), None)
    if token.startswith("GPU-"):
        hits = [b for b in boards if b.uuid.lower().startswith(token.lower())]
        return (hits[0], None) if len(hits) == 1 else None
    if token.startswith("MIG-GPU-"):  # before driver 470: MIG-GPU-<uuid>/<gpu instance>/<compute instance>
        uuid = token[len("MIG-") :].split("/", maxsplit=1)[0]
        return next(((b, token) for b in boards if b.uuid.lower() == uuid.lower()), None)
    if token.startswith("MIG-"):
        hits = [b for b in boards if any(m.lower().startswith(token.lower()) for m in b.mig_uuids)]
        return (hits[0], token) if len(hits) == 1 else None
    return None
