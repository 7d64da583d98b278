"""A prediction's subgraphs and a run's operators under one name: by operator, then by kind of operator."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from ..graph.op_kinds import KINDS, kind_of
from .side import Cell

_ATTENTION = re.compile(
    r"(?:_?(?:scaled_dot_product|flash|efficient|cudnn|mem_eff)\w*attention\w*?|attention)(_backward)?$"
)
_CONVOLUTION = re.compile(r"_?(?:cudnn_|miopen_|mkldnn_)?convolution(?:_transpose|_overrideable)?(_backward)?$")


def aligned(predicted: Mapping[str, Cell], measured: Mapping[str, Cell]) -> tuple[dict[str, Cell], dict[str, Cell]]:
    """Both by operator ("mm", "sdpa_backward"); what only one side has, by its kind where the other has that kind."""
    ran: dict[str, Cell] = {}
    for name, cell in measured.items():
        plain = operator(name)
        kind = cell.kind if cell.kind in ("idle", "memcpy", "memset", "collective") else _kind(name, plain)
        _add(ran, plain, dataclasses.replace(cell, kind=kind))
    meant: dict[str, Cell] = {}
    for name, cell in predicted.items():
        plain = operator(name.rpartition(".")[2])
        base = plain.removesuffix("_backward")  # the gradient of a product is a product: "down.mm_backward" is mm
        _add(meant, base if plain not in ran and plain not in KINDS else plain, cell)
    kinds = {c.kind for n, c in meant.items() if n not in ran} & {c.kind for n, c in ran.items() if n not in meant}
    shared = meant.keys() & ran.keys()
    return _folded(meant, shared, kinds), _folded(ran, shared, kinds)


def operator(name: str) -> str:
    """An operator without its namespace, and attention and convolutions by one name whatever library ran them."""
    plain = name.removeprefix("aten::").removeprefix("tessera::")
    if not plain.startswith("_foreach_"):
        plain = plain.rstrip("_") or plain
    if found := _ATTENTION.fullmatch(plain.removesuffix("_forward")):
        return f"sdpa{found.group(1) or ''}"
    found = _CONVOLUTION.fullmatch(plain)
    return f"convolution{found.group(1) or ''}" if found else plain


def _kind(name: str, plain: str) -> str:
    """The family of a measured operator; one of ours by its full name, which torch may use for something else."""
    return kind_of(name if name.startswith("tessera::") else plain)


def _folded(rows: Mapping[str, Cell], shared: Iterable[str], kinds: Iterable[str]) -> dict[str, Cell]:
    out: dict[str, Cell] = {}
    for name, cell in rows.items():
        _add(out, name if name in shared or cell.kind not in kinds else f"other {cell.kind}", cell)
    return out


def _add(rows: dict[str, Cell], name: str, cell: Cell) -> None:
    rows[name] = rows[name] + cell if name in rows else cell
