"""Put a program on the meta device for the length of a capture, and put everything back afterwards.

Parameters, buffers, inputs and optimizers are replaced by meta twins. What the program writes into containers and
objects of its own on the way (caches, counters, schedulers) is taken back in place, so that the real program finds
them as it left them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError
from .ir import WHAT_IFS
from .nested import find_containers, holds_at_most, refill
from .recorder import layout_error
from .surroundings import MAX_VALUES, Surroundings

_TORCH = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CAST: dict[str, torch.dtype] = {name: _TORCH[stored] for name, stored in WHAT_IFS.items()}
"""What a model's floats are cast to for a what-if."""


class MetaTwins:
    """Makes meta twins, exactly one of each real tensor, cast to a what-if precision."""

    def __init__(self, precision: str | None) -> None:
        self._dtype = CAST[precision] if precision else None
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The meta twin of a tensor or parameter."""
        if id(tensor) in self._twins:
            return self._twins[id(tensor)][1]
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise CaptureError(
                "the model has a lazy layer whose shape is not known yet",
                why="its parameters are made at its first call",
                fix="call the model once (on meta tensors it costs nothing), then predict it",
            )
        if tensor.layout not in (torch.strided, torch.sparse_coo):
            raise layout_error("an input, parameter or buffer is", tensor.layout)
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        if tensor.device.type == "meta" and dtype == tensor.dtype:
            meta = tensor
        else:
            with torch.no_grad():
                meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
            if isinstance(tensor, torch.nn.Parameter):
                meta = torch.nn.Parameter(meta, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad and tensor.is_leaf:
                meta.requires_grad_(True)
        if tensor.layout is torch.sparse_coo and meta is not tensor:
            meta.sparse_nnz = tensor._nnz()  # for `intercept`: the twin itself is dense
        self._twins[id(tensor)] = (tensor, meta)
        return meta

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every real tensor so far with its twin."""
        return list(self._twins.values())

    @contextlib.contextmanager
    def replace_modules(self, roots: list[torch.nn.Module]) -> Iterator[None]:
        """Replace the parameters and buffers of modules by twins, and put all attributes back at the end."""
        saved = []
        for module in {id(m): m for root in roots for m in root.modules()}.values():
            own = {name: dict(module.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")}
            saved.append((module, dict(module.__dict__), own))
        try:
            for module, _, own in saved:
                for name in ("_parameters", "_buffers"):
                    twins = {key: self.twin(t) for key, t in own[name].items() if t is not None}
                    module.__dict__[name].update(twins)
                if isinstance(module, torch.nn.RNNBase):
                    module._init_flat_weights()  # or its call would find other weights and do this within the step
            yield
        finally:
            for module, attributes, own in saved:
                stores = {name: module.__dict__[name] for name in own}  # torch holds on to these very dicts
                module.__dict__.clear()
                module.__dict__.update(attributes | stores)
                for name, store in stores.items():
                    store.clear()
                    store.update(own[name])

    @contextlib.contextmanager
    def replace_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
        """Let optimizers step the twins instead of the parameters they were made for."""
        states = [(optimizer, optimizer.state) for optimizer in optimizers]
        groups = [(group, dict(group)) for o in optimizers for group in o.param_groups]
        try:
            for group, before in groups:
                group["params"] = [self.twin(p) for p in before["params"]]
            for optimizer, state in states:
                optimizer.state = type(state)(dict)
            yield
        finally:
            for group, before in groups:  # the parameters, and the rate that a scheduler may have changed
                group.update(before)
            for optimizer, state in states:
                optimizer.state = state

    def copy_inputs(self, inputs: Any) -> Any:
        """A copy of the inputs, however nested, with meta twins in place of their tensors."""
        with _CopyToMeta(self):
            try:
                return copy.deepcopy(inputs)
            except (TypeError, RuntimeError):
                return inputs  # something that cannot be copied: its tensors are replaced where they are used


class _CopyToMeta(TorchFunctionMode):
    """`copy.deepcopy` that makes meta twins instead of copies."""

    def __init__(self, twins: MetaTwins) -> None:
        super().__init__()
        self._twins = twins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            twin = self._twins.twin(args[0])
            args[1][id(args[0])] = twin
            return twin
        return func(*args, **(kwargs or {}))


def list_attributes(modules: list[torch.nn.Module]) -> list[Any]:
    """What modules and their submodules hold beside parameters, buffers and submodules."""
    return [
        value
        for root in modules
        for module in root.modules()
        for name, value in module.__dict__.items()
        if name not in ("_parameters", "_buffers", "_modules") and holds_at_most(value, MAX_VALUES)
    ]


@contextlib.contextmanager
def stage_surroundings(
    modules: list[torch.nn.Module], program: Callable[..., Any], make_twin: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Give containers in modules, and the variables around a callable, their contents back at the end.

    Tensors around it that want gradients are replaced by twins: a meta gradient cannot reach a real one.
    """
    attributes = list_attributes(modules)
    around = None if isinstance(program, torch.nn.Module) else Surroundings(program)
    values = around.values() if around is not None else {}
    outside, inside = (
        [(c, c.copy()) for c in find_containers(things, search=True)] for things in ([*values.values()], attributes)
    )
    try:
        if around is not None:
            around.restore({name: _swap_leaves(value, make_twin) for name, value in values.items()})
        for container, contents in outside:
            if isinstance(contents, (dict, list)):
                for key, value in list(contents.items() if isinstance(contents, dict) else enumerate(contents)):
                    if (twin := _swap_leaves(value, make_twin)) is not value:
                        container[key] = twin
        yield
    finally:
        if around is not None:
            around.restore(values)
        for container, contents in (*inside, *outside):
            refill(container, contents)


def _swap_leaves(value: Any, make_twin: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the twin of a tensor that wants gradients, a tuple with such twins, or the value itself."""
    if isinstance(value, torch.Tensor):
        wanted = value.requires_grad and value.is_leaf and value.device.type != "meta"
        return make_twin(value) if wanted else value
    if type(value) is tuple:
        twin = tuple(_swap_leaves(item, make_twin) for item in value)
        return value if all(a is b for a, b in zip(twin, value, strict=True)) else twin
    return value
