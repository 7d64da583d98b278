"""Fuse convolution, batch norm, addition and ReLU into one cuDNN call, for inference.

    with fused_conv.fuse(model) as fused:  # or: fused = fuse(model); ...; fused.undo()
        print(fused.count, fused.calls)  # 49, ("conv1+bn1+relu", ...)
        y = model(x)  # under torch.inference_mode() or no_grad()

torch.compile makes cuDNN's convolution and one kernel that normalises, adds and clips. That kernel reads and writes the
whole activation once more. The batch norm is folded into weight and bias (in fp64, rounded once), and cuDNN does the
rest in the convolution's own kernel. Operators that do not match stay as they are.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import fx, nn

from ..errors import RewriteError
from ..graph.nested import find_leaves, map_tensors
from ..graph.rewrites import Rewrite, announce_rewrites
from .compare import compare
from .folded_conv import ConvNormPair, FoldedConvolution, needs_gradients
from .fx_graph import is_plain, may_write, trace_forward

_BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)  # in eval mode they are the same
_RELU = frozenset({F.relu, F.relu_, torch.relu, torch.relu_})
_ADD = frozenset({operator.add, torch.add})


def fuse(module: nn.Module, inputs: Any = None) -> FusedModel:
    """Give a module a forward with fused convolutions; leaving the context, or `undo()`, ends that.

    With `inputs` (a tensor or a tuple of arguments), both forwards run once and must agree. Hooks of the module run as
    before. The module's own forward still runs for calls with optional arguments, on meta tensors, or with hooks added
    later, and under torch.compile.
    """
    _check_module(module)
    graph, needed = trace_forward(module)
    _drop_identities(graph)
    chains = find_chains(graph)
    if not chains:
        raise RewriteError(
            f"{type(module).__name__} has no convolution to fuse",
            why="one is a plain nn.Conv2d whose result goes to a batch norm in eval mode, or to ReLU, and nowhere else",
            fix="leave it unchanged; docs/rewrites.md lists what matches",
        )
    calls = _replace_chains(graph, chains)
    for call in calls:
        call.refresh()
    fused = FusedModel(module, graph, needed, calls)
    if inputs is not None:
        fused.verify(inputs)
    return fused


class FusedModel:
    """A module whose convolutions are fused until `undo()`; `rewrites` lists them."""

    def __init__(
        self, module: nn.Module, graph: fx.GraphModule, needed: tuple[str, ...], calls: list[FoldedConvolution]
    ) -> None:
        self.rewrites = tuple(_make_rewrite(call) for call in calls)
        self._module, self._graph, self._needed, self._convolutions = module, graph, needed, calls
        self._flags = [(m, m.training) for m in module.modules()]
        self._plain = [m for m in module.modules() if m is not module and is_plain(m)]
        self._own = module.forward
        # A partial, not a function: a copy of the module must run on the copy's weights. The signature is the module's
        # own.
        self._installed = functools.update_wrapper(functools.partial(self._forward), self._own)
        module.__dict__["forward"] = self._installed

    @property
    def calls(self) -> tuple[str, ...]:
        """Return the chains that became one call each: "layer1.0.conv3+bn3+add+relu"."""
        return tuple(rewrite.before for rewrite in self.rewrites)

    @property
    def count(self) -> int:
        """Return how many calls were fused or folded."""
        return len(self.rewrites)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Return the calls that torch makes in some shape: cuDNN has no engine for it or gives another result."""
        return tuple(call.name for call in self._convolutions if call.falls_back)

    def refresh(self) -> int:
        """Fold changed weights again, into the same memory, and return how many. Every call does this first.

        The replay of a CUDA graph does not, so call this after changing weights.
        """
        return sum(call.refresh() for call in self._convolutions)

    def verify(self, inputs: Any) -> None:
        """Run both forwards and compare them; if they differ, undo and raise."""
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        try:
            with torch.no_grad():  # on copies: a forward may write into its input
                before, after = (
                    find_leaves(run(*map_tensors(torch.clone, args)), "result") for run in (self._own, self._forward)
                )
            comparison = compare(before, after)
        except BaseException:
            self.undo()
            raise
        if not comparison.ok:
            self.undo()
            raise RewriteError(
                f"{type(self._module).__name__} with fused convolutions gives another result: {comparison.why}",
                why="its forward asks something that the trace answered otherwise, such as isinstance(x, Tensor)",
                fix="leave it as it is, or pass the submodule that holds the convolutions",
            )

    def undo(self) -> None:
        """Put the module back as it was; safe to call twice."""
        if self._module.__dict__.get("forward") is self._installed:
            del self._module.__dict__["forward"]

    def __enter__(self) -> FusedModel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        rest = self._needed[len(args) :]
        if len(args) + len(kwargs) != len(self._needed) or any(name not in kwargs for name in rest):
            return self._own(*args, **kwargs)
        inputs = (*args, *(kwargs[name] for name in rest))
        if torch.compiler.is_compiling() or self._is_observed(inputs):
            return self._own(*inputs)
        self._check_inference(inputs)
        self.refresh()
        announce_rewrites(self.rewrites)
        return self._graph.forward(*inputs)

    def _is_observed(self, inputs: tuple[Any, ...]) -> bool:
        """Tell whether the module's parts are observed: by hooks added later, or by a capture on meta tensors."""
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in inputs):
            return True
        return any(m._forward_hooks or m._forward_pre_hooks for m in self._plain)

    def _check_inference(self, inputs: tuple[Any, ...]) -> None:
        name = type(self._module).__name__
        if any(m.training is not was for m, was in self._flags):
            raise RewriteError(
                f"{name} was switched between train() and eval() while its convolutions are fused",
                why="the folded weights contain the statistics of eval mode",
                fix="undo() it before training",
            )
        if needs_gradients(self._convolutions, inputs):
            raise RewriteError(
                f"{name} with fused convolutions is called where gradients are recorded",
                why="the fused operators have no backward",
                fix="call it under torch.inference_mode() or torch.no_grad(), or undo() it",
            )


