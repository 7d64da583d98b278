"""Models and inputs on the meta device for the length of a capture, and everything as it was afterwards."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError
from .ir import WHAT_IFS

_TORCH = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CAST: dict[str, torch.dtype] = {name: _TORCH[kept] for name, kept in WHAT_IFS.items()}
"""What a model's floats are cast to for a what-if."""


class Stage:
    """Makes meta twins, each real tensor exactly one, cast to a what-if precision."""

    def __init__(self, precision: str | None) -> None:
        self._dtype = CAST[precision] if precision else None
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The meta twin of a tensor or parameter."""
        found = self._twins.get(id(tensor))
        if found is not None:
            return found[1]
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise CaptureError(
                "the model has a lazy layer whose shape is not known yet",
                why="its parameters are made at its first call",
                fix="call the model once (on meta tensors it costs nothing), then predict it",
            )
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
        self._twins[id(tensor)] = (tensor, meta)
        return meta

    def twins(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every real tensor so far with its twin."""
        return list(self._twins.values())

    @contextlib.contextmanager
    def modules(self, roots: list[torch.nn.Module]) -> Iterator[None]:
        """Parameters and buffers of modules replaced by twins, and all attributes put back at the end."""
        kept: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        seen: set[int] = set()
        for module in (m for root in roots for m in root.modules()):
            if id(module) in seen:
                continue
            seen.add(id(module))
            attributes = dict(module.__dict__)
            attributes["_modules"] = dict(module._modules)
            kept.append((module, attributes, dict(module._parameters), dict(module._buffers)))
        try:
            for module, _, parameters, buffers in kept:
                for own, store in ((parameters, module._parameters), (buffers, module._buffers)):
                    store.update({name: self.twin(t) for name, t in own.items() if t is not None})
            yield
        finally:
            for module, attributes, parameters, buffers in kept:
                now, children = dict(module.__dict__), attributes.pop("_modules")
                module.__dict__.clear()
                module.__dict__.update(attributes)
                for name in ("_parameters", "_buffers", "_modules"):  # torch holds on to these very dicts
                    module.__dict__[name] = now[name]
                module._modules.clear()
                module._modules.update(children)
                module._parameters.clear()
                module._parameters.update(parameters)
                module._buffers.clear()
                module._buffers.update(buffers)

    @contextlib.contextmanager
    def optimizers(self, found: list[torch.optim.Optimizer]) -> Iterator[None]:
        """Optimizers that step the twins instead of the parameters they were made for."""
        kept = [(o, [list(g["params"]) for g in o.param_groups], o.state) for o in found]
        settings = [(group, dict(group)) for o in found for group in o.param_groups]  # a scheduler changes the rate
        try:
            for optimizer, groups, _ in kept:
                for group, params in zip(optimizer.param_groups, groups, strict=True):
                    group["params"] = [self.twin(p) for p in params]
                optimizer.state = type(optimizer.state)(dict)
            yield
        finally:
            for optimizer, groups, state in kept:
                for group, params in zip(optimizer.param_groups, groups, strict=True):
                    group["params"] = params
                optimizer.state = state
            for group, before in settings:
                group.update({k: v for k, v in before.items() if k != "params"})

    def inputs(self, given: Any) -> Any:
        """A copy of the inputs, however nested, with meta twins in place of their tensors."""
        with _CopyToMeta(self):
            try:
                return copy.deepcopy(given)
            except (TypeError, RuntimeError):
                return given  # something that cannot be copied: its tensors are replaced where they are used


class _CopyToMeta(TorchFunctionMode):
    """`copy.deepcopy` that makes meta twins instead of copies."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            twin = self._stage.twin(args[0])
            args[1][id(args[0])] = twin
            return twin
        return func(*args, **(kwargs or {}))
