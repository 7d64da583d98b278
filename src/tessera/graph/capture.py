"""Capture: one iteration of any model or callable as a `Graph`, with nothing allocated and nothing computed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, CaptureError, TesseraError, did_you_mean
from .autocast import followed
from .dynamo import real_names
from .fastpath import fast_paths
from .flex import flexible
from .intercept import Interceptor, patched
from .ir import Graph
from .keep import replace_leaves, restore_containers
from .record import NOT_THE_USERS, Recorder, paused
from .stage import CAST, Stage
from .surroundings import find_models

Mode = Literal["infer", "train"]
# While a program is captured, names of torch and the model's tensors are replaced: one capture at a time.
_ONE_AT_A_TIME = threading.RLock()
OPTIMIZERS = ("sgd", "adamw")


def capture(
    model: Callable[..., Any],
    inputs: Any = (),
    *,
    mode: Mode = "infer",
    precision: str | None = None,
    optimizer: str | torch.optim.Optimizer = "sgd",
    batch: int | None = None,
    replay: bool = False,
    name: str | None = None,
) -> Graph:
    """Capture one steady iteration of a model (or of a callable that does its own step).

    `inputs` are a tensor, a tuple of positional or a dict of keyword arguments, real or meta. In mode "infer" a module
    runs in eval mode without gradients; "train" adds the loss, backward and an optimizer step. A callable that is no
    module runs as it is. `precision` casts parameters and floating inputs; `batch` rescales the first dimension;
    `replay` says that the program will be recorded into a CUDA graph, which some programs ask.
    """
    model = _eager_form(model)
    _check(mode, precision, optimizer, batch)
    stage = Stage(precision)
    recorder = Recorder(always_tf32=precision == "tf32")
    args, kwargs = _arguments(stage, recorder, inputs, batch)
    module = model if isinstance(model, torch.nn.Module) else None
    modules, optimizers = ([module], []) if module is not None else find_models(model)
    if module is not None and isinstance(optimizer, torch.optim.Optimizer):
        optimizers = [optimizer]  # the user's own: it must step the twins, not the model
    if module is None and mode == "train":
        raise ArgumentError(
            "mode='train' needs a model",
            why=f"{_title(model)} is a plain callable: where its loss is cannot be known",
            fix="pass the nn.Module, or a callable that does its own forward, backward and step with mode='infer'",
        )
    with _ONE_AT_A_TIME, real_names() as stack:
        stack.enter_context(restore_containers(modules, model))
        stack.enter_context(stage.modules(modules))
        stack.enter_context(stage.optimizers(optimizers))
        stack.enter_context(replace_leaves(model, stage.twin))
        recorder.known.note_small(stage.twins())
        stack.enter_context(_training_flags(module, mode))
        for m in modules:
            stack.callback(_adopt(recorder, m))
        stack.enter_context(_scopes(recorder, modules))
        interceptor = Interceptor(recorder)
        stack.enter_context(followed(interceptor.autocast, recorder.assumptions))
        stack.enter_context(patched(recorder, replay, interceptor.autocast))
        stack.enter_context(fast_paths(recorder, interceptor.autocast))
        stack.enter_context(flexible(recorder))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(interceptor)
        stack.enter_context(recorder)
        _run(model, module, mode, args, kwargs, recorder, optimizer, optimizers)
    return _graph(name or _title(model), recorder, mode if module is not None else "step", args, kwargs, modules)


def _eager_form(model: Any) -> Any:
    """The program as Python: what an exported program wraps; a scripted one has none."""
    if isinstance(model, torch.export.ExportedProgram):
        return model.module()
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            "a scripted module cannot be captured",
            why="TorchScript runs its own interpreter, which dispatch modes do not see into",
            fix="pass the nn.Module it was made of",
        )
    return model


def _check(mode: str, precision: str | None, optimizer: Any, batch: int | None) -> None:
    if mode not in ("infer", "train"):
        raise ArgumentError(f"no mode {mode!r}{did_you_mean(mode, ('infer', 'train'))}", fix="mode='infer' or 'train'")
    if precision is not None and precision not in CAST:
        raise ArgumentError(
            f"no precision {precision!r}{did_you_mean(precision, CAST)}", fix=f"one of {', '.join(CAST)}"
        )
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise ArgumentError(
            f"no optimizer {optimizer!r}{did_you_mean(optimizer, OPTIMIZERS)}", fix=f"one of {', '.join(OPTIMIZERS)}"
        )
    if batch is not None and batch < 1:
        raise ArgumentError(f"a batch of {batch}", fix="batch is a positive number of samples")


def _arguments(
    stage: Stage, recorder: Recorder, inputs: Any, batch: int | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    real = inputs
    if batch is not None:
        inputs = _rescaled(inputs, batch)
    staged = stage.inputs(inputs)
    if batch is None:
        for given, meta in zip(pytree.tree_leaves(real), pytree.tree_leaves(staged), strict=False):
            if isinstance(given, torch.Tensor) and given.device.type == "cpu" and not given.is_floating_point():
                recorder.known.note(meta, given)
    for leaf in pytree.tree_leaves(staged):
        if isinstance(leaf, torch.Tensor):
            recorder.adopt(leaf, "inputs")
    if isinstance(staged, Mapping):
        return (), dict(staged)
    if isinstance(staged, (tuple, list)):
        return tuple(staged), {}
    return (staged,), {}


def _rescaled(inputs: Any, batch: int) -> Any:
    """Inputs with another first dimension, on meta: integers lose their values and become shapes."""
    old = batch_of(inputs)
    if old is None:
        raise ArgumentError("batch= needs an input with a first dimension", fix="leave batch out")

    def resize(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == old:
            return torch.empty((batch, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")
        return leaf

    return pytree.tree_map(resize, inputs)


def batch_of(inputs: Any) -> int | None:
    """The first dimension of the first tensor among the inputs."""
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    return None


@contextlib.contextmanager
def _training_flags(module: torch.nn.Module | None, mode: Mode) -> Iterator[None]:
    """eval() or train() for the capture; the stage puts the flags back with the other attributes."""
    if module is not None:
        with contextlib.suppress(NotImplementedError):  # an exported program has no train(): its mode is fixed
            module.train(mode == "train")
    with torch.set_grad_enabled(mode == "train" if module is not None else torch.is_grad_enabled()):
        yield


def _adopt(recorder: Recorder, module: torch.nn.Module) -> Callable[[], None]:
    """Note what a model holds, and its gradients when they come; the result takes the hooks away again."""
    hooks = []
    for name, parameter in module.named_parameters():
        recorder.adopt(parameter, "weights", name)
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(lambda p: recorder.mark(p.grad, "gradients")))
    for name, buffer in module.named_buffers():
        recorder.adopt(buffer, "weights", name)

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return remove


@contextlib.contextmanager
def _scopes(recorder: Recorder, modules: list[torch.nn.Module]) -> Iterator[None]:
    """The path of the module that is running, kept by global hooks; and how many module calls the host has made."""
    names: dict[int, str] = {}
    for root in modules:
        for name, module in root.named_modules():
            names.setdefault(id(module), name)
    stack: list[str] = []

    here = threading.get_ident()

    def enter(module: torch.nn.Module, _args: Any) -> None:
        if threading.get_ident() != here:
            return  # global hooks see every thread's modules
        recorder.modules += 1
        stack.append(names.get(id(module), stack[-1] if stack else ""))

    def leave(_module: torch.nn.Module, _args: Any, _out: Any) -> None:
        if threading.get_ident() == here and stack:
            stack.pop()

    recorder.scope = lambda: stack[-1] if stack else ""
    hooks = (
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _run(
    model: Any,
    module: torch.nn.Module | None,
    mode: Mode,
    args: Any,
    kwargs: Any,
    recorder: Recorder,
    optimizer: Any,
    optimizers: list[torch.optim.Optimizer],
) -> None:
    """The iteration itself; what goes wrong in it names the line."""
    try:
        if module is not None and mode == "train":
            stepper = _make_optimizer(optimizer, module)
            _prime(recorder, [stepper])
            _train_step(module, args, kwargs, recorder, stepper)
        else:
            _prime(recorder, optimizers)
            model(*args, **kwargs)
    except TesseraError:
        raise
    except Exception as e:
        raise CaptureError(
            f"{_title(model)} cannot be captured: {type(e).__name__}: {_first_line(e)}",
            why=f"raised {_raised_at(e)} while running on meta tensors (shapes without values)",
            fix="check that the model runs with these inputs; if it does, it needs values: measure it instead "
            "(tessera measure)",
        ) from e


def _train_step(
    module: torch.nn.Module, args: Any, kwargs: Any, recorder: Recorder, optimizer: torch.optim.Optimizer
) -> None:
    output = module(*args, **kwargs)  # held until the step is over, as `out = model(x)` does in everybody's loop
    loss = loss_of(output, args, kwargs)
    loss.backward()
    recorder.phase = "optimizer"
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    recorder.phase = "forward"


def loss_of(output: Any, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The model's own loss where it has one, otherwise the fp32 cross-entropy of its output."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if isinstance(loss, torch.Tensor):
        return loss
    logits = _logits(output)
    if logits.dim() == 0:
        return logits
    classes = 1 if logits.dim() in (2, 4, 5) else logits.dim() - 1
    if logits.dim() == 3:
        logits, classes = logits.reshape(-1, logits.shape[-1]), 1
    shape = [size for i, size in enumerate(logits.shape) if i != classes]
    target = torch.empty(shape, dtype=torch.int64, device=logits.device)
    return torch.nn.functional.cross_entropy(logits.float(), target)


def _logits(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    for name in ("logits", "out", "last_hidden_state", "pooler_output"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return found
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    raise CaptureError("the model returns no floating-point tensor to make a loss of", fix="return logits or a loss")


def _make_optimizer(optimizer: Any, module: torch.nn.Module) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise ArgumentError("mode='train', but no parameter requires a gradient", fix="mode='infer'")
    if optimizer == "adamw":
        return torch.optim.AdamW(parameters)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _prime(recorder: Recorder, optimizers: list[torch.optim.Optimizer]) -> None:
    """An unrecorded first step, so that the optimizer's state exists as it does in every later one."""
    with paused(recorder), torch.no_grad():
        for optimizer in optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            for p in parameters:
                p.grad = torch.empty_like(p)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.device.type == "meta":
                        recorder.adopt(value, "optimizer")


def _graph(name: str, recorder: Recorder, mode: str, args: Any, kwargs: Any, modules: list[torch.nn.Module]) -> Graph:
    samples = batch_of((args, kwargs))
    tokens = None
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.int64 and leaf.dim() == 2:
            tokens = int(leaf.numel())
            break
    return Graph(
        name=name,
        ops=tuple(recorder.ops),
        storages=dict(recorder.storages),
        mode=mode,  # type: ignore[arg-type]
        samples=samples,
        tokens=tokens,
        parameters=sum(p.numel() for m in modules for p in m.parameters()),
        assumptions=tuple(recorder.assumptions),
        ends_synchronised=recorder.waits,
    )


def _title(model: Any) -> str:
    if isinstance(model, torch.nn.Module):
        return type(model).__name__
    return getattr(model, "__name__", None) or type(model).__name__


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or ["no message"])[0][:200]


def _raised_at(e: BaseException) -> str:
    trace, line = e.__traceback__, "at an unknown line"
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if not any(place in path for place in NOT_THE_USERS):
            line = f"at {path}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
