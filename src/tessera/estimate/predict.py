"""`predict`: latency, energy and memory of a model on a chip, before it runs there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ..device import Device
from ..errors import ArgumentError, DoesNotFit, did_you_mean, needs_extra
from ..graph.ir import WEIGHT_ONLY, WHAT_IFS, Graph, Launch, Op
from ..graph.partition import PartitionReport
from ..hardware import lookup
from ..joules import Floats
from ..schema import EnergyReport
from ..units import format_bytes
from .cache import CACHE_SHARE, count_traffic
from .calibration import Calibration, find
from .compiled import compile_program, host_of_compiled
from .data_work import count_launches
from .host import HostModel, has_graphs, host_times, is_cpu, widen_for_cpu
from .iteration import Iteration
from .memory import MemoryEstimator, MemoryReport
from .ops import QUANTISED, OpModel, precision_name, recast, store_weights
from .power import PowerModel
from .prediction_report import Estimate, build_report

if TYPE_CHECKING:
    import torch

State = Literal["sustained", "burst"]

# Between two kernels of a stream the device idles this long: 0.9-1.3 us launched one by one, measured on the H200 as
# (time - sum of kernels) / kernels of device-bound iterations (benchmarks/data/h200_dev_*); in a CUDA graph 0.36 us.
# A memset in a graph is no kernel: the device idles before and after it. cuDNN's 16-bit attention clears a workspace
# first (replays of short kernels less the traced kernels: benchmarks/fit/fit_ops.py --only gaps).
GAP_S = {"eager": 1.0e-6, "graph": 0.36e-6, "compile": 1.0e-6}
MEMSET_S = 2.1e-6
# One replay of a CUDA graph: what it adds to one small kernel, and the least that both took together (a copy of 65,536
# floats on an H200, recorded by benchmarks/device/record_kernels.py). Behind longer kernels most of it is hidden: one
# product per replay took 0.9 us longer than many in one graph (benchmarks/fit/kernel_rows.py).
REPLAY_S = 2.4e-6
_LEAST_REPLAY_S = 4.06e-6
_HIDDEN_REPLAY_S = 0.9e-6
COMPILED_NOTE = "the model is compiled: predicted as launch='compile' (fused kernels, default mode, no CUDA graphs)"
EAGER_NOTE = (
    "a part of the program is compiled, and predicted as if it were not: launch='compile' fuses the whole program"
)
# Changes that need a new capture; after any other change the same captured program is predicted.
_CAPTURE_OPTIONS = {"precision", "mode", "optimizer", "batch", "launch"}


def predict(
    model: Callable[..., Any] | Graph,
    inputs: Any = (),
    *,
    on: str | Device = "h200",
    precision: str | None = None,
    mode: Literal["infer", "train"] = "infer",
    launch: Launch | None = None,
    optimizer: str | torch.optim.Optimizer = "sgd",
    batch: int | None = None,
    state: State = "sustained",
    host: HostModel | None = None,
    calibration: Calibration | Literal["auto"] | None = "auto",
    check_memory: bool = True,
    name: str | None = None,
) -> EnergyReport:
    """Predict one steady iteration of a model on a catalogued chip; nothing is allocated, computed or measured.

    `model` is any nn.Module or callable (or a captured `Graph`), `inputs` a tensor, a tuple of positional or a dict of
    keyword arguments, real or meta. `precision` asks "what if": bf16, fp16, fp32 and tf32 cast the model; fp8 and int8
    run its matrix products in that format and keep bf16 between them. `launch="graph"` replays a CUDA graph and needs
    no host time per operator (a CPU has no such graph), `"compile"` fuses as `torch.compile` does: the default for a
    compiled model, as "eager" is for others. `batch` rescales the first dimension. `state` is what is predicted:
    "sustained", one iteration after another at the clock that the power limit allows, or "burst", the first moments at
    the boost clock, before a power limit acts. `calibration="auto"` uses the file that `tessera calibrate` wrote for
    the chip on this machine, if there is one; None does not.
    """
    device = _find_device(on)
    precision = None if precision is None else precision_name(precision)
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int)):
        raise ArgumentError(f"batch={batch!r}", fix="batch must be a whole number of samples")
    asked, launch = launch, launch or default_launch(model)
    check_launch(launch)
    check_state(state, device)
    model_of = OpModel(device, precision=precision)
    if isinstance(model, Graph):
        graph = _recast_graph(model, inputs, precision, batch)
    else:
        capture = import_capture()
        graph = capture(
            model, inputs, mode=mode, precision=precision, optimizer=optimizer, batch=batch, launch=launch, name=name
        )
    if precision is not None and precision in WEIGHT_ONLY:
        graph = store_weights(graph, WEIGHT_ONLY[precision])
    measured = _find_calibration(calibration, device)
    program, pieces = compile_program(graph) if launch == "compile" else (graph, None)
    solved = estimate(program, device, model_of, launch=launch, state=state, host=host, calibration=measured, of=pieces)
    if check_memory:
        _check_memory(graph, device, solved.memory)

    def again(**changes: Any) -> EnergyReport:
        options: dict[str, Any] = {"on": device, "precision": precision, "mode": mode, "launch": launch, "state": state}
        options |= {"optimizer": optimizer, "batch": batch, "host": host, "calibration": calibration, "name": name}
        options["check_memory"] = check_memory
        if "on" in changes and "calibration" not in changes:
            changes["calibration"] = "auto" if calibration is not None else None
        same = isinstance(model, Graph) or not _CAPTURE_OPTIONS & set(changes)
        return predict(graph if same else model, () if same else inputs, **{**options, **changes})

    notes = [COMPILED_NOTE] if launch == "compile" and asked is None else []
    notes += [EAGER_NOTE] if launch == "eager" and asked is None and graph.compiled_parts else []
    return build_report(
        program, device, solved, precision=precision, launch=launch, state=state, again=again, notes=notes
    )


def _recast_graph(graph: Graph, inputs: Any, precision: str | None, batch: int | None) -> Graph:
    """A captured graph in a what-if precision; other inputs or another batch need a new capture."""
    if (batch is not None and batch != graph.samples) or (inputs is not None and len(inputs) > 0):
        raise ArgumentError(
            "a captured graph already has its inputs and its batch",
            fix="predict the model itself, or capture it again: tessera.graph.capture.capture(..., batch=)",
        )
    if precision is None:
        return graph
    # Quantised products keep bf16 between them; the operator model decides the products' own format.
    stored, captured = _castable(precision), graph.precision
    if captured is not None and stored == _castable(captured):
        return graph  # captured in it: what is wider now is so on purpose
    return replace(graph, ops=tuple(recast(op, stored) for op in graph.ops), precision=precision)


def _castable(precision: str) -> str:
    """The format that a what-if casts tensors to; tf32 is one of products, not of tensors."""
    return WHAT_IFS[precision] if precision in QUANTISED or precision in WEIGHT_ONLY else precision


def _find_device(on: Any) -> Device:
    if isinstance(on, str):
        return lookup(on)
    if isinstance(on, Device):
        return on
    raise ArgumentError(
        f"on={on!r} is not a chip",
        fix="give the name of one ('h200') or a Device; for several chips: tessera.estimate.sweep(on=...)",
    )


def _find_calibration(calibration: Calibration | Literal["auto"] | None, device: Device) -> Calibration | None:
    own = device.id.partition("@")[0]
    measured = find(own) if calibration == "auto" else calibration
    if (
        measured is not None and device.power_limit_w is not None
    ):  # the limit that was measured is not the one asked for
        measured = measured.without_limit()
    if measured is not None and measured.device not in (device.id, own):
        raise ArgumentError(
            f"the calibration is for {measured.device}, the prediction for {device.id}",
            fix="calibration='auto' takes the calibration of the chip, where there is one",
        )
    return measured


def check_launch(launch: str) -> None:
    """Refuse a launch that does not exist."""
    if launch not in GAP_S:
        raise ArgumentError(
            f"no launch {launch!r}{did_you_mean(launch, GAP_S)}", fix="launch='eager', 'graph' or 'compile'"
        )


def check_state(state: str, *devices: Device) -> None:
    """Refuse a state that does not exist, and a burst under a limit that would act after its end."""
    if state not in get_args(State):
        raise ArgumentError(
            f"no state {state!r}{did_you_mean(state, get_args(State))}",
            fix="state='sustained' (under the power limit) or 'burst' (at the boost clock)",
        )
    limited = next((device for device in devices if device.power_limit_w is not None), None)
    if state == "burst" and limited is not None:
        raise ArgumentError(
            f"a burst is the same on {limited.id} as on {limited.id.partition('@')[0]}",
            why="it ends before a power limit acts",
            fix="state sustained (the default) shows the limit; for the burst leave the limit out",
        )


def default_launch(model: Any) -> Launch:
    """As `torch.compile` runs it where that made the model (decided without importing torch), else eager."""
    compiled = hasattr(model, "_torchdynamo_orig_callable") or type(model).__name__ == "OptimizedModule"
    return "compile" if compiled else "eager"


def import_capture() -> Callable[..., Graph]:
    """`tessera.graph.capture.capture`, or the error that names the missing extra."""
    with needs_extra("torch", "torch", "predicting a model"):
        from ..graph.capture import capture
    return capture


def estimate(
    graph: Graph,
    device: Device,
    model: OpModel,
    *,
    launch: Launch = "eager",
    state: State = "sustained",
    host: HostModel | None = None,
    calibration: Calibration | None = None,
    of: PartitionReport | None = None,
) -> Estimate:
    """Solve a captured iteration for a device; `calibration` holds the factors measured on this machine.

    `of` are the pieces of a compiled program, whose memory leaves out what stays inside them.
    """
    ops, cpu = graph.kernels, is_cpu(device)
    if launch == "graph" and not has_graphs(device):
        launch = "eager"  # as a note says
    crossing = count_traffic(graph, ops, CACHE_SHARE * model.chip.cache_bytes)
    work = [(op.kind, model.precision_of(op)) for op in ops]
    kernels = tuple(model.time(op, hbm_bytes) for op, hbm_bytes in zip(ops, crossing, strict=True))
    power, default_host = PowerModel.from_device(device), HostModel.of_device(device)
    if calibration is not None:
        kernels = tuple(calibration.scale_kernel(k, *how) for k, how in zip(kernels, work, strict=True))
        power, default_host = calibration.scale_power(power), calibration.scale_host(default_host)
    if cpu:
        kernels = widen_for_cpu(kernels)
    gaps = [0.0 if cpu else _gap_s(op, launch) for op in ops]
    if launch == "graph" and gaps:
        gaps[0] += replay_s(sum(k.seconds for k in kernels) + sum(gaps))
    iteration = Iteration(kernels, gaps, power)
    if calibration is not None:
        calibration.scale_energy(iteration, work)
    host = (host or default_host) if launch != "graph" else None
    if launch == "compile" and host is not None:
        host = host_of_compiled(host)
    host_s = _host_by_kernel(graph, host) if host is not None else None
    synced = [op.sync or cpu for op in ops] if cpu or any(op.sync for op in ops) else []
    solved = iteration.solve(host_s, synced=synced, drained=cpu or graph.ends_synchronised, burst=state == "burst")
    memory = _quantise_weights(graph, MemoryEstimator(device).estimate(of or graph), model.precision)
    return Estimate(ops=ops, kernels=kernels, solved=solved, power=power, memory=memory, host=host)


def _gap_s(op: Op, launch: Launch) -> float:
    """Seconds that the device idles around the kernels of an operator."""
    clears = op.kind == "attention" and op.precision in ("bf16", "fp16") and op.params["q_len"] > 1
    return GAP_S[launch] * count_launches(op) + (MEMSET_S if clears and launch == "graph" else 0.0)


def replay_s(device_s: float) -> float:
    """Seconds that one replay adds to kernels that take `device_s`."""
    return max(_HIDDEN_REPLAY_S, min(REPLAY_S, _LEAST_REPLAY_S - device_s))


def _quantise_weights(graph: Graph, memory: MemoryReport, precision: str | None) -> MemoryReport:
    """Memory with the weights of the quantised products stored in one byte each."""
    if precision not in QUANTISED:
        return memory
    weights = {s.id: s.nbytes for s in graph.storages.values() if s.category == "weights"}
    used = {t.storage for op in graph.ops if op.kind in ("gemm", "conv", "rnn") for t in op.inputs if len(t.shape) > 1}
    saved = sum(weights[i] // 2 for i in used if i in weights)
    by_category = {**memory.by_category, "weights": memory.by_category.get("weights", 0) - saved}
    return replace(
        memory,
        peak_bytes=memory.peak_bytes - saved,
        static_bytes=memory.static_bytes - saved,
        by_category=by_category,
        timeline=tuple(n - saved for n in memory.timeline),
    )


def _host_by_kernel(graph: Graph, host: HostModel) -> Floats:
    """Host seconds up to each kernel's launch, including views and Python before it."""
    times = host_times(host, graph.ops, training=any(op.phase == "backward" for op in graph.ops))
    by_kernel: list[float] = []
    pending_s = 0.0
    for op, seconds in zip(graph.ops, times, strict=True):
        pending_s += seconds
        if op.kernels:
            by_kernel.append(pending_s)
            pending_s = 0.0
    if by_kernel:
        by_kernel[-1] += pending_s
    return np.array(by_kernel)


def _check_memory(graph: Graph, device: Device, memory: MemoryReport) -> None:
    capacity = device.memory.capacity_bytes
    if capacity is None or memory.peak_bytes <= capacity.value:
        return
    raise DoesNotFit(
        f"{graph.name} needs {format_bytes(memory.peak_bytes)}, {device.name} has {format_bytes(capacity.value)}",
        why=", ".join(f"{name} {format_bytes(size)}" for name, size in memory.by_category.items() if size),
        fix="use a smaller batch, a narrower precision or another chip; or in Python check_memory=False",
    )
