"""torch.compile of a function's modules, and which compiled code may be run again.

Dynamo keeps compiled code by its code object, and runs it again for an equal backend if its guards hold. It has no
guard on the values of frozen weights or their layout, or on a replaced forward of a module; AOTAutograd's cache on disk
has none either. So these choices go into the backend's options, which both compare: code made under one choice never
runs under another, and runs again where the choice is the same.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

from .parts import REDUCE_OVERHEAD, Call, FunctionParts, NotApplicable
from .plan import Setting

# Every mode, layout or padding is one more version of the same code. Dynamo keeps 8 by default, and runs the code
# eagerly beyond that.
RECOMPILES = 256
# Knobs that compiled code depends on without a guard.
_UNGUARDED = ("freeze", "layout", "masks", "padding")
# An option of Inductor that does not affect the code: notes for readers of an AOTInductor package.
_NOTES = "aot_inductor.metadata"


@contextlib.contextmanager
def compile_modules(call: Call, parts: FunctionParts, setting: Setting) -> Iterator[Call]:
    """Compile the modules, or the function itself where it has no modules."""
    import torch

    how = _compile_arguments(setting)
    if not parts.modules:
        with _many_versions():
            yield torch.compile(call, **how)
        return
    if setting.get("freeze"):
        parts.require_inference("freeze")
    before = [(m, m._compiled_call_impl) for m in parts.modules]
    mark_step = getattr(torch.compiler, "cudagraph_mark_step_begin", None)

    def call_in_step(*args: Any, **kwargs: Any) -> Any:
        if mark_step is not None and setting["compile"] == REDUCE_OVERHEAD:
            mark_step()  # from here on the results of the last call may be overwritten
        return call(*args, **kwargs)

    try:
        for module in parts.modules:
            code = torch.compile(_make_entry(module), **how)
            module._compiled_call_impl = _freeze(code) if setting.get("freeze") else code
        with _many_versions():
            yield call_in_step
    finally:
        for module, code in before:
            module._compiled_call_impl = code
        if setting["compile"] == REDUCE_OVERHEAD:
            _forget_outputs()


def _forget_outputs() -> None:
    """Drop the tensors that reduce-overhead's graphs returned last, which torch keeps to return them again.

    In training, they hold the autograd graph of that step. Its nodes that accumulate gradients belong to the stream of
    that step, so a capture on another stream fails ("operation would make the legacy stream depend on a capturing
    blocking stream", results/tune.json). Torch makes such tensors again if they are missing.
    """
    import torch

    if not torch._C._is_key_in_tls("tree_manager_containers"):
        return
    from torch._inductor import cudagraph_trees as trees

    # private to torch; if it changes, a graph is refused at worst
    with contextlib.suppress(AttributeError, AssertionError):
        managers = [
            container.tree_manager for container in trees.get_obj(trees.local, "tree_manager_containers").values()
        ]
        nodes = [node for manager in managers if manager for roots in manager.roots.values() for node in roots]
        while nodes:
            node = nodes.pop()
            nodes += itertools.chain.from_iterable(node.children.values())
            node.remove_node_cached_tensors()


def _make_entry(module: Any) -> Call:
    # Not `module.compile()`: dynamo skips frames of torch.nn's own files, so a Sequential would run eagerly.
    def entry(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return entry


def _compile_arguments(setting: Setting) -> dict[str, Any]:
    """Return the arguments of torch.compile. It refuses a mode beside options, so the mode's own options are used."""
    mode = str(setting["compile"])
    choices = {k: setting[k] for k in _UNGUARDED if setting.get(k)}
    if not choices:
        return {"mode": None if mode == "default" else mode}
    import torch._inductor

    if not hasattr(torch._inductor.config.aot_inductor, "metadata"):  # torch 2.4, 2.5
        raise NotApplicable("this torch has no option to tell compiled code apart", knob=next(iter(choices)))
    if "masks" in choices:
        return {"backend": _make_backend(mode, json.dumps(choices, sort_keys=True))}
    return {"options": _inductor_options(mode, json.dumps(choices, sort_keys=True))}


def _inductor_options(mode: str, choices: str) -> dict[str, Any]:
    import torch._inductor

    options = {**torch._inductor.list_mode_options(mode), _NOTES: {"tessera": choices}}
    return options | ({"freezing": True} if "freeze" in json.loads(choices) else {})


@functools.cache  # dynamo runs code again only for the same backend object
def _make_backend(mode: str, choices: str) -> Any:
    """Inductor, with our pass over masks before it."""
    from ...rewrite.compilation import Compilation
    from ...rewrite.inductor import make_backend
    from ...rewrite.passes import drop_known_masks

    return make_backend(Compilation(observe=False), [drop_known_masks], _inductor_options(mode, choices))


def _freeze(code: Call) -> Call:
    """Return compiled code that contains the weights.

    Without this check, Inductor would silently not freeze with gradients.
    """
    import torch
    import torch._inductor

    def call_frozen(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotApplicable("gradients are on when its modules are called: use torch.no_grad()", knob="freeze")
        with torch._inductor.config.patch(freezing=True):  # dynamo reads the global option, not the backend's
            return code(*args, **kwargs)

    return call_frozen


@contextlib.contextmanager
def _many_versions() -> Iterator[None]:
    """Let dynamo keep as many versions of the same code as the search tries."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before torch 2.6
    before = getattr(config, name)
    setattr(config, name, max(before, RECOMPILES))
    try:
        yield
    finally:
        setattr(config, name, before)
