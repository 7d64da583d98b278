"""torch.compile of a function's modules, and which compiled code may be run again.

Dynamo keeps code by the code object it was made of, and runs it again for an equal backend where its guards hold. It
has no guard on the kernel that attention takes, nor on the values of weights that were frozen, nor (when frozen) on
their layout, nor on a module's forward that was replaced; AOTAutograd's cache on disk has none either. So these are
written into the backend's options, where both look: code made under one choice is never run under another, and is run
again where the choice is the same.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

from .found import Reach
from .lever import REDUCE_OVERHEAD, Call, NotHere, only_infers
from .plan import Setting

# Every mode, layout or padding tried is one more version of the same code, and dynamo keeps 8: beyond, it runs eagerly.
RECOMPILES = 256
# What compiled code depends on without a guard.
_UNGUARDED = ("attention", "freeze", "layout", "masks", "padding")
# An option of Inductor's that compiles to nothing here: notes for the readers of an AOTInductor package.
_NOTES = "aot_inductor.metadata"


@contextlib.contextmanager
def compiled(call: Call, reach: Reach, setting: Setting) -> Iterator[Call]:
    """torch.compile of the modules, or of the function where it has none of its own."""
    import torch

    how = _how(setting)
    if not reach.modules:
        with _many_versions():
            yield torch.compile(call, **how)
        return
    if setting.get("freeze"):
        only_infers(reach, "freeze")
    before = [(m, m._compiled_call_impl) for m in reach.modules]
    marking = getattr(torch.compiler, "cudagraph_mark_step_begin", None)

    def stepped(*args: Any, **kwargs: Any) -> Any:
        if marking is not None and setting["compile"] == REDUCE_OVERHEAD:
            marking()  # what the last call returned may be overwritten from here on
        return call(*args, **kwargs)

    try:
        for module in reach.modules:
            code = torch.compile(_whole(module), **how)
            module._compiled_call_impl = _frozen(code) if setting.get("freeze") else code
        with _many_versions():
            yield stepped
    finally:
        for module, code in before:
            module._compiled_call_impl = code
        if setting["compile"] == REDUCE_OVERHEAD:
            _forget_outputs()


def _forget_outputs() -> None:
    """Let go of the tensors that reduce-overhead's graphs gave last. Torch keeps them to give them again.

    In training they hold the autograd graph of that step, and with it the nodes that accumulate gradients, which were
    made for its stream: a capture on another one then fails ("operation would make the legacy stream depend on a
    capturing blocking stream", results/tune.json). Torch makes such tensors anew where they are missing.
    """
    import torch

    if not torch._C._is_key_in_tls("tree_manager_containers"):
        return
    from torch._inductor import cudagraph_trees as trees

    with contextlib.suppress(AttributeError, AssertionError):  # private to torch; the worst is a graph that is refused
        managers = [held.tree_manager for held in trees.get_obj(trees.local, "tree_manager_containers").values()]
        nodes = [node for manager in managers if manager for roots in manager.roots.values() for node in roots]
        while nodes:
            node = nodes.pop()
            nodes += itertools.chain.from_iterable(node.children.values())
            node.remove_node_cached_tensors()


def _whole(module: Any) -> Call:
    # Not `module.compile()`: dynamo skips frames of torch.nn's own files, so a Sequential would run eagerly.
    def called(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return called


def _how(setting: Setting) -> dict[str, Any]:
    """torch.compile's arguments. It refuses a mode beside options, so a mode's own become part of them."""
    mode = str(setting["compile"])
    said = {k: setting[k] for k in _UNGUARDED if setting.get(k)}
    if not said:
        return {"mode": None if mode == "default" else mode}
    import torch._inductor

    if not hasattr(torch._inductor.config.aot_inductor, "metadata"):  # torch 2.4, 2.5
        raise NotHere("this torch has no option to tell compiled code apart by", knob=next(iter(said)))
    if "masks" in said:
        return {"backend": _passing(mode, json.dumps(said, sort_keys=True))}
    return {"options": _options(mode, json.dumps(said, sort_keys=True))}


def _options(mode: str, said: str) -> dict[str, Any]:
    import torch._inductor

    options = {**torch._inductor.list_mode_options(mode), _NOTES: {"tessera": said}}
    return options | ({"freezing": True} if "freeze" in json.loads(said) else {})


@functools.cache  # dynamo runs code again for the very backend that made it
def _passing(mode: str, said: str) -> Any:
    """Inductor, with our pass over masks before it."""
    from ...rewrite.compilation import Compilation
    from ...rewrite.inductor import make_backend
    from ...rewrite.passes import drop_known_masks

    return make_backend(Compilation(observe=False), [drop_known_masks], _options(mode, said))


def _frozen(code: Call) -> Call:
    """Compiled code with the weights in it. Inductor freezes only where no gradient is kept, and says nothing else."""
    import torch
    import torch._inductor

    def without_gradients(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotHere("gradients are on when its modules are called: torch.no_grad() around them", knob="freeze")
        with torch._inductor.config.patch(freezing=True):  # dynamo reads the global one, whatever the backend's
            return code(*args, **kwargs)

    return without_gradients


@contextlib.contextmanager
def _many_versions() -> Iterator[None]:
    """Let dynamo keep as many versions of one code as are tried."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before torch 2.6
    before = getattr(config, name)
    setattr(config, name, max(before, RECOMPILES))
    try:
        yield
    finally:
        setattr(config, name, before)
