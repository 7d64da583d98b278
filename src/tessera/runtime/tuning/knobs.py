"""Which knobs a function has: only those that can matter for it, with the reason and the expected gain.

One call of the function is watched first: that costs one call, and trying a knob in vain costs a compilation of up to a
minute. Gains only order the search: what measures better stays.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ArgumentError
from .changes import KNOBS, find_fp8_layers, find_unaligned
from .parts import (
    BF16,
    CHANNELS_LAST,
    COMPILE_MODES,
    FOLDED,
    FP8,
    FUSED,
    REDUCE_OVERHEAD,
    TF32,
    TILE_KNOBS,
    FunctionParts,
)
from .plan import Value
from .search import COMPILE, Knob

# All knobs. `gain` is the expected share of the joules; the search tries the largest first. Measured on an H200
# (results/tune.json, fused_conv.json): GPT-2's training compiled took 33% fewer joules, padded 14%; ResNet-50 with
# fused convolutions 42%. The gains of channels_last and of cuDNN's search come from convolutions recorded for
# `predict`. Those of graphs, fused updates and freezing are guesses (their trials were disturbed).
_TABLE = (
    Knob(name=COMPILE, values=(None, *COMPILE_MODES), gain=0.33, why="fuses kernels and launches fewer"),
    Knob(
        name="freeze",
        values=(None, True),
        gain=0.08,
        recompiles=True,
        needs=(COMPILE,),
        along={COMPILE: COMPILE_MODES[0]},
        why="what depends only on weights is computed once",
    ),
    Knob(
        name="masks",
        values=(None, FOLDED),
        gain=0.12,  # a third of compiled GPT-2's joules are attention with a mask (compiled_profile.json)
        recompiles=True,
        needs=(COMPILE,),
        along={COMPILE: COMPILE_MODES[0]},
        why="a mask made of constants becomes is_causal, or nothing",
    ),
    Knob(
        name="layout",
        values=(None, CHANNELS_LAST),
        gain=0.3,
        compiled_gain=0.02,  # Inductor chooses the layout of convolutions itself (its `layout_optimization`)
        recompiles=True,
        why="convolutions need no change of layout around them",
    ),
    Knob(
        name="graph",
        values=(None, True),
        gain=0.1,
        instead={COMPILE: {REDUCE_OVERHEAD: "default"}},
        why="one launch for the whole function",
    ),
    Knob(
        name="padding",
        values=(None, True),
        gain=0.14,
        # Inductor pads too, but each product by itself, with copies. GPT-2's training on an H200 took 16.99 J compiled,
        # 17.14 J compiled and padded (compiled_profile.json); with masks folded, 15.79 J and 14.29 J (tune.json).
        compiled_gain=0.05,
        recompiles=True,
        why="products whose rows are not a multiple of 16 bytes run on slow kernels",
    ),
    Knob(name="optimizer", values=(None, FUSED), gain=0.05, why="weights are read once a step"),
    Knob(
        name="cudnn_benchmark",
        values=(None, True),
        gain=0.05,
        why="cuDNN's guess of an algorithm is not always its best",
    ),
    Knob(
        name="convolutions",
        values=(None, FUSED),
        gain=0.4,
        instead={COMPILE: dict.fromkeys(COMPILE_MODES)},
        along={"layout": CHANNELS_LAST, "graph": True, "cudnn_benchmark": True},
        why="batch norm, sum and relu are done where the convolution writes",
    ),
)
# Tiles of our kernels: large tiles reuse operands more, small tiles keep all multiprocessors busy with a small result.
TILES = ("128x256x64", "128x128x64", "64x128x64", "64x64x64")
_TILE = Knob(
    name="tile",
    values=(None, *TILES),
    # the best tile took 1.14 times cuBLAS's time and 1.37 times cuDNN's on an H200, so it pays for few shapes
    gain=0.02,
    instead={COMPILE: dict.fromkeys(COMPILE_MODES)},  # compiled code does not ask for hints
    why="the library's own tile is not always the best for the shape",
)
_PRECISION = Knob(name="precision", values=(None, TF32, BF16), gain=0.4, recompiles=True, why="within error_tolerance")
# fp8 (e4m3) has 3 bits of mantissa, so a product of two such operands is off by some percent.
FP8_TOLERANCE = 5e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTraits:
    """What watching one call showed. The defaults mean that nothing was seen.

    `infers`: its modules ran without gradients and did not change their weights. `attends`: it calls torch's attention.
    `tiled`: the operators of `tessera.op` that it calls without a tile.
    """

    infers: bool = False
    attends: bool = False
    tiled: frozenset[str] = frozenset()


def find_knobs(
    parts: FunctionParts,
    *,
    tolerance: float | None = None,
    own: Mapping[str, Sequence[Value]] | None = None,
    compile_modes: bool = True,
    traits: CallTraits | None = None,
) -> list[Knob]:
    """Return the knobs of a function; `own` are its arguments that may be varied, `traits` what one call showed."""
    import torch

    traits = traits or CallTraits()
    cuda = parts.device is not None and parts.device.type == "cuda"
    infers = traits.infers and not parts.trains and not any(m.training for m in parts.submodules())
    convolves = any(isinstance(m, torch.nn.Conv2d) for m in parts.submodules())
    groups = [g for o in parts.optimizers for g in o.param_groups]
    applies = {
        COMPILE: compile_modes,
        "freeze": compile_modes and infers,
        "masks": compile_modes and traits.attends,
        "layout": convolves,
        "graph": cuda,
        "padding": cuda and find_unaligned(parts),
        "optimizer": cuda and groups and all("fused" in g and not g["fused"] for g in groups),
        "cudnn_benchmark": cuda and convolves,
        "convolutions": cuda and convolves and infers,
    }
    values: dict[str, tuple[Value, ...]] = {} if cuda else {COMPILE: (None, COMPILE_MODES[0])}
    knobs = [_make_own_knob(name, choices) for name, choices in (own or {}).items()]
    knobs += [replace(k, values=values.get(k.name, k.values)) for k in _TABLE if applies[k.name]]
    knobs += [replace(_TILE, name=knob) for knob, op in TILE_KNOBS.items() if cuda and op in traits.tiled]
    if tolerance is not None:
        knobs += _precision_knobs(parts, tolerance, torch, infers=cuda and infers)
    return knobs


def _precision_knobs(parts: FunctionParts, tolerance: float, torch: Any, *, infers: bool) -> list[Knob]:
    """Return the knobs that lower precision, if the caller allows a deviation and something has a wider format."""
    from ...op.casting import has_fp8_units

    tensors = [p for m in parts.modules for p in m.parameters()] or list(parts.tensors)
    if any(p.dtype == torch.float32 for p in tensors):
        return [_PRECISION]
    if infers and tolerance >= FP8_TOLERANCE and find_fp8_layers(parts) and has_fp8_units(parts.device.index):
        # Frozen weights would be other tensors than those that are kept in fp8.
        return [replace(_PRECISION, values=(None, FP8), instead={"freeze": {True: None}})]
    return []


def _make_own_knob(name: str, values: Sequence[Value]) -> Knob:
    if name in KNOBS:
        raise ArgumentError(
            f"search={{{name!r}: ...}} is the name of one of the tuner's own knobs",
            fix="rename the function's argument, or wrap it in a function with another name for it",
        )
    if len(values) < 2:
        raise ArgumentError(
            f"search={{{name!r}: {list(values)!r}}} has nothing to choose from", fix="give two values or more"
        )
    return Knob(name=name, values=tuple(values), gain=1.0, why="the best of the values given")


# -- watching one call ------------------------------------------------------------------------------------------------


def watch_call(call: Callable[[], Any], parts: FunctionParts) -> CallTraits:
    """Run the function once and watch it. The caller restores what the call changes."""
    from ...op import hints

    weights = [t for t in parts.weights() if not t.is_inference()]
    before = [t._version for t in weights]
    try:
        with (
            _run_eagerly(),
            _watch_gradients(parts) as gradients,
            _watch_attention() as attended,
            hints.use(replace(hints.current(), tiles=(asked := _AskedTiles(hints.current().tiles)))),
        ):
            call()
    except Exception:  # noqa: BLE001  (the user's function may fail in any way: the search's first trial reports it)
        return CallTraits()
    unchanged = before == [t._version for t in weights]
    infers = bool(gradients) and not any(gradients) and unchanged
    return CallTraits(infers=infers, attends=bool(attended), tiled=frozenset(asked.without))


class _AskedTiles(Mapping[str, tuple[int, ...]]):
    """The tiles that are hinted; `without` collects the operators that asked for a tile and found none."""

    def __init__(self, tiles: Mapping[str, tuple[int, ...]]) -> None:
        self._tiles = tiles
        self.without: set[str] = set()

    def __getitem__(self, op: str) -> tuple[int, ...]:
        if op not in self._tiles:
            self.without.add(op)
        return self._tiles[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tiles)

    def __len__(self) -> int:
        return 1 + len(self._tiles)  # never 0, so that it is asked even where nothing is hinted


@contextlib.contextmanager
def _run_eagerly() -> Iterator[None]:
    """Run the user's compiled code eagerly: under a watching mode it would be compiled once more."""
    import torch

    stance = getattr(torch.compiler, "set_stance", None) if "torch._dynamo" in sys.modules else None  # since torch 2.6
    with stance("force_eager") if stance is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _watch_gradients(parts: FunctionParts) -> Iterator[list[bool]]:
    """Collect, for each call of an outermost module, whether gradients were on."""
    import torch

    enabled: list[bool] = []

    def note(module: Any, args: Any) -> None:
        enabled.append(torch.is_grad_enabled())

    handles = [m.register_forward_pre_hook(note) for m in parts.modules]
    try:
        yield enabled
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _watch_attention() -> Iterator[list[bool]]:
    """Collect an entry for each call of torch's attention."""
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    attended: list[bool] = []

    class AttentionMode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is functional.scaled_dot_product_attention:
                attended.append(True)
            return func(*args, **(kwargs or {}))

    with AttentionMode():
        yield attended
