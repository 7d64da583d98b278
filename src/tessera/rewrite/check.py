"""Whether a rewritten program computes what the original did: results and gradients, on the same inputs and state.

Each value is compared by its relative Frobenius error and by its largest deviation relative to its largest magnitude.
A value that is small beside all others (the gradient of a key's bias is zero but for rounding) is compared on the scale
of a thousandth of the largest. What the runs change (parameters, buffers, gradients, the optimizer's state, random
generators) is put back. Programs that draw random numbers are compared in eval mode: Inductor draws other ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2,
}  # fmt: skip
"""Relative Frobenius error allowed by number format: 20 rounding errors (unit roundoff 2^-9 of bf16, 2^-11 of fp16),
rounded up; fp32 is wider than its rounding, since eager and compiled may use TF32 in different places."""

GRADIENTS = 5.0
"""How much larger the error of one gradient may be than that of all together: those of biases and norms are sums over
many rounded values that nearly cancel (5e-2 between eager and Inductor in bf16, four layers of GPT-2 on a CPU)."""

WORST = 10.0
"""How much larger the deviation of a single element may be, relative to the largest element."""

_SMALL = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a comparison found: the largest errors, where, and what was allowed there."""

    ok: bool
    relative: float
    worst: float
    allowed: float
    where: str = ""
    why: str = ""
    compared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How one iteration of a model or a step is run: what `optimize` checks and measures."""

    call: Callable[..., Any]
    modules: tuple[torch.nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    mode: Literal["infer", "train", "step"]

    def run(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One iteration with `call` in the model's place; what it returned."""
        if self.mode == "infer":
            with torch.no_grad():
                return call(*args, **kwargs)
        if self.mode == "step":
            return call(*args, **kwargs)
        out = call(*args, **kwargs)
        scalar_of(out).backward()
        return out

    def observe(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], seed: int = 0
    ) -> dict[str, Any]:
        """Run once and note every value that must not change: results, gradients, buffers, how far parameters move."""
        with self.untouched(seed):
            seen: dict[str, Any] = {}
            start = [(p, p.detach().clone()) for _, p in self._parameters()] if self.mode == "step" else []
            with self._gradients(seen):
                result = self.run(call, args, kwargs)
            seen |= {f"result{k}": v for k, v in _floats(result).items()}
            if start:
                moved = torch.stack([(p.detach() - old).float().norm() for p, old in start]).norm()
                seen["size of the update"] = moved.to(start[0][1].dtype)
            if self.mode != "infer":
                buffers = [item for module in self.modules for item in module.named_buffers()]
                seen |= {name: b.detach().clone() for name, b in buffers if b.is_floating_point()}
        return seen

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """All parameters that are trained, each once, by name."""
        found = {id(p): (name, p) for m in self.modules for name, p in m.named_parameters() if p.requires_grad}
        return list(found.values())

    @contextlib.contextmanager
    def _gradients(self, seen: dict[str, Any]) -> Iterator[None]:
        """Note every gradient when it is there: a step may clear it before it ends.

        The parameters after an update are not compared: Adam makes a full step of a gradient that is nothing but
        rounding, in one direction or the other. Only how far they moved in all is.
        """

        def note(name: str, parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            seen[f"gradient of {name}"] = parameter.grad.detach().clone()

        hooks = []
        if self.mode != "infer":
            for name, p in self._parameters():
                hooks.append(p.register_post_accumulate_grad_hook(functools.partial(note, name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def untouched(self, seed: int = 0) -> Iterator[None]:
        """Everything the body changes is put back: state, gradients, random generators."""
        states = [(m, _copied(m.state_dict())) for m in self.modules]
        grads = [(p, p.grad) for m in self.modules for p in m.parameters()]
        for p, _ in grads:
            p.grad = None  # a new one is made: the old one is not written into
        held = [(o, {p: _copied(s) for p, s in o.state.items()}, [dict(g) for g in o.param_groups]) for o in
                self.optimizers]  # fmt: skip
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        try:
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(seed)
                yield
        finally:
            with torch.no_grad():
                for module, state in states:
                    _restore(module, state)
                for optimizer, kept, groups in held:
                    _restore_optimizer(optimizer, kept, groups)
            for p, grad in grads:
                p.grad = grad

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """All modules in eval mode; how each was before is put back."""
        flags = [(m, m.training) for root in self.modules for m in root.modules()]
        for root in self.modules:
            root.eval()
        try:
            yield
        finally:
            for module, training in flags:
                module.training = training


def scalar_of(output: Any) -> torch.Tensor:
    """The model's own loss where it has one; else a weighted sum in which every element counts differently."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    parts = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    weighted = [(t.float() * torch.arange(t.numel(), device=t.device).cos().view(t.shape)).sum() for t in parts]
    return torch.stack(weighted).sum() if weighted else torch.zeros((), requires_grad=True)


def compare(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float | None = None) -> Verdict:
    """Two observations of the same program; `tolerance` replaces the one of each value's number format."""
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        return Verdict(ok=False, relative=float("inf"), worst=float("inf"), allowed=0.0, where=odd[0],
                       why=f"{odd[0]} is there on one side only")  # fmt: skip
    largest = max((float(v.double().norm()) for k, v in before.items() if k.startswith("gradient")), default=0.0)
    worst: Verdict | None = _together(before, after, tolerance) if largest else None
    for name, old in before.items():
        gradient = name.startswith("gradient")
        allowed = (tolerance or _allowed(old, after[name])) * (GRADIENTS if gradient else 1.0)
        floor = _SMALL * largest if gradient else 0.0
        found = _one(name, old, after[name], allowed, floor)
        if worst is None or (worst.ok, -_excess(worst)) > (found.ok, -_excess(found)):
            worst = found
    if worst is None:
        return Verdict(ok=True, relative=0.0, worst=0.0, allowed=tolerance or 0.0, why="nothing to compare")
    return replace(worst, compared=len(before))


def _together(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float | None) -> Verdict | None:
    """All gradients as one vector; None where one is of another shape, which is found one by one."""
    names = [name for name in before if name.startswith("gradient")]
    if any(before[name].shape != after[name].shape for name in names):
        return None
    off = sum(float((before[n].double() - after[n].double()).square().sum()) for n in names) ** 0.5
    size = sum(float(before[n].double().square().sum()) for n in names) ** 0.5
    allowed = tolerance or max(_allowed(before[n]) for n in names)
    relative = off / size if size else 0.0
    ok = relative <= allowed
    why = "" if ok else f"all gradients together: relative error {relative:.2g}, at most {allowed:.2g} is allowed"
    return Verdict(ok=ok, relative=relative, worst=relative, allowed=allowed, where="all gradients", why=why)


def _one(name: str, old: torch.Tensor, new: torch.Tensor, allowed: float, floor: float) -> Verdict:
    if old.shape != new.shape or old.dtype != new.dtype:
        what = f"{list(old.shape)} {old.dtype} became {list(new.shape)} {new.dtype}"
        return Verdict(ok=False, relative=float("inf"), worst=float("inf"), allowed=allowed, where=name, why=what)
    a, b = old.detach().double(), new.detach().double()
    strange = ~torch.isfinite(a)
    if bool(strange.any()):  # what was infinite or no number must be so again
        same = torch.equal(torch.nan_to_num(a)[strange], torch.nan_to_num(b)[strange])
        if not same or not bool((torch.isnan(a) == torch.isnan(b)).all()):
            return Verdict(ok=False, relative=float("inf"), worst=float("inf"), allowed=allowed, where=name,
                           why="infinities or NaNs differ")  # fmt: skip
        a, b = a[~strange], b[~strange]
    if not a.numel():
        return Verdict(ok=True, relative=0.0, worst=0.0, allowed=allowed, where=name)
    norm, top = float(a.norm()), float(a.abs().max())
    gap, largest = float((a - b).norm()), float((a - b).abs().max())
    relative = gap / max(norm, floor) if max(norm, floor) > 0 else (0.0 if gap == 0 else float("inf"))
    worst = largest / max(top, floor) if max(top, floor) > 0 else (0.0 if largest == 0 else float("inf"))
    ok = relative <= allowed and worst <= WORST * allowed
    why = "" if ok else f"{name}: relative error {relative:.2g}, at most {allowed:.2g} is allowed"
    return Verdict(ok=ok, relative=relative, worst=worst, allowed=allowed, where=name, why=why)


def _excess(found: Verdict) -> float:
    return max(found.relative, found.worst / WORST) / found.allowed if found.allowed else found.relative


def _allowed(*values: torch.Tensor) -> float:
    return max(TOLERANCE.get(v.dtype, 1e-3) for v in values)


def _floats(output: Any) -> dict[str, torch.Tensor]:
    leaves = pytree.tree_leaves(_plain(output))
    return {
        f"[{i}]": leaf.detach().clone()
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.dtype == torch.int64)
    }


def _plain(output: Any) -> Any:
    """Outputs of Hugging Face models are mappings torch does not always know."""
    return dict(output) if isinstance(output, Mapping) else output


def _copied(state: Any) -> Any:
    """A state dict with every tensor cloned."""
    return pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, dict(state))


def _restore(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Values back into the same tensors: captured graphs keep their addresses."""
    for name, value in module.state_dict().items():
        if isinstance(value, torch.Tensor) and name in state and not torch.equal(value, state[name]):
            value.copy_(state[name])


def _restore_optimizer(optimizer: torch.optim.Optimizer, kept: Mapping[Any, Any], groups: Sequence[Any]) -> None:
    """The optimizer's state back into the same tensors; what did not exist is taken away again."""
    for parameter in [p for p in optimizer.state if p not in kept]:
        del optimizer.state[parameter]
    for parameter, state in kept.items():
        now = optimizer.state[parameter]
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and isinstance(now.get(name), torch.Tensor):
                now[name].copy_(value)
            else:
                now[name] = value
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group.update(before)
