"""The blocks a model repeats: what checkpointing keeps or recomputes one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, RewriteError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

Wanted = Sequence[str] | type | Callable[[str, Any], bool] | None
"""Names of modules, a class of them, a question put to each (name, module), or None for the repeated ones."""


def find(model: nn.Module, wanted: Wanted = None) -> dict[str, nn.Module]:
    """The blocks by their path in the model, in its order; none lies within another."""
    if wanted is None:
        found = _repeated(model)
        why, fix = "no container of two or more like modules was found", 'blocks=["layer1", "layer2"] names them'
    elif isinstance(wanted, type):
        found = {name: m for name, m in model.named_modules() if isinstance(m, wanted)}
        why, fix = f"the model has no {wanted.__name__}", "blocks=None looks for repeated ones"
    elif callable(wanted):
        found = {name: m for name, m in model.named_modules() if wanted(name, m)}
        why, fix = "blocks= said no to every module", "blocks=None looks for repeated ones"
    else:
        found = _named(model, wanted)
        why, fix = "blocks= is empty", "blocks=None looks for repeated ones"
    found.pop("", None)
    if not found:
        raise RewriteError(f"{type(model).__name__} has no blocks to checkpoint", why=why, fix=fix)
    _refuse_nested(found)
    return found


def _named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    known = dict(model.named_modules())
    for name in names:
        if name not in known:
            raise ArgumentError(
                f"blocks={name!r}: no such module{did_you_mean(name, known)}",
                fix="a path as model.named_modules() gives it",
            )
    return {name: module for name, module in known.items() if name in set(names)}


def _repeated(model: nn.Module) -> dict[str, nn.Module]:
    """Children of one class, at least two, of the outermost containers: transformer layers, the stages of a ResNet."""
    from torch import nn

    found: dict[str, nn.Module] = {}
    containers = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    for name, module in model.named_modules():
        if any(name == inside or name.startswith(f"{inside}.") for inside in found):
            continue
        kinds: dict[type, list[str]] = {}
        for child, m in module.named_children() if isinstance(module, containers) else ():
            if any(True for _ in m.children()) and any(True for _ in m.parameters()) and not isinstance(m, containers):
                kinds.setdefault(type(m), []).append(f"{name}.{child}" if name else child)
        for names in kinds.values():
            if len(names) > 1:
                found.update((n, model.get_submodule(n)) for n in names)
    order = [name for name, _ in model.named_modules()]
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))


def _refuse_nested(found: Mapping[str, Any]) -> None:
    for inner in found:
        outer = next((o for o in found if inner.startswith(f"{o}.")), None)
        if outer is not None:
            raise ArgumentError(
                f"blocks= holds {outer!r} and {inner!r} within it",
                why="a block is recomputed as a whole",
                fix=f"leave one of them out, for example {inner!r}",
            )
