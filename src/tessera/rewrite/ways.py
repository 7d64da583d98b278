"""Ways to run a program: torch.compile's modes with our passes before them, and a CUDA graph of the eager program."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, did_you_mean
from ..graph.nested import PLAIN_TYPES, map_tensors
from . import cudagraph
from .check import Program
from .inductor import Pass, backend, mode_options
from .reference import Verdict
from .watch import Found, Watch

EAGER = "eager"
REPLAYED_EAGER = "eager + cuda graph"
TUNED = "max-autotune-no-cudagraphs"
WAYS = ("default", "reduce-overhead", TUNED, REPLAYED_EAGER)
_REPLAYED = frozenset({"reduce-overhead", REPLAYED_EAGER})


@dataclass(slots=True, kw_only=True)
class Way:
    """One way to run the program, and what came of trying it. `ours` says whether our passes were allowed."""

    mode: str
    ours: bool = True
    call: Callable[..., Any] | None = None
    passes: Sequence[Pass] = ()
    watch: Watch | None = None
    verdict: Verdict | None = None
    compile_s: float = 0.0
    seconds: float | None = None
    joules: float | None = None
    error_j: float | None = None
    undone: list[tuple[Found, str]] = field(default_factory=list)
    why: str = ""

    @property
    def name(self) -> str:
        """What it is called in reports."""
        return self.mode if self.ours else f"{self.mode}, torch's passes alone"

    @property
    def ok(self) -> bool:
        """Whether it compiled and, as far as it was checked, computes the same."""
        return self.call is not None and (self.verdict is None or self.verdict.ok)

    @property
    def replayed(self) -> bool:
        """Whether its kernels are replayed as CUDA graphs."""
        return self.mode in _REPLAYED


def modes(program: Program, launch: str, asked: Sequence[str] | None, cuda: bool) -> list[str]:
    """The modes to try, most promising first."""
    if launch not in ("auto", "eager", "graph"):
        near = did_you_mean(launch, ("auto", "eager", "graph"))
        raise ArgumentError(f"no launch {launch!r}{near}", fix="launch='auto', 'eager' or 'graph'")
    for name in asked or ():
        if name not in WAYS:
            raise ArgumentError(f"no way to run called {name!r}{did_you_mean(name, WAYS)}", fix=f"of {', '.join(WAYS)}")
    replays = [name for name in asked or () if name in _REPLAYED]
    if not cuda and (launch == "graph" or replays):
        raise ArgumentError(
            f"ways={replays!r} need a CUDA device" if replays else "launch='graph' needs a CUDA device",
            why="the program's tensors are on the CPU", fix="launch='auto', or move the model to a GPU",
        )  # fmt: skip
    found = list(asked or (WAYS if cuda else ("default",)))
    if launch != "auto":
        found = [name for name in found if (name in _REPLAYED) == (launch == "graph")]
    # A replayed eager program must return the same tensors each time: a step with its own backward may not.
    return [name for name in found if name != REPLAYED_EAGER or program.mode == "infer"]


def build(program: Program, way: Way, *, explained: bool = True) -> None:
    """Make the callable of a way; nothing is compiled before it is called. Watched compilations use no cache."""
    if way.mode == REPLAYED_EAGER:
        way.call = Replayed(program)
        return
    way.watch = Watch(looks=explained)
    compiled = torch.compile(_own_frame(program.call), backend=backend(way.watch, way.passes, mode_options(way.mode)))
    way.call = _kept_apart(compiled) if way.replayed and program.mode == "infer" else compiled


_frames = itertools.count()


def _own_frame(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call in a function with its own code object and name.

    Dynamo keeps what it compiled by code object, up to a limit; and by file, line and name which sizes it has seen:
    those that differ from the last program's would be taken for sizes that change, and rewrites that need them known
    be lost.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    name = f"run_{next(_frames)}"
    code = run.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, run.__globals__, name, None, run.__closure__)


def _kept_apart(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Results of a replay are overwritten by the next one: they are copied, as the original's would stay."""

    def run(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return _copies(compiled(*args, **kwargs))

    return run


def _copies(output: Any) -> Any:
    return map_tensors(torch.clone, output)


class Replayed:
    """The eager program in a CUDA graph: inputs are copied in, results copied out. Anything else runs eagerly.

    A graph holds addresses. It is used only while the inputs have the shapes it was captured with, the parameters lie
    where they lay, and the modules are in the mode they were in.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._graph: Any = None
        self._inputs: list[Any] = []
        self._outputs: Any = None
        self._key: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = self._key_of(leaves, spec)
        if self._graph is None:
            self._capture(leaves, spec, key)
        if key != self._key:
            with torch.no_grad():
                return self._program.call(*args, **kwargs)
        for mine, given in zip(self._inputs, leaves, strict=True):
            if isinstance(given, torch.Tensor):
                mine.copy_(given)
        self._graph.replay()
        return _copies(self._outputs)

    def _key_of(self, leaves: Sequence[Any], spec: Any) -> Any:
        modules = self._program.modules
        places = tuple(t.data_ptr() for m in modules for t in (*m.parameters(), *m.buffers()))
        return spec, tuple(map(cudagraph.key, leaves)), places, tuple(m.training for m in modules)

    def _capture(self, leaves: Sequence[Any], spec: Any, key: Any) -> None:
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *PLAIN_TYPES)):  # the graph would go on reading what it holds today
                raise TypeError(f"a graph cannot be given another {type(leaf).__qualname__}")
        self._inputs = [v.clone() if isinstance(v, torch.Tensor) else v for v in leaves]
        args, kwargs = pytree.tree_unflatten(self._inputs, spec)

        def once() -> Any:
            with torch.no_grad():
                return self._program.call(*args, **kwargs)

        cudagraph.warm_up(once)
        self._graph, self._outputs = cudagraph.recorded(once)
        self._key = key
