"""What the schema of one of torch's operators fixes: its name, its family and which arguments it writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .op_kinds import is_listed, kind_of

# Nothing runs for these: allocation without a fill, bookkeeping of the profiler, assertions.
_SILENT_NAMES = """
    empty empty_like empty_strided new_empty new_empty_strided lift_fresh detach detach_ alias resize_ set_ is_pinned
    _assert_async _assert_scalar promote_types can_cast"""
_SILENT = frozenset(_SILENT_NAMES.split())
# Made like a tensor that is not read.
_MADE_LIKE = frozenset(
    {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like", "randn_like"}
)
_WRITE_ONLY = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_"})


@dataclass(frozen=True, slots=True)
class Signature:
    """An overload's name, family and which arguments it writes; a `silent` one runs nothing on a device.

    `modelled` is False if nothing is known of what it does: its cost is then the bytes it moves.
    """

    name: str
    short: str
    kind: str
    writes: tuple[int, ...]
    writes_named: tuple[str, ...]
    outputs: frozenset[str]
    silent: bool
    modelled: bool

    def find_written(self, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
        """The tensors that a call with these arguments writes into."""
        places = [args[i] for i in self.writes if i < len(args)]
        places += [kwargs[n] for n in self.writes_named if n in kwargs]
        yield from (t for t in pytree.tree_leaves(places) if isinstance(t, torch.Tensor))

    def find_moved(
        self, args: Any, kwargs: Any, outs: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors a call reads and those it writes; `outs` is what it returned."""
        inputs = {k: v for k, v in kwargs.items() if k not in self.outputs}  # `out=` is written, not read
        reads = [t for t in pytree.tree_leaves((args, inputs)) if isinstance(t, torch.Tensor)]
        if self.short in _WRITE_ONLY and reads:
            return reads[1:], reads[:1]
        if self.short in _MADE_LIKE:
            return [], outs
        if self.writes or self.outputs:
            return reads, list(self.find_written(args, kwargs)) or outs
        return reads, outs

    def is_view(self, reads: list[torch.Tensor], outs: list[torch.Tensor]) -> bool:
        """Whether a call only returns a view: `reshape` of something contiguous does, otherwise it copies."""
        if self.kind == "view":
            return True
        if self.writes_named or len(reads) != 1 or len(outs) != 1 or self.kind not in ("copy", "elementwise"):
            return False
        return bool(outs[0].untyped_storage()._cdata == reads[0].untyped_storage()._cdata)


@lru_cache(maxsize=4096)
def signature_of(func: Any) -> Signature:
    """The signature of an overload (`torch.ops.aten.add.Tensor`), from its schema."""
    schema = func._schema
    namespace, _, short = schema.name.partition("::")
    written = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    name = f"{namespace}.{short}"
    return Signature(
        name=name,
        short=short,
        kind=kind_of(name),
        writes=tuple(i for i, a in written if not a.kwarg_only),
        writes_named=tuple(a.name for _, a in written),
        outputs=frozenset(a.name for _, a in written if a.kwarg_only),
        silent=namespace == "profiler" or short in _SILENT,
        modelled=is_listed(name) or _is_pointwise(namespace, short, func),
    )


def _is_pointwise(namespace: str, short: str, func: Any) -> bool:
    """Whether torch says that an operator computes each element on its own, in place or not."""
    if torch.Tag.pointwise in func.tags:
        return True
    plain = getattr(getattr(torch.ops, namespace), short.rstrip("_"), None)
    return plain is not None and any(torch.Tag.pointwise in getattr(plain, o).tags for o in plain.overloads())
