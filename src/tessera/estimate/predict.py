"""`predict`: latency, energy and memory of a model on a chip, before it runs there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..device import Device
from ..errors import ArgumentError, DoesNotFit, did_you_mean
from ..graph.ir import WHAT_IFS, Graph, Op
from ..hardware import lookup
from ..schema import EnergyReport
from ..units import format_bytes
from . import overlay
from .account import account
from .families import launches
from .host import HostModel, host_times
from .kernel_time import KernelTime
from .memory import MemoryEstimator, MemoryReport
from .ops import QUANTISED, OpModel
from .overlay import Overlay, find
from .power import PowerModel
from .processor import dispatch, runs_itself, unvalidated
from .residency import CACHE_SHARE, Traffic, traffic
from .timeline import Array, Iteration, Solved

if TYPE_CHECKING:
    import torch

Launch = Literal["eager", "graph"]

# Between two kernels of a stream the device idles this long: measured on the H200 as (time - sum of kernels) / kernels
# of device-bound iterations (benchmarks/data/h200_dev_*): 0.9-1.3 us launched one by one, 0.1-0.4 us in a CUDA graph.
GAP_S = {"eager": 1.0e-6, "graph": 0.25e-6}
# One replay of a CUDA graph: what it adds to one small kernel, and the least that both took together (a copy of 65,536
# floats, h200/kernels.jsonl). Behind longer kernels most of it is hidden: one product a replay took 0.9 us longer than
# many in one graph (benchmarks/fit/kernel_rows.py).
REPLAY_S = 2.4e-6
_LEAST_REPLAY_S = 4.06e-6
_HIDDEN_REPLAY_S = 0.9e-6
# What decides the captured program: a change of anything else is predicted from the same capture.
_CAPTURED_BY = {"precision", "mode", "optimizer", "batch", "launch"}
# The processor inside a system-on-chip takes longer to launch than a server's: assumed, nobody measured one here.
_SOC_HOST = 2.5


def predict(
    model: Callable[..., Any] | Graph,
    inputs: Any = (),
    *,
    on: str | Device = "h200",
    precision: str | None = None,
    mode: Literal["infer", "train"] = "infer",
    launch: Launch = "eager",
    optimizer: str | torch.optim.Optimizer = "sgd",
    batch: int | None = None,
    burst: bool = False,
    host: HostModel | None = None,
    calibration: Overlay | Literal["auto"] | None = "auto",
    check_memory: bool = True,
    name: str | None = None,
) -> EnergyReport:
    """Predict one steady iteration of a model on a catalogued chip; nothing is allocated, computed or measured.

    `model` is any nn.Module or callable (or a captured `Graph`), `inputs` a tensor, a tuple of positional or a dict of
    keyword arguments, real or meta. `precision` asks "what if": bf16, fp16, fp32 and tf32 cast the model; fp8 and int8
    run its matrix products in that format and keep bf16 between them. `launch="graph"` replays a CUDA graph and pays no
    host time per operator; a CPU has no such graph, and pays it. `batch` rescales the first dimension. The sustained
    steady state is predicted, with the clock the power limit leaves; `burst=True` is the first moments, at the boost
    clock. `calibration="auto"` uses what `tessera calibrate` measured on this machine for the chip, where it was run;
    None does not.
    """
    device = _device(on)
    precision = None if precision is None else _precision_name(precision)
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int)):
        raise ArgumentError(f"batch={batch!r}", fix="batch is a whole number of samples")
    check_launch(launch)
    model_of = OpModel(device, precision=precision)
    if isinstance(model, Graph):
        graph = _as_asked(model, inputs, precision, batch)
    else:
        graph = _captured(model, inputs, mode, precision, optimizer, batch, launch, name)
    measured = find(device.id) if calibration == "auto" else calibration
    if measured is not None and measured.device != device.id:
        raise ArgumentError(
            f"the calibration is of {measured.device}, the prediction for {device.id}",
            fix="calibration='auto' takes the one of each chip, where there is one",
        )
    found = estimate(graph, device, model_of, launch=launch, burst=burst, host=host, calibration=measured)
    if check_memory:
        _check_memory(graph, device, found.memory)

    def again(**changes: Any) -> EnergyReport:
        given: dict[str, Any] = {
            "on": device, "precision": precision, "mode": mode, "launch": launch, "optimizer": optimizer,
            "batch": batch, "burst": burst, "host": host, "calibration": calibration,
            "check_memory": check_memory, "name": name,
        }  # fmt: skip
        if "on" in changes and "calibration" not in changes:
            changes["calibration"] = "auto" if calibration is not None else None
        same = isinstance(model, Graph) or not _CAPTURED_BY & set(changes)
        return predict(graph if same else model, () if same else inputs, **{**given, **changes})

    return account(graph, device, found, precision=precision, launch=launch, burst=burst, again=again)


def _as_asked(graph: Graph, inputs: Any, precision: str | None, batch: int | None) -> Graph:
    """A captured graph for a what-if precision; what only a capture can change is refused."""
    if (batch is not None and batch != graph.samples) or (inputs is not None and len(inputs) > 0):
        raise ArgumentError(
            "a captured graph has its inputs and its batch",
            fix="predict the model itself, or capture it again: tessera.graph.capture.capture(..., batch=)",
        )
    if precision is None:
        return graph
    from .precision import recast

    # Quantised products keep bf16 between them: what the products themselves run in is the operator model's business.
    stored = WHAT_IFS[precision] if precision in QUANTISED else precision
    return replace(graph, ops=tuple(recast(op, stored) for op in graph.ops))


def _device(on: Any) -> Device:
    if isinstance(on, str):
        return lookup(on)
    if isinstance(on, Device):
        return on
    raise ArgumentError(
        f"on={on!r} is no chip",
        fix="the name of one ('h200'), or a Device; several: tessera.estimate.sweep(devices=...)",
    )


def _precision_name(precision: Any) -> str:
    """Our name of a number format: a string, a `Precision`, or a torch dtype."""
    text = str(getattr(precision, "value", precision)).removeprefix("torch.")
    name = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}.get(text, text)
    if name not in WHAT_IFS:
        raise ArgumentError(
            f"no what-if precision {name!r}{did_you_mean(name, WHAT_IFS)}", fix=f"one of {', '.join(WHAT_IFS)}"
        )
    return name


def check_launch(launch: str) -> None:
    """A clear error for a launch that does not exist."""
    if launch not in GAP_S:
        raise ArgumentError(f"no launch {launch!r}{did_you_mean(launch, GAP_S)}", fix="launch='eager' or 'graph'")


def _captured(
    model: Any,
    inputs: Any,
    mode: Any,
    precision: str | None,
    optimizer: Any,
    batch: int | None,
    launch: str,
    name: str | None,
) -> Graph:
    try:
        from ..graph.capture import capture
    except ImportError as e:
        from ..errors import MissingExtra

        raise MissingExtra("torch", "torch", "predicting a model") from e
    return capture(
        model,
        inputs,
        mode=mode,
        precision=precision,
        optimizer=optimizer,
        batch=batch,
        replay=launch == "graph",
        name=name,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """An iteration solved: operators, their kernels, and what they come to."""

    ops: tuple[Op, ...]
    kernels: tuple[KernelTime, ...]
    moved: tuple[Traffic, ...]
    solved: Solved
    power: PowerModel
    memory: MemoryReport
    host: HostModel | None


def estimate(
    graph: Graph,
    device: Device,
    model: OpModel,
    *,
    launch: Launch = "eager",
    burst: bool = False,
    host: HostModel | None = None,
    calibration: Overlay | None = None,
) -> Estimate:
    """Solve a captured iteration for a device; `calibration` is what was measured on this machine."""
    ops = graph.kernels
    cache = CACHE_SHARE * model.chip.cache_bytes
    moved = traffic(graph, ops, cache)
    runs = [(op.kind, model.precision_of(op)) for op in ops]
    kernels = tuple(model.time(op, found.hbm_bytes) for op, found in zip(ops, moved, strict=True))
    if calibration is not None:
        kernels = tuple(overlay.apply(k, *how, calibration) for k, how in zip(kernels, runs, strict=True))
    cpu = runs_itself(device)
    if cpu:
        kernels = unvalidated(kernels)
    gaps = [0.0 if cpu else GAP_S[launch] * launches(op) for op in ops]
    if launch == "graph" and gaps and not cpu:
        gaps[0] += replay_s(sum(k.seconds for k in kernels) + sum(gaps))
    power = overlay.power(PowerModel.from_device(device), calibration)
    one_by_one = launch == "eager" or cpu  # a CPU has no CUDA graphs
    hosts = (host or overlay.host(host_of(device), calibration)) if one_by_one else None
    host_s = _host_by_kernel(graph, hosts) if hosts is not None else None
    iteration = Iteration(kernels, gaps, power)
    overlay.charge(iteration, runs, calibration)
    synced = [op.sync or cpu for op in ops] if cpu or any(op.sync for op in ops) else []
    solved = iteration.solve(host_s, synced=synced, drained=cpu or graph.ends_synchronised, burst=burst)
    return Estimate(
        ops=ops, kernels=kernels, moved=tuple(moved), solved=solved, power=power, host=hosts,
        memory=_quantised(graph, MemoryEstimator(device).estimate(graph), model.precision),
    )  # fmt: skip


def replay_s(device_s: float) -> float:
    """What one replay adds to kernels that take `device_s`."""
    return max(_HIDDEN_REPLAY_S, min(REPLAY_S, _LEAST_REPLAY_S - device_s))


def _quantised(graph: Graph, memory: MemoryReport, precision: str | None) -> MemoryReport:
    """Memory with the weights of the quantised products stored in one byte each."""
    if precision not in QUANTISED:
        return memory
    weights = {s.id: s.nbytes for s in graph.storages.values() if s.category == "weights"}
    used = {t.storage for op in graph.ops if op.kind in ("gemm", "conv", "rnn") for t in op.inputs if len(t.shape) > 1}
    saved = sum(weights[i] // 2 for i in used if i in weights)
    by_category = {**memory.by_category, "weights": memory.by_category.get("weights", 0) - saved}
    return replace(
        memory, peak_bytes=memory.peak_bytes - saved, static_bytes=memory.static_bytes - saved, by_category=by_category,
        timeline=tuple(n - saved for n in memory.timeline),
    )  # fmt: skip


def host_of(device: Device) -> HostModel:
    """The host a device is taken to be driven by: a server's, a system-on-chip's own slower cores, a CPU itself."""
    if runs_itself(device):
        return dispatch()
    default = HostModel.default()
    if device.kind != "soc":
        return default
    return default.scaled(_SOC_HOST, f"assumed: {_SOC_HOST} times the Xeon's", 0.7)


def _host_by_kernel(graph: Graph, host: HostModel) -> Array:
    """Host seconds up to each kernel's launch: views and Python before it are on its account."""
    times = host_times(host, graph.ops, training=any(op.phase == "backward" for op in graph.ops))
    found: list[float] = []
    before = 0.0
    for op, seconds in zip(graph.ops, times, strict=True):
        before += seconds
        if op.kernels:
            found.append(before)
            before = 0.0
    if found:
        found[-1] += before
    return np.array(found)


def _check_memory(graph: Graph, device: Device, memory: MemoryReport) -> None:
    capacity = device.memory.capacity_bytes
    if capacity is None or memory.peak_bytes <= capacity.value:
        return
    raise DoesNotFit(
        f"{graph.name} needs {format_bytes(memory.peak_bytes)}, {device.name} has {format_bytes(capacity.value)}",
        why=", ".join(f"{name} {format_bytes(size)}" for name, size in memory.by_category.items() if size),
        fix="a smaller batch, a narrower precision or another chip; check_memory=False predicts it all the same",
    )
