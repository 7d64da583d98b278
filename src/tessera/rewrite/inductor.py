"""Torch's compiler with our passes before it, and what it says about itself while it works.

Three places are watched, each by a hook that torch offers: the aten graph before any pass (the program as eager torch
would run it), the kernels after fusion, and torch's counters. The hook after fusion is private to torch: where it is
missing or answers otherwise, the compiled program is the same and the trace says what is not known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import hooks
from .watch import Found, Watch

Pass = Callable[[Any], list[Found]]
"""Changes a Dynamo graph in place and says what it found."""


def backend(watch: Watch, passes: Sequence[Pass] = (), options: Mapping[str, Any] | None = None) -> Any:
    """A backend for `torch.compile`: our passes, then Inductor with `options` (its config by name)."""

    def compile_graph(module: Any, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        if watch.closed:  # other shapes, later: the program was explained for the first
            _applied(module, passes, Watch())
            return compile_fx(module, inputs, config_patches=dict(options or {}))
        _applied(module, passes, watch)
        with _counted(watch):
            if not watch.looks:
                return compile_fx(module, inputs, config_patches=dict(options or {}))
            config = {**(options or {}), **_hooks(watch)}
            with _no_cache():
                made = compile_fx(module, inputs, inner_compile=_watched(watch), config_patches=config)
        return _noted(made, watch, watch.graphs)

    return compile_graph


def _noted(made: Any, watch: Watch, graph: int) -> Any:
    """A compiled graph that says when it runs: which of several belong to the steady state is seen, not guessed."""

    def run(*args: Any) -> Any:
        if not watch.closed:
            watch.ran.add(graph)
        return made(*args)

    return run


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Autograd's cache off where there is one: a graph that comes out of it was not seen."""
    from torch._functorch import config

    if not hasattr(config, "enable_autograd_cache"):
        yield
        return
    with config.patch("enable_autograd_cache", False):
        yield


def recorder(watch: Watch, passes: Sequence[Pass] = ()) -> Any:
    """A backend that runs the program as it is after our passes and compiles nothing: for looking, and for tests."""

    def run_graph(module: Any, inputs: Sequence[Any]) -> Any:
        _applied(module, passes, watch)
        return _noted(module.forward, watch, watch.graphs)

    return run_graph


def _applied(module: Any, passes: Sequence[Pass], watch: Watch) -> None:
    """Run our passes, and note what they changed and how much they left to Inductor."""
    watch.graphs += 1
    found = [each for run in passes for each in run(module)]
    changed = [replace(each, graph=watch.graphs) for each in found if each.by == "tessera"]
    if changed:
        module.graph.lint()
        module.recompile()
    watch.found += changed
    watch.left += len(found) - len(changed)


def mode_options(mode: str) -> dict[str, Any]:
    """Inductor's options of a mode of torch.compile."""
    if mode == "default":
        return {}
    import torch._inductor

    return dict(torch._inductor.list_mode_options(mode))


def _hooks(watch: Watch) -> dict[str, Any]:
    """The config that lets us look; the caches would skip the passes that are looked at."""
    from torch._inductor import config

    config_of: dict[str, Any] = {
        "joint_custom_pre_pass": lambda graph: hooks.before(watch, graph), "fx_graph_cache": False,
    }  # fmt: skip
    for name, hook in (
        ("post_grad_custom_post_pass", lambda graph: hooks.after_passes(watch, graph)),
        ("_post_fusion_custom_pass", lambda nodes: hooks.after_fusion(watch, nodes)),
    ):
        if not hasattr(config, name):
            watch.say_not("which operators it fused", f"this torch has no {name}")
        elif getattr(config, name) is not None:
            watch.say_not("which operators it fused", f"{name} is taken by somebody else")
        else:
            config_of[name] = hook
    if config.joint_custom_pre_pass is not None:
        del config_of["joint_custom_pre_pass"]
        watch.say_not("what the program was", "joint_custom_pre_pass is taken by somebody else")
    return config_of


def _watched(watch: Watch) -> Any:
    """Inductor's own compilation of one graph, forward or backward, after which its memory plan is read."""
    from torch._inductor.compile_fx import compile_fx_inner

    def compile_inner(module: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
        made = compile_fx_inner(module, inputs, **kwargs)
        hooks.after_codegen(watch)
        return made

    return compile_inner


@contextlib.contextmanager
def _counted(watch: Watch) -> Iterator[None]:
    """Torch's own counters of what its passes matched."""
    from torch._dynamo.utils import counters

    before = dict(counters["inductor"])
    try:
        yield
    finally:
        for name, count in counters["inductor"].items():
            if count > before.get(name, 0):
                watch.counters[name] = watch.counters.get(name, 0) + count - before.get(name, 0)
