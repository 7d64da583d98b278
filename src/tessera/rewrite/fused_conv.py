"""Convolution, batch norm, addition and ReLU as one cuDNN call, for inference.

    with fused_conv.fuse(model) as fused:  # or: fused = fuse(model); ...; fused.undo()
        print(fused.changed, fused.calls)  # 49, ("conv1+bn1+relu", ...)
        y = model(x)  # under torch.inference_mode() or no_grad()

torch.compile leaves cuDNN's convolution and one kernel that normalises, adds and clips: it reads and writes the whole
activation once more. The batch norm is folded into weight and bias (in fp64, rounded once), and cuDNN does the rest in
the convolution's own kernel. What does not match stays as it was.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..errors import RewriteError
from ..graph.rewrites import Rewrite, announce_rewrites
from .compare import compare
from .convolutions import Chain, chains, drop_identities, summands
from .folded import Convolution, Pair, wants_gradients
from .traced import plain, trace


def fuse(module: nn.Module, example_inputs: Any = None) -> Fused:
    """Give a module a forward in which convolutions take along what follows them; leaving it, or `undo()`, ends that.

    With `example_inputs` (a tensor or a tuple of arguments) both forwards run once and must agree. Hooks of the module
    run as before. Calls with optional arguments, on meta tensors or with hooks added since, and torch.compile, get the
    module's own forward.
    """
    _refuse(module)
    graph, needed = trace(module)
    drop_identities(graph)
    found = chains(graph)
    if not found:
        raise RewriteError(
            f"{type(module).__name__} has no convolution to fuse",
            why="one is a plain nn.Conv2d whose result goes to a batch norm in eval mode, or to ReLU, and nowhere else",
            fix="leave it as it is; docs/rewrites.md says what matches",
        )
    calls = _rewrite(graph, found)
    for call in calls:
        call.refresh()
    fused = Fused(module, graph, needed, calls)
    if example_inputs is not None:
        fused.verify(example_inputs)
    return fused


class Fused:
    """A module whose convolutions are fused until `undo()`; `rewrites` says which."""

    def __init__(
        self, module: nn.Module, graph: fx.GraphModule, needed: tuple[str, ...], calls: list[Convolution]
    ) -> None:
        self.rewrites = tuple(_described(call) for call in calls)
        self._module, self._graph, self._needed, self._convolutions = module, graph, needed, calls
        self._flags = [(m, m.training) for m in module.modules()]
        self._plain = [m for m in module.modules() if m is not module and plain(m)]
        self._own = module.forward
        # Not a function: a copy of the module must run on the copy's weights. The signature is the module's own.
        self._installed = functools.update_wrapper(functools.partial(self._forward), self._own)
        module.__dict__["forward"] = self._installed

    @property
    def calls(self) -> tuple[str, ...]:
        """What became one call each: "layer1.0.conv3+bn3+add+relu"."""
        return tuple(rewrite.before for rewrite in self.rewrites)

    @property
    def changed(self) -> int:
        """How many calls were fused or folded."""
        return len(self.rewrites)

    @property
    def refused(self) -> tuple[str, ...]:
        """Calls that cuDNN could not make in a shape it was asked for, or made with another result: torch made them."""
        return tuple(call.name for call in self._convolutions if call.refused)

    def refresh(self) -> int:
        """Fold the weights anew that have changed, into the same memory; how many. Every call does it first.

        For CUDA graphs, whose replay runs nothing of this: call it after changing weights.
        """
        return sum(call.refresh() for call in self._convolutions)

    def verify(self, example_inputs: Any) -> None:
        """Run both forwards and compare; the module is given back its own, with an error, if they differ."""
        args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
        try:
            with torch.no_grad():  # on copies: a forward may write into its input
                before, after = _tensors(self._own(*_copied(args))), _tensors(self._forward(*_copied(args)))
            verdict = compare(before, after)
        except BaseException:
            self.undo()
            raise
        if not verdict.ok:
            self.undo()
            raise RewriteError(
                f"{type(self._module).__name__} with fused convolutions gives another result: {verdict.why}",
                why="its forward asks something that the trace answered otherwise, such as isinstance(x, Tensor)",
                fix="leave it as it is, or give the submodule that holds the convolutions",
            )

    def undo(self) -> None:
        """The module as it was; once more does nothing."""
        if self._module.__dict__.get("forward") is self._installed:
            del self._module.__dict__["forward"]

    def __enter__(self) -> Fused:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        rest = self._needed[len(args) :]
        if len(args) + len(kwargs) != len(self._needed) or any(name not in kwargs for name in rest):
            return self._own(*args, **kwargs)
        given = (*args, *(kwargs[name] for name in rest))
        if torch.compiler.is_compiling() or self._seen_from_outside(given):
            return self._own(*given)
        self._refuse_training(given)
        self.refresh()
        announce_rewrites(self.rewrites)
        return self._graph.forward(*given)

    def _seen_from_outside(self, given: tuple[Any, ...]) -> bool:
        """Whether somebody watches what the module's parts do: by hooks added since, or a capture on meta tensors."""
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in given):
            return True
        return any(m._forward_hooks or m._forward_pre_hooks for m in self._plain)

    def _refuse_training(self, given: tuple[Any, ...]) -> None:
        name = type(self._module).__name__
        if any(m.training is not was for m, was in self._flags):
            raise RewriteError(
                f"{name} was switched between train() and eval() while its convolutions are fused",
                why="the folded weights contain the statistics of eval mode",
                fix="undo() it before training",
            )
        if wants_gradients(self._convolutions, given):
            raise RewriteError(
                f"{name} with fused convolutions is called where gradients are recorded",
                why="the fused operators have no backward",
                fix="call it under torch.inference_mode() or torch.no_grad(), or undo() it",
            )


