"""Capture one iteration of any model or callable as a `Graph`, with nothing allocated and nothing computed."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, CaptureError, TesseraError, did_you_mean
from .intercept import Interceptor
from .ir import Graph, Launch
from .nested import find_instances
from .patches import TorchPatches, patch_torch
from .recorder import Recorder, first_line, is_user_code, pause
from .staging import CAST, MetaTwins, list_attributes, stage_surroundings
from .surroundings import Surroundings, find_models
from .tracking import MAX_KNOWN_INTS

Mode = Literal["infer", "train"]
OPTIMIZERS = ("sgd", "adamw")
# While a program is captured, names of torch and the model's tensors are replaced: one capture at a time.
_ONE_AT_A_TIME = threading.RLock()


def capture(
    model: Callable[..., Any],
    inputs: Any = (),
    *,
    mode: Mode = "infer",
    precision: str | None = None,
    optimizer: str | torch.optim.Optimizer = "sgd",
    batch: int | None = None,
    launch: Launch = "eager",
    name: str | None = None,
) -> Graph:
    """Capture one steady iteration of a model, or of a callable that does its own step.

    `inputs` are a tensor, a tuple of positional or a dict of keyword arguments, real or meta. In mode "infer" a module
    runs in eval mode without gradients; "train" adds the loss, backward and an optimizer step. A callable that is not a
    module runs as it is. `precision` casts parameters and floating-point inputs; `batch` changes the first dimension;
    `launch` is how it will run, which some programs ask about: recorded into a CUDA graph, or compiled.
    """
    model = _eager_form(model)
    _check_arguments(model, mode, precision, optimizer, batch)
    twins = MetaTwins(precision)
    recorder = Recorder(always_tf32=precision == "tf32")
    args, kwargs = _stage_inputs(twins, recorder, inputs, batch)
    module = model if isinstance(model, torch.nn.Module) else None
    modules, optimizers = ([module], []) if module is not None else find_models(model)
    if module is not None and isinstance(optimizer, torch.optim.Optimizer):
        optimizers = [optimizer]  # the user's own: it must step the twins, not the model
    with _ONE_AT_A_TIME, TorchPatches() as stack:
        stack.enter_context(stage_surroundings(modules, model, twins.twin))
        stack.enter_context(twins.replace_modules(modules))
        stack.enter_context(twins.replace_optimizers(optimizers))
        recorder.known.note_small(twins.pairs())
        if module is not None:
            with contextlib.suppress(NotImplementedError):  # an exported program has no train(): its mode is fixed
                module.train(mode == "train")
            stack.enter_context(torch.set_grad_enabled(mode == "train"))
        for m in modules:
            _adopt_tensors(recorder, m, stack)
        _follow_modules(recorder, modules, stack)
        interceptor = Interceptor(recorder)
        patch_torch(stack, recorder, interceptor.autocast, launch)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(interceptor)
        stack.enter_context(recorder)
        with _explain_errors(model):
            trained = _make_optimizer(optimizer, module) if module is not None and mode == "train" else None
            _prime(recorder, [trained] if trained is not None else optimizers)
            with pause(recorder):  # the function mode counts what is asked of tensors
                given = _find_state(model, args, kwargs)
                _adopt_state(recorder, given)
            _run_step(model, args, kwargs, recorder, trained)
            _note_replaced(recorder, given, _find_state(model, args, kwargs))
    return Graph(
        name=name or _title(model),
        ops=tuple(recorder.ops),
        storages=dict(recorder.storages.by_id),
        mode=mode if module is not None else "step",
        samples=batch_of((args, kwargs)),
        tokens=_count_tokens((args, kwargs), recorder),
        parameters=sum(p.numel() for m in modules for p in m.parameters()),
        assumptions=tuple(recorder.assumptions),
        ends_synchronised=recorder.host_waits,
        precision=precision,
        compiled_parts=any(_is_compiled(m) for root in modules for m in root.modules()),
    )


def _eager_form(model: Any) -> Any:
    """The Python module in an exported or compiled program; a scripted program has none."""
    if _is_compiled(model):
        return model._orig_mod
    model = getattr(model, "_torchdynamo_orig_callable", model)
    if isinstance(model, torch.export.ExportedProgram):
        return model.module()
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            "a scripted module cannot be captured",
            why="TorchScript runs its own interpreter, which torch's dispatch modes cannot observe",
            fix="pass the nn.Module that it was made from",
        )
    return model


def _is_compiled(module: Any) -> bool:
    """Whether `torch.compile` made the module; nothing is compiled where nobody imported the compiler."""
    compiler = sys.modules.get("torch._dynamo")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def _check_arguments(model: Any, mode: str, precision: str | None, optimizer: Any, batch: int | None) -> None:
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
    if mode == "train" and not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            "mode='train' needs a model",
            why=f"{_title(model)} is a plain callable: where its loss is cannot be known",
            fix="pass the nn.Module, or a callable that does its own forward, backward and step with mode='infer'",
        )


# -- inputs -----------------------------------------------------------------------------------------------------


def _stage_inputs(
    twins: MetaTwins, recorder: Recorder, inputs: Any, batch: int | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs on meta as positional and keyword arguments."""
    inputs = inputs if batch is None else _change_batch(inputs, batch)
    staged = twins.copy_inputs(inputs)
    for real, meta in zip(pytree.tree_leaves(inputs), pytree.tree_leaves(staged), strict=False):
        if isinstance(real, torch.Tensor) and real.device.type == "cpu" and not real.is_floating_point():
            recorder.known.note(meta, real)
    for leaf in pytree.tree_leaves(staged):
        if isinstance(leaf, torch.Tensor):
            recorder.storages.adopt(leaf, "inputs")
    if isinstance(staged, Mapping):
        return (), dict(staged)
    return (tuple(staged) if isinstance(staged, (tuple, list)) else (staged,)), {}


