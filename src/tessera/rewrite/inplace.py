"""Elementwise operators of an fx graph that may write over their input, because nobody reads it afterwards.

    rewrites = inplace.rewrite(graph_module, inputs)          # relu(x) -> relu_(x), a + b -> a.add_(b)

The graph is run once on fake tensors: which values share memory, and what autograd saves for backward, is read off
there rather than guessed. The bytes that cross memory stay the same; what is spared is the allocation of the result.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..errors import RewriteError
from ..graph.rewrites import Rewrite
from .effects import has_effect, name_of


@dataclass(frozen=True, slots=True)
class _Form:
    """The in-place method of an operator; `keeps` says what backward needs of it: "" nothing, "result", "input"."""

    method: str
    keeps: str = ""


# Operators whose in-place form is exact. Backward of the ones that keep their input would read what was overwritten.
_FORMS: Mapping[str, _Form] = {
    "relu": _Form("relu_", "result"), "sigmoid": _Form("sigmoid_", "result"), "tanh": _Form("tanh_", "result"),
    "exp": _Form("exp_", "result"), "sqrt": _Form("sqrt_", "result"), "rsqrt": _Form("rsqrt_", "result"),
    "neg": _Form("neg_"), "add": _Form("add_"), "sub": _Form("sub_"), "mul": _Form("mul_", "input"),
    "div": _Form("div_", "input"), "true_divide": _Form("div_", "input"), "truediv": _Form("div_", "input"),
    "abs": _Form("abs_", "input"), "square": _Form("square_", "input"), "clamp": _Form("clamp_", "input"),
    "log": _Form("log_", "input"), "sin": _Form("sin_", "input"), "cos": _Form("cos_", "input"),
    "floor": _Form("floor_"), "ceil": _Form("ceil_"), "round": _Form("round_"), "erf": _Form("erf_", "input"),
    "reciprocal": _Form("reciprocal_", "result"), "pow": _Form("pow_", "input"),
}  # fmt: skip
_OPERATORS = {operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.truediv: "div",
              operator.neg: "neg"}  # fmt: skip
_MODULES: Mapping[type, str] = {nn.ReLU: "relu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh"}
_COMMUTE = frozenset({"add", "mul"})


def rewrite(module: fx.GraphModule, inputs: Sequence[Any], *, training: bool | None = None) -> list[Rewrite]:
    """Turn what can be turned, in place in the graph; one `Rewrite` for each node, with the bytes not allocated.

    `training=True` keeps whatever backward needs; None: as gradients are enabled and wanted by a parameter or an input.
    `inputs` are positional arguments, real or fake: nothing is computed.
    """
    if training is None:
        wanted = any(t.requires_grad for t in (*module.parameters(), *_tensors(inputs)))
        training = torch.is_grad_enabled() and wanted
    lives = _observe(module, inputs, training)
    done = []
    for node in list(module.graph.nodes):
        name = _operator(node, module)
        operand = _operand(node, name, lives, training) if name else None
        if name is None or operand is None:
            continue
        nbytes = lives.nbytes(node)
        made = _turn(module.graph, node, operand, name)
        lives.turned(node, made, operand)
        why = f"{operand.name} is not read again: its memory takes the result; as many bytes cross as before"
        done.append(
            Rewrite(
                rule="in_place",
                before=name,
                after=_FORMS[name].method,
                by="tessera",
                where=made.name,
                saved_bytes=float(nbytes),
                why=why,
            )
        )
    if done:
        module.graph.lint()
        module.recompile()
    return done


# -- what shares memory, and what backward keeps --------------------------------------------------------------------


@dataclass(slots=True)
class _Lives:
    """Facts of a run on fake tensors: the value of each node, the storages backward keeps, where each is used last."""

    values: dict[fx.Node, Any] = field(default_factory=dict)
    saved_by: dict[int, set[fx.Node]] = field(default_factory=dict)
    last_use: dict[int, int] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    place: dict[fx.Node, int] = field(default_factory=dict)
    merged: dict[int, int] = field(default_factory=dict)

    def storages(self, node: fx.Node) -> set[int]:
        """The memory a node's value lies in: after a node was turned, its operand's."""
        return {self._now(t.untyped_storage()._cdata) for t in _tensors(self.values.get(node))}

    def _now(self, storage: int) -> int:
        while storage in self.merged:
            storage = self.merged[storage]
        return storage

    def nbytes(self, node: fx.Node) -> int:
        value = self.values[node]
        return int(value.numel() * value.element_size())

    def count(self, module: fx.GraphModule) -> None:
        """Where each storage is used last; the output uses what it returns for ever."""
        for i, node in enumerate(module.graph.nodes):
            self.place[node] = i
            for used in node.all_input_nodes:
                for storage in self.storages(used):
                    self.last_use[storage] = len(module.graph.nodes) if node.op == "output" else i

    def turned(self, node: fx.Node, made: fx.Node, operand: fx.Node) -> None:
        """The result, and every view of it, now lie where the operand did."""
        (new,), (old,) = self.storages(node), self.storages(operand)
        self.values[made], self.place[made] = self.values[node], self.place[node]
        self.merged[new] = old
        self.last_use[old] = max(self.last_use.get(new, self.place[node]), self.place[node])
        self.saved_by.setdefault(old, set()).update(self.saved_by.get(new, ()))


def _observe(module: fx.GraphModule, inputs: Sequence[Any], training: bool) -> _Lives:
    from torch._subclasses.fake_tensor import FakeTensorMode

    lives = _Lives()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [_faked(mode, x, training) for x in inputs]
        twin = _fake_module(mode, module, training)
        try:
            with torch.set_grad_enabled(training):
                _Watching(twin, module, lives).run(*fake)
        except (RuntimeError, TypeError, ValueError) as e:
            raise RewriteError(
                f"the graph does not run on these inputs: {str(e).splitlines()[0][:200]}",
                why="in-place forms are only chosen from what a run shows",
                fix="pass inputs the module takes, in order",
            ) from e
    lives.count(module)
    return lives


def _faked(mode: Any, leaf: Any, training: bool) -> Any:
    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        fake = mode.from_tensor(x)
        return fake.requires_grad_(x.requires_grad and training) if fake.is_leaf else fake

    return pytree.tree_map(one, leaf)


def _fake_module(mode: Any, module: fx.GraphModule, training: bool) -> dict[str, Any]:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: _faked(mode, t, training) for name, t in named.items()}


class _Watching(fx.Interpreter):
    """Runs the nodes on fake tensors and notes values, storages saved for backward, and storages that were given."""

    def __init__(self, weights: Mapping[str, Any], module: fx.GraphModule, lives: _Lives) -> None:
        super().__init__(module)
        self._weights, self._lives = weights, lives

    def run_node(self, n: fx.Node) -> Any:
        def pack(t: torch.Tensor) -> torch.Tensor:
            self._lives.saved_by.setdefault(t.untyped_storage()._cdata, set()).add(n)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            value = super().run_node(n)
        self._lives.values[n] = value
        if n.op in ("placeholder", "get_attr"):
            self._lives.given |= self._lives.storages(n)
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._weights[target] if target in self._weights else super().get_attr(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        own = {n.removeprefix(f"{target}."): t for n, t in self._weights.items() if n.startswith(f"{target}.")}
        self._lives.given |= {t.untyped_storage()._cdata for t in own.values()}
        return torch.func.functional_call(self.fetch_attr(target), own, args, kwargs)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


# -- which may be turned --------------------------------------------------------------------------------------------


def _operator(node: fx.Node, module: fx.GraphModule) -> str | None:
    """The name of an operator that has an exact in-place form, in the plain form of its arguments."""
    if node.op == "call_module":
        return _MODULES.get(type(module.get_submodule(str(node.target)))) if has_effect(node, module) is None else None
    if node.op not in ("call_function", "call_method") or has_effect(node, module) is not None:
        return None
    name = _OPERATORS.get(node.target) if callable(node.target) else None
    name = name or name_of(node)
    if name not in _FORMS or not node.args or any(k not in ("alpha", "min", "max") for k in node.kwargs):
        return None
    return name


def _operand(node: fx.Node, name: str, lives: _Lives, training: bool) -> fx.Node | None:
    """The argument whose memory the result may take."""
    places = (0, 1) if name in _COMMUTE and len(node.args) == 2 and "alpha" not in node.kwargs else (0,)
    for at in places:
        operand = node.args[at]
        if isinstance(operand, fx.Node) and _may_overwrite(node, operand, name, lives, training):
            return operand
    return None


def _may_overwrite(node: fx.Node, operand: fx.Node, name: str, lives: _Lives, training: bool) -> bool:
    old, new = lives.values.get(operand), lives.values.get(node)
    if (
        not isinstance(old, torch.Tensor)
        or not isinstance(new, torch.Tensor)
        or operand.op in ("placeholder", "get_attr")
    ):
        return False
    if (old.shape, old.dtype, old.stride()) != (new.shape, new.dtype, new.stride()) or _overlaps(old):
        return False
    here = lives.place[node]
    others = [a for a in node.all_input_nodes if a is not operand and lives.storages(a) & lives.storages(operand)]
    if others or sum(a is operand for a in node.args) > 1:
        return False
    for storage in lives.storages(operand):
        if storage in lives.given or lives.last_use.get(storage, here) > here:
            return False
        if training and (lives.saved_by.get(storage) or old._is_view() or _FORMS[name].keeps == "input"):
            return False
    return True


def _overlaps(t: torch.Tensor) -> bool:
    """Whether two elements may share an address: expanded dimensions."""
    return any(size > 1 and step == 0 for size, step in zip(t.shape, t.stride(), strict=True))


def _turn(graph: fx.Graph, node: fx.Node, operand: fx.Node, name: str) -> fx.Node:
    rest = [a for a in node.args if a is not operand] if node.op != "call_module" else []
    with graph.inserting_after(node):
        made = graph.call_method(_FORMS[name].method, (operand, *rest), dict(node.kwargs))
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return made
