"""What is in a Kineto trace, in a few figures: enough to say that it is worth looking at."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import RecordingError

_KERNEL = "kernel"
_API = ("cuda_runtime", "cuda_driver", "hip_runtime")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_TOP = 5


class _Args(msgspec.Struct):
    external: int | None = msgspec.field(name="External id", default=None)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))
    collective: str | None = msgspec.field(name="Collective name", default=None)


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"")


class _Trace(msgspec.Struct):
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)
    events: list[_Event] = msgspec.field(name="traceEvents", default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heaviest:
    """One name's share: how often it ran and for how long, all together."""

    name: str
    calls: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class TraceFigures:
    """Counts and times of a trace. `kernels_with_shapes` are those whose operator has its input shapes.

    A trace with launches and without kernels lost them: libkineto drops what the GPU's clock puts outside of the
    recording.
    """

    base_ns: int
    events: int = 0
    seconds: float = 0.0
    ops: int = 0
    ops_with_shapes: int = 0
    launches: int = 0
    kernels: int = 0
    kernels_with_shapes: int = 0
    kernel_s: float = 0.0
    collectives: int = 0
    collective_s: float = 0.0
    steps: int = 0
    heaviest: list[Heaviest] = field(default_factory=list)


def figures(data: bytes) -> TraceFigures:
    """Read a trace and count; raises RecordingError for one that is no JSON."""
    try:
        trace = msgspec.json.decode(data, type=_Trace)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RecordingError("the trace is not what Kineto writes", why=str(exc)) from exc
    found = TraceFigures(base_ns=trace.base_ns)
    spans = [e for e in trace.events if e.ph == "X"]
    work = [e for e in spans if e.cat != "Trace"]  # "Trace" is the recording itself
    found.events = len(spans)
    if work:
        found.seconds = (max(e.ts + e.dur for e in work) - min(e.ts for e in work)) * 1e-6
    _ops(found, work)
    found.heaviest = _heaviest(work)
    return found


def _ops(found: TraceFigures, work: list[_Event]) -> None:
    shaped: set[int] = set()
    kernels: list[int | None] = []
    decode = msgspec.json.Decoder(_Args).decode
    for e in work:
        if e.cat == "user_annotation" and e.name.startswith("Optimizer.step#"):
            found.steps += 1
        found.launches += e.cat in _API and "Launch" in e.name
        if e.cat not in ("cpu_op", _KERNEL):
            continue
        args = _args(decode, e.args)
        if e.cat == "cpu_op":
            found.ops += 1
            if bytes(args.dims) not in (b"", b"[]"):
                found.ops_with_shapes += 1
                if args.external is not None:
                    shaped.add(args.external)
        else:
            found.kernel_s += e.dur * 1e-6
            kernels.append(args.external)
            if args.collective is not None or e.name.startswith(("nccl", "rccl")):
                found.collectives += 1
                found.collective_s += e.dur * 1e-6
    found.kernels = len(kernels)
    found.kernels_with_shapes = sum(k in shaped for k in kernels)


def _args(decode: Any, raw: msgspec.Raw) -> _Args:
    try:
        args: _Args = decode(raw) if bytes(raw) else _Args()
    except msgspec.DecodeError:  # a type of another version's choosing: it counts as without shapes
        return _Args()
    return args


def _heaviest(work: list[_Event]) -> list[Heaviest]:
    """By time on the device; of a trace without one by time in operators (an inner one is in its outer one too)."""
    device = [e for e in work if e.cat in _ON_DEVICE]
    calls: dict[str, int] = defaultdict(int)
    us: dict[str, float] = defaultdict(float)
    for e in device or [e for e in work if e.cat == "cpu_op"]:
        calls[e.name] += 1
        us[e.name] += e.dur
    top = sorted(us, key=lambda n: -us[n])[:_TOP]
    return [Heaviest(name=n, calls=calls[n], seconds=us[n] * 1e-6) for n in top]