def _change_batch(inputs: Any, batch: int) -> Any:
    """Inputs with another first dimension: on meta, but for integers (masks, lengths), whose rows are repeated."""
    old = batch_of(inputs)
    if old is None:
        raise ArgumentError("batch= needs an input with a first dimension", fix="leave batch out")
    if old == batch:
        return inputs

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != old:
            return leaf
        known = leaf.device.type == "cpu" and not leaf.is_floating_point() and old > 0
        if known and leaf.numel() // old * batch <= MAX_KNOWN_INTS:
            return leaf[torch.arange(batch) % old]
        return torch.empty((batch, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

    return pytree.tree_map(resize, inputs)


def batch_of(inputs: Any) -> int | None:
    """The first dimension of the first tensor among the inputs."""
    leaves = pytree.tree_leaves(inputs)
    return next((int(t.shape[0]) for t in leaves if isinstance(t, torch.Tensor) and t.dim() > 0), None)


def _count_tokens(inputs: Any, recorder: Recorder) -> int | None:
    """Elements of the first matrix of integers among the inputs that is looked up in an embedding."""
    looked_up = {t.storage for op in recorder.ops if op.name == "aten.embedding" for t in op.inputs[1:2]}
    ids = (t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dtype == torch.int64)
    return next((int(t.numel()) for t in ids if t.dim() == 2 and recorder.storages.find(t) in looked_up), None)


# -- modules ----------------------------------------------------------------------------------------------------


def _adopt_tensors(recorder: Recorder, module: torch.nn.Module, stack: contextlib.ExitStack) -> None:
    """Note the tensors of a model, and its gradients when they come."""

    def note_gradient(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and recorder.active:
            recorder.storages.mark(gradient, "gradients")

    for name, parameter in module.named_parameters():
        recorder.storages.adopt(parameter, "weights", name)
        if parameter.requires_grad:
            stack.callback(parameter.register_post_accumulate_grad_hook(note_gradient).remove)
    for name, buffer in module.named_buffers():
        recorder.storages.adopt(buffer, "weights", name)


def _follow_modules(recorder: Recorder, modules: list[torch.nn.Module], stack: contextlib.ExitStack) -> None:
    """Tell the recorder the path of the module that is running and how many module calls the host has made."""
    names: dict[int, str] = {}
    for root in modules:
        for name, module in root.named_modules():
            names.setdefault(id(module), name)
    running: list[str] = []
    here = threading.get_ident()

    def enter(module: torch.nn.Module, _args: Any) -> None:
        if threading.get_ident() == here:  # global hooks see every thread's modules
            recorder.modules += 1
            running.append(names.get(id(module), running[-1] if running else ""))

    def leave(_module: torch.nn.Module, _args: Any, _out: Any) -> None:
        if threading.get_ident() == here and running:
            running.pop()

    recorder.scope = lambda: running[-1] if running else ""
    register = torch.nn.modules.module
    stack.callback(register.register_module_forward_pre_hook(enter).remove)
    stack.callback(register.register_module_forward_hook(leave, always_call=True).remove)


def _find_state(model: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that the program finds in its arguments, its attributes and the variables around it: caches."""
    around: Any = list_attributes([model]) if isinstance(model, torch.nn.Module) else Surroundings(model).values()
    return find_instances((args, kwargs, around), torch.Tensor)


def _adopt_state(recorder: Recorder, given: list[torch.Tensor]) -> None:
    """Note what existed before the iteration, also inside objects (a cache of keys and values)."""
    for tensor in given:
        if tensor.device.type == "meta" and recorder.storages.find(tensor) is None:
            recorder.storages.adopt(tensor, "inputs")


def _note_replaced(recorder: Recorder, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    """Note state that the program dropped for new tensors (a cache that grows): it is freed after its last use."""
    kept = {recorder.find_storage(tensor) for tensor in after}
    gone = {recorder.find_storage(tensor) for tensor in before} - kept
    recorder.storages.retire({storage for storage in gone if storage is not None})


# -- training ---------------------------------------------------------------------------------------------------


def _run_step(model: Any, args: Any, kwargs: Any, recorder: Recorder, optimizer: torch.optim.Optimizer | None) -> None:
    """Call a model; with an optimizer, also its loss, backward and the update."""
    output = model(*args, **kwargs)  # alive until the step is over, as `out = model(x)` in a training loop
    if optimizer is None:
        return
    loss = loss_of(output)
    if not loss.requires_grad:
        raise CaptureError(
            "the loss has no gradient",
            why="the model runs under torch.no_grad() or inference_mode(), or returns what was chosen (ids)",
            fix="return logits or a loss, or predict it with mode='infer'",
        )
    loss.backward()
    recorder.phase = "optimizer"
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    recorder.phase = "forward"


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
    with pause(recorder), torch.no_grad():
        for optimizer in optimizers:
            for p in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
                p.grad = torch.empty_like(p)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for value in (value for state in optimizer.state.values() for value in state.values()):
                if isinstance(value, torch.Tensor) and value.device.type == "meta":
                    recorder.storages.adopt(value, "optimizer")


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss if it has one, otherwise the fp32 cross-entropy of its output."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if isinstance(loss, torch.Tensor):
        return loss
    logits = _find_logits(output)
    if logits.dim() == 0:
        return logits
    classes = 1 if logits.dim() in (2, 4, 5) else logits.dim() - 1
    if logits.dim() == 3:
        logits, classes = logits.reshape(-1, logits.shape[-1]), 1
    shape = [size for i, size in enumerate(logits.shape) if i != classes]
    target = torch.empty(shape, dtype=torch.int64, device=logits.device)
    return torch.nn.functional.cross_entropy(logits.float(), target)


def _find_logits(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    for name in ("logits", "out", "last_hidden_state", "pooler_output"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, torch.Tensor):
            return value
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    raise CaptureError("the model returns no floating-point tensor to make a loss of", fix="return logits or a loss")


# -- errors -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _explain_errors(model: Any) -> Iterator[None]:
    """Raise errors of the model as a CaptureError that names the innermost line of the user's code."""
    try:
        yield
    except TesseraError:
        raise
    except Exception as e:
        lines = [
            f"at {frame.f_code.co_filename}:{number}"
            for frame, number in traceback.walk_tb(e.__traceback__)
            if is_user_code(frame.f_code.co_filename)
        ]
        what = f"{_title(model)} cannot be captured: {type(e).__name__}: {first_line(e)}"
        if isinstance(e, TypeError) and not lines:  # the call itself failed
            raise CaptureError(
                what,
                why="it does not take these inputs",
                fix="give a tuple of inputs, or a dict of keyword arguments; a dict that is one input goes into a "
                "tuple: ({...},)",
            ) from e
        raise CaptureError(
            what,
            why=f"raised {lines[-1] if lines else 'at an unknown line'} while running on meta tensors "
            "(shapes without values)",
            fix="check that the model runs with these inputs; if it does, it needs values: measure it instead "
            "(tessera measure)",
        ) from e


def _title(model: Any) -> str:
    if isinstance(model, torch.nn.Module):
        return type(model).__name__
    return getattr(model, "__name__", None) or type(model).__name__