def _check_module(module: nn.Module) -> None:
    name = type(module).__name__
    if "forward" in module.__dict__:
        raise RewriteError(
            f"the forward of {name} has already been replaced",
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


def _replace_chains(graph: fx.GraphModule, chains: list[FusableChain]) -> list[FoldedConvolution]:
    """Put one call into the graph for each chain, and remove the chain's nodes."""
    summands = _find_summands(chains, graph)
    unbiased = {id(chain) for chain in summands.values()}
    calls: list[FoldedConvolution] = []
    for i, chain in enumerate(chains):
        call = FoldedConvolution(
            _make_pair(graph, chain),
            name=chain.name,
            adds=chain.add is not None,
            in_place=chain.in_place,
            relu=chain.relu is not None,
            biased=id(chain) not in unbiased,
        )
        if chain.add in summands:
            call.others.append(_make_pair(graph, summands[chain.add]))
        _replace_chain(graph, chain, f"_tessera_fused_{i}", call)
        calls.append(call)
    graph.graph.lint()
    graph.recompile()
    return calls


def _make_pair(graph: fx.GraphModule, chain: FusableChain) -> ConvNormPair:
    bn = graph.get_submodule(str(chain.bn.target)) if chain.bn is not None else None
    return ConvNormPair(graph.get_submodule(str(chain.conv.target)), bn)


def _replace_chain(graph: fx.GraphModule, chain: FusableChain, name: str, call: FoldedConvolution) -> None:
    graph.add_submodule(name, call)
    last = chain.nodes[-1]
    # Without a summand, the call stays where the convolution was: later nodes may write into its input.
    with graph.graph.inserting_before(chain.conv if chain.z is None else last):
        fused = graph.graph.call_module(name, (chain.conv.args[0], *(() if chain.z is None else (chain.z,))))
    last.replace_all_uses_with(fused)
    for node in reversed(chain.nodes):
        graph.graph.erase_node(node)


def _make_rewrite(call: FoldedConvolution) -> Rewrite:
    why = "its saving is not modelled"
    return Rewrite(rule="fused_conv", before=call.name, after=call.operator, by="tessera", why=why)


# -- which convolutions can be fused with what follows them ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FusableChain:
    """A convolution node and the nodes fused into it; `in_place` if the sum is written into the first summand."""

    conv: fx.Node
    bn: fx.Node | None = None
    add: fx.Node | None = None
    relu: fx.Node | None = None
    in_place: bool = False

    @property
    def z(self) -> fx.Node | None:
        """Return the other summand, as the graph has it now."""
        own = self.bn or self.conv
        return next(n for n in self.add.all_input_nodes if n is not own) if self.add is not None else None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Return the nodes of the chain in order."""
        return tuple(node for node in (self.conv, self.bn, self.add, self.relu) if node is not None)

    @property
    def name(self) -> str:
        """Return the names of the chain's parts: "layer1.0.conv3+bn3+add+relu"."""
        conv = str(self.conv.target)
        parent = conv.rpartition(".")[0]
        bn = [str(self.bn.target).removeprefix(f"{parent}.")] if self.bn else []
        return "+".join([conv, *bn, *(["add"] if self.add else []), *(["relu"] if self.relu else [])])


def _drop_identities(module: fx.GraphModule) -> None:
    """Remove `nn.Identity`, which would stand between a batch norm and its ReLU."""
    for node in list(module.graph.nodes):
        if node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
            layer = module.get_submodule(str(node.target))
            if type(layer) is nn.Identity and is_plain(layer):
                node.replace_all_uses_with(node.args[0])
                module.graph.erase_node(node)


def find_chains(module: fx.GraphModule) -> list[FusableChain]:
    """Return the chains that may become one call, in the order of the graph; no node is in two of them.

    A convolution may be fused only with nodes whose input nothing else reads. It moves to the ReLU's place only if
    nothing between the two writes into a tensor, which may be the convolution's input or the other summand.
    """
    nodes = list(module.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    read = {id(operator.attrgetter(str(node.target))(module)) for node in nodes if node.op == "get_attr"}
    chains: list[FusableChain] = []
    taken: set[fx.Node] = set()
    for node in reversed(nodes):  # of two convolutions that are added, the later one needs to move less far
        if not _is_convolution(node, module, read):
            continue
        chain = _find_longest_chain(node, module, read, taken)
        if chain.add is not None and chain.relu is not None:
            between = nodes[place[chain.conv] + 1 : place[chain.relu]]
            if any(may_write(n, module) for n in between if n not in chain.nodes):
                chain = FusableChain(chain.conv, chain.bn)
        if len(chain.nodes) > 1:
            chains.append(chain)
            taken.update(chain.nodes)
    return chains[::-1]


def _find_summands(chains: list[FusableChain], module: fx.GraphModule) -> Mapping[fx.Node, FusableChain]:
    """Return, for each node that adds, the folded convolution whose result is used only as the other summand."""
    ends = {chain.nodes[-1]: chain for chain in chains if chain.relu is None}
    summands = {}
    for chain in chains:
        other = ends.get(chain.z) if chain.z is not None else None
        if chain.add is None or other is None or _get_only_user(other.nodes[-1]) is not chain.add:
            continue
        own, others = (module.get_submodule(str(c.conv.target)) for c in (chain, other))
        if own.out_channels == others.out_channels:
            summands[chain.add] = other
    return summands


def _find_longest_chain(conv: fx.Node, module: fx.GraphModule, read: set[int], taken: set[fx.Node]) -> FusableChain:
    """Return the longest chain that starts at a convolution, whatever is between its nodes in the program."""
    channels = module.get_submodule(str(conv.target)).out_channels
    bn = _get_only_user(conv)
    if bn is None or not _is_batch_norm(bn, conv, channels, module, read):
        bn = None
    tail = bn or conv
    after = _get_only_user(tail)
    if after is None or after in taken:
        return FusableChain(conv, bn)
    if _is_relu(after, tail, module):
        return FusableChain(conv, bn, relu=after)
    adds_in_place = _adds_in_place(after, tail)
    relu = _get_only_user(after)
    if adds_in_place is None or relu is None or relu in taken or not _is_relu(relu, after, module):
        return FusableChain(conv, bn)
    return FusableChain(conv, bn, after, relu, in_place=adds_in_place)


def _get_only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _get_plain_layer(node: fx.Node, module: fx.GraphModule, read: set[int]) -> nn.Module | None:
    """Return the layer a node calls with one argument, if nothing else is done in the call or with its weights."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    layer: nn.Module = module.get_submodule(str(node.target))
    tensors = [t for t in (*layer._parameters.values(), *layer._buffers.values()) if t is not None]
    # A tensor made under inference_mode does not count writes to it; a subclass may behave in any way.
    plain_tensors = all(type(t) in (torch.Tensor, nn.Parameter) and not t.is_inference() for t in tensors)
    return layer if is_plain(layer) and plain_tensors and not any(id(t) in read for t in tensors) else None


def _is_convolution(node: fx.Node, module: fx.GraphModule, read: set[int]) -> bool:
    layer: Any = _get_plain_layer(node, module, read)
    return (
        type(layer) is nn.Conv2d
        and isinstance(node.args[0], fx.Node)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and layer.weight.is_floating_point()
    )


def _is_batch_norm(node: fx.Node, tail: fx.Node, channels: int, module: fx.GraphModule, read: set[int]) -> bool:
    layer: Any = _get_plain_layer(node, module, read)
    return (
        type(layer) in _BATCH_NORMS
        and node.args == (tail,)
        and not layer.training
        and layer.running_mean is not None
        and layer.running_var is not None
        and layer.num_features == channels
    )


def _is_relu(node: fx.Node, tail: fx.Node, module: fx.GraphModule) -> bool:
    if node.op == "call_module":
        layer = _get_plain_layer(node, module, set())
        return type(layer) is nn.ReLU and node.args == (tail,)
    if node.op == "call_method":
        return node.target in ("relu", "relu_") and node.args == (tail,) and not node.kwargs
    rest = node.args[1:] if node.args[:1] == (tail,) else None
    inplace = [*(rest or ()), *node.kwargs.values()]
    return (
        node.op == "call_function"
        and node.target in _RELU
        and rest is not None
        and set(node.kwargs) <= {"inplace"}
        and all(isinstance(value, bool) for value in inplace)
    )


def _adds_in_place(node: fx.Node, tail: fx.Node) -> bool | None:
    """Tell whether something is added to a node in place; None for other calls, or if the other summand is written."""
    method = node.op == "call_method" and node.target in ("add", "add_")
    function = node.op == "call_function" and (node.target in _ADD or node.target is operator.iadd)
    if not (method or function) or len(node.args) != 2 or dict(node.kwargs) not in ({}, {"alpha": 1}):
        return None
    if len(node.all_input_nodes) != 2:  # a number, or the same node twice
        return None
    in_place = node.target is operator.iadd or node.target == "add_"
    if in_place and node.args[0] is not tail:
        return None
    return in_place