def _refuse(module: nn.Module) -> None:
    name = type(module).__name__
    if "forward" in module.__dict__:
        raise RewriteError(
            f"the forward of {name} has been replaced already",
            why="what replaced it would be left out",
            fix="undo() what was applied before",
        )
    norms = ((n, m) for n, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    trains = next((n for n, m in norms if m.training), None)
    if trains is not None:
        raise RewriteError(
            f"the batch norm {trains!r} of {name} is in training mode",
            why="in training it uses the statistics of the batch, which no weight can contain",
            fix="call eval() on the module first",
        )


def _rewrite(graph: fx.GraphModule, found: list[Chain]) -> list[Convolution]:
    """Put one call into the graph for each chain, and take its nodes out."""
    given = summands(found, graph)
    unbiased = {id(chain) for chain in given.values()}
    calls: list[Convolution] = []
    for i, chain in enumerate(found):
        call = Convolution(_pair(graph, chain), name=chain.name, adds=chain.add is not None, in_place=chain.in_place,
                           relu=chain.relu is not None, biased=id(chain) not in unbiased)  # fmt: skip
        if chain.add in given:
            call.others.append(_pair(graph, given[chain.add]))
        _replace(graph, chain, f"_tessera_fused_{i}", call)
        calls.append(call)
    graph.graph.lint()
    graph.recompile()
    return calls


def _pair(graph: fx.GraphModule, chain: Chain) -> Pair:
    bn = graph.get_submodule(str(chain.bn.target)) if chain.bn is not None else None
    return Pair(graph.get_submodule(str(chain.conv.target)), bn)


def _replace(graph: fx.GraphModule, chain: Chain, name: str, call: Convolution) -> None:
    graph.add_submodule(name, call)
    last = chain.nodes[-1]
    # Without a summand it stays where the convolution was: what follows may write into its input.
    with graph.graph.inserting_before(chain.conv if chain.z is None else last):
        made = graph.graph.call_module(name, (chain.conv.args[0], *(() if chain.z is None else (chain.z,))))
    last.replace_all_uses_with(made)
    for node in reversed(chain.nodes):
        graph.graph.erase_node(node)


def _described(call: Convolution) -> Rewrite:
    return Rewrite(
        rule="fused_conv", before=call.name, after=call.operator, by="tessera", why="its saving is not modelled"
    )  # fmt: skip


def _copied(args: tuple[Any, ...]) -> Any:
    return pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, args)


def _tensors(result: Any) -> dict[str, torch.Tensor]:
    leaves = pytree.tree_leaves(dict(result) if isinstance(result, dict) else result)
    return {f"result[{i}]": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
