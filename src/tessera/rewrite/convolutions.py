"""Convolutions of a traced graph with what follows them: batch norm, an addition, ReLU. Which may become one call.

A convolution may only swallow what nobody else reads, and moves to where the ReLU is only if nothing between the two
writes into anything: its input or the other summand may be what is written.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import fx, nn

from .effects import has_effect
from .traced import plain

_BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)  # in eval mode they are the same
_RELU = frozenset({F.relu, F.relu_, torch.relu, torch.relu_})
_ADD = frozenset({operator.add, torch.add})


@dataclass(frozen=True, slots=True)
class Chain:
    """A convolution node and the nodes it swallows; `in_place` where the sum is written into the first summand."""

    conv: fx.Node
    bn: fx.Node | None = None
    add: fx.Node | None = None
    relu: fx.Node | None = None
    in_place: bool = False

    @property
    def z(self) -> fx.Node | None:
        """What is added, as the graph has it now."""
        own = self.bn or self.conv
        return next(n for n in self.add.all_input_nodes if n is not own) if self.add is not None else None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Its nodes in order."""
        return tuple(node for node in (self.conv, self.bn, self.add, self.relu) if node is not None)

    @property
    def name(self) -> str:
        """What it is made of: "layer1.0.conv3+bn3+add+relu"."""
        conv = str(self.conv.target)
        parent = conv.rpartition(".")[0]
        bn = [str(self.bn.target).removeprefix(f"{parent}.")] if self.bn else []
        return "+".join([conv, *bn, *(["add"] if self.add else []), *(["relu"] if self.relu else [])])


def drop_identities(module: fx.GraphModule) -> None:
    """Take away `nn.Identity`, which hands on its input: it would stand between a batch norm and its ReLU."""
    for node in list(module.graph.nodes):
        if node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
            layer = module.get_submodule(str(node.target))
            if type(layer) is nn.Identity and plain(layer):
                node.replace_all_uses_with(node.args[0])
                module.graph.erase_node(node)


def chains(module: fx.GraphModule) -> list[Chain]:
    """What may become one call, in the order of the graph; no node is in two of them."""
    nodes = list(module.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    read = {id(_attribute(module, node)) for node in nodes if node.op == "get_attr"}
    found: list[Chain] = []
    taken: set[fx.Node] = set()
    for node in reversed(nodes):  # of two convolutions that are added the later one needs to move less far
        if not _is_convolution(node, module, read):
            continue
        chain = _chain(node, module, read, taken)
        if chain.add is not None and chain.relu is not None:
            between = nodes[place[chain.conv] + 1 : place[chain.relu]]
            if any(has_effect(n, module) is not None for n in between if n not in chain.nodes):
                chain = Chain(chain.conv, chain.bn)
        if len(chain.nodes) > 1:
            found.append(chain)
            taken.update(chain.nodes)
    return found[::-1]


def summands(found: list[Chain], module: fx.GraphModule) -> Mapping[fx.Node, Chain]:
    """Of the additions: the folded convolution that gives the other summand to nobody else, by the node that adds."""
    ends = {chain.nodes[-1]: chain for chain in found if chain.relu is None}
    given = {}
    for chain in found:
        other = ends.get(chain.z) if chain.z is not None else None
        if chain.add is None or other is None or _only_user(other.nodes[-1]) is not chain.add:
            continue
        mine, theirs = (module.get_submodule(str(c.conv.target)) for c in (chain, other))
        if mine.out_channels == theirs.out_channels:
            given[chain.add] = other
    return given


def _chain(conv: fx.Node, module: fx.GraphModule, read: set[int], taken: set[fx.Node]) -> Chain:
    """The longest one from a convolution on, whatever stands between its nodes in the program."""
    channels = module.get_submodule(str(conv.target)).out_channels
    bn = _only_user(conv)
    if bn is None or not _is_batch_norm(bn, conv, channels, module, read):
        bn = None
    tail = bn or conv
    after = _only_user(tail)
    if after is None or after in taken:
        return Chain(conv, bn)
    if _is_relu(after, tail, module):
        return Chain(conv, bn, relu=after)
    added = _added(after, tail)
    relu = _only_user(after)
    if added is None or relu is None or relu in taken or not _is_relu(relu, after, module):
        return Chain(conv, bn)
    return Chain(conv, bn, after, relu, in_place=added == "in place")


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


def _layer(node: fx.Node, module: fx.GraphModule, read: set[int]) -> nn.Module | None:
    """The layer a node calls with one argument, if that is all the call does and all that is done with its weights."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    layer: nn.Module = module.get_submodule(str(node.target))
    tensors = [t for t in (*layer._parameters.values(), *layer._buffers.values()) if t is not None]
    # A tensor made under inference_mode does not count its writes; a subclass may mean anything.
    plain_tensors = all(type(t) in (torch.Tensor, nn.Parameter) and not t.is_inference() for t in tensors)
    return layer if plain(layer) and plain_tensors and not any(id(t) in read for t in tensors) else None


def _is_convolution(node: fx.Node, module: fx.GraphModule, read: set[int]) -> bool:
    layer: Any = _layer(node, module, read)
    return (
        type(layer) is nn.Conv2d
        and isinstance(node.args[0], fx.Node)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and layer.weight.is_floating_point()
    )


def _is_batch_norm(node: fx.Node, tail: fx.Node, channels: int, module: fx.GraphModule, read: set[int]) -> bool:
    layer: Any = _layer(node, module, read)
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
        layer = _layer(node, module, set())
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


def _added(node: fx.Node, tail: fx.Node) -> str | None:
    """How an addition adds something to a node: "in place", "anew"; None where it writes into the other summand."""
    method = node.op == "call_method" and node.target in ("add", "add_")
    function = node.op == "call_function" and (node.target in _ADD or node.target is operator.iadd)
    if not (method or function) or len(node.args) != 2 or dict(node.kwargs) not in ({}, {"alpha": 1}):
        return None
    if len(node.all_input_nodes) != 2:  # a number, or twice the same
        return None
    in_place = node.target is operator.iadd or node.target == "add_"
    if in_place and node.args[0] is not tail:
        return None
    return "in place" if in_place else "anew"
