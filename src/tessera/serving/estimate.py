"""`estimate_serving`: latency, throughput, joules and memory of a served language model, before it runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..device import Device
from ..errors import ArgumentError, TesseraError
from ..estimate.host import CPU_NOTE, is_cpu
from ..estimate.power import PowerEstimate, note_exceeded
from ..hardware import lookup
from .deployment import WEIGHT_BYTES, Deployment, choose_sixteen_bits, find_node_gpus, note_formats, note_nodes
from .engine import find_engine, run_pass, run_wait
from .forward_pass import decode_pass, prefill_pass
from .served_model import ServedModel, read_served_model
from .uncertainty import ServingErrors, find_errors, find_provenance

# Time to the first token under steady arrivals: its own prefill, an engine's share of the prefills of other sequences
# (by a power of their number), and the way through the server, in steps. Chosen on half of the published servers; the
# only three servers with one sequence (of one model on one system, in that half) wait for 3.8 steps after their prefill
# (benchmarks/measure/published_serving.py: first_token_alone).
_QUEUE_POWER, FIRST_STEPS = 0.615, 4.5
# Bytes that an engine holds beside weights and cache (CUDA context, graphs, activations: assumed, not measured), and
# the share of the board that it may use (vLLM: 0.9).
ENGINE_BYTES, USED_SHARE = 3.0e9, 0.92
_MEMORY_ERROR = 0.10
ARRIVALS = ("steady", "once")
_FIGURES = (
    "time_to_first_token_s",
    "time_per_output_token_s",
    "tokens_per_s",
    "joules_per_token",
    "power_w",
    "memory_bytes",
)


class Quantity(float):
    """A number with the half-width of its 90% interval."""

    error: float

    def __new__(cls, value: float, error: float) -> Quantity:
        made = super().__new__(cls, value)
        made.error = error
        return made

    def __repr__(self) -> str:
        return f"Quantity({float(self)!r}, error={self.error!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEstimate:
    """Prefill or decode alone: seconds of one pass, watts and joules of all GPUs, tokens that it reads or produces."""

    time_s: Quantity
    power_w: Quantity
    energy_j: Quantity
    tokens: float

    @property
    def joules_per_token(self) -> Quantity:
        """Return the joules for each token of the phase."""
        return Quantity(self.energy_j / self.tokens, self.energy_j.error / self.tokens)

    @property
    def tokens_per_s(self) -> Quantity:
        """Return the tokens per second."""
        relative = self.time_s.error / self.time_s
        return Quantity(self.tokens / self.time_s, relative * self.tokens / self.time_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport:
    """One model on one deployment with `batch` sequences under way.

    `time_to_first_token_s` is for a prompt and its way through the server, beside the prompts of the other sequences.
    `time_per_output_token_s` is the mean over a generation, with the prompts of other sequences between the steps if
    arrivals are steady. `tokens_per_s` and `power_w` are those of prefill and decode together. `joules_per_token` are
    those of all GPUs for an output token, its share of the prompt included. `memory_bytes` of one GPU is the sum of
    `weights_bytes`, `cache_bytes` and `engine_bytes`: its CUDA context, graphs and activations. `provenance` says where
    the figures come from. `waiting_s` of each step, and `waiting_j` of all GPUs, are for the scheduler between prompts;
    together with decode and prefill, they are all of the time and the joules.
    """

    served: ServedModel
    deployment: Deployment
    batch: int
    prompt: int
    generate: int
    arrivals: str
    time_to_first_token_s: Quantity
    time_per_output_token_s: Quantity
    tokens_per_s: Quantity
    joules_per_token: Quantity
    power_w: Quantity
    memory_bytes: Quantity
    weights_bytes: float
    cache_bytes: float
    engine_bytes: float
    prefill: PhaseEstimate
    decode: PhaseEstimate
    decode_by_context: tuple[tuple[int, PhaseEstimate], ...]
    capacity_bytes: float | None
    largest_batch: int | None
    provenance: Mapping[str, str]
    waiting_s: float = 0.0
    waiting_j: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Return whether a GPU's memory holds its part; None if the capacity of the chip is not known."""
        return None if self.capacity_bytes is None else self.memory_bytes <= USED_SHARE * self.capacity_bytes

    @property
    def holds_limit(self) -> bool:
        """Return whether its prefill and its steps keep to the power limit that is set on its GPUs."""
        limit_w = self.deployment.device.power_limit_w
        highest_w = max(self.prefill.power_w, self.decode.power_w) / self.deployment.gpus
        return limit_w is None or highest_w <= limit_w * (1.0 + 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        d, on = self.served, self.deployment
        figures = {name: _plain(getattr(self, name)) for name in _FIGURES}
        return {
            "model": d.name,
            "parameters": d.shape.parameters,
            "active_parameters": d.active_parameters,
            "on": on.device.id,
            "gpus": on.gpus,
            "replicas": on.replicas,
            "expert_ranks": on.expert_ranks,
            "dtype": on.weights,
            "experts_dtype": on.experts if d.shape.experts else None,
            "cache_dtype": on.cache,
            "engine": on.engine,
            "launch": on.launch,
            "batch": self.batch,
            "prompt": self.prompt,
            "generate": self.generate,
            "arrivals": self.arrivals,
            **figures,
            "weights_bytes": self.weights_bytes,
            "cache_bytes": self.cache_bytes,
            "engine_bytes": self.engine_bytes,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            "largest_batch": self.largest_batch,
            "provenance": dict(self.provenance),
            "notes": list(self.notes),
            "prefill": _phase_dict(self.prefill),
            "decode": _phase_dict(self.decode),
            "waiting": {"time_s": self.waiting_s, "energy_j": self.waiting_j},
            "decode_by_context": [{"context": n, **_phase_dict(phase)} for n, phase in self.decode_by_context],
        }


def _plain(value: Quantity) -> dict[str, float]:
    return {"value": float(value), "error": value.error}


def _phase_dict(phase: PhaseEstimate) -> dict[str, Any]:
    names = ("time_s", "power_w", "energy_j", "tokens_per_s", "joules_per_token")
    return {name: _plain(getattr(phase, name)) for name in names}


def estimate_serving(
    model: Any,
    *,
    on: str | Device,
    batch: int = 1,
    prompt: int = 1024,
    generate: int = 256,
    dtype: str | None = None,
    tp: int = 1,
    ep: int | None = None,
    attention_dp: int = 1,
    experts_dtype: str | None = None,
    cache_dtype: str | None = None,
    engine: str = "vllm",
    launch: str = "graph",
    arrivals: str = "steady",
) -> ServingReport:
    """Predict a server: `batch` sequences under way, each with a `prompt` and `generate` tokens of output.

    `model` is a public name, a configuration of Hugging Face, a path of a config.json, or a module. `tp` GPUs share one
    copy; `ep` of them share the experts by expert (default: by width), and with `attention_dp` groups share the
    sequences. `arrivals` "steady": a prompt comes whenever a sequence ends; "once": all prompts come first. `dtype` is
    that of the configuration unless given, else bf16, or fp16 on a chip that has units for that alone.
    """
    served = read_served_model(model)
    device = lookup(on) if isinstance(on, str) else on
    _check_sizes(batch=batch, prompt=prompt, generate=generate, tp=tp)
    if arrivals not in ARRIVALS:
        raise ArgumentError(f"arrivals={arrivals!r} is not known", fix=f"one of: {', '.join(ARRIVALS)}")
    _check_context(served, prompt, generate)
    _check_division(served, tp, attention_dp, ep)
    notes = []
    if dtype is None and served.weights is not None:
        dtype = served.weights
        notes.append(f"{dtype} weights are taken, as the model's name or quantization_config says")
    elif dtype is None:
        dtype = choose_sixteen_bits(device)
        if served.unknown_weights:
            told = f"its weights are stored by {served.unknown_weights} (quantization_config), which is not modelled"
            notes.append(f"{told}: {dtype} is assumed")
        if dtype != "bf16":
            notes.append(f"{device.id} has no bf16 units: {dtype} weights are taken")
    deployment = Deployment(
        device=device,
        gpus=tp,
        replicas=attention_dp,
        expert_ranks=(ep or 1) if served.shape.experts else 1,
        weights=dtype,
        experts=experts_dtype or dtype,
        cache=cache_dtype or _cache_of(dtype, device),
        launch=launch,
        engine=engine,
    )
    report = predict_serving(served, deployment, batch=batch, prompt=prompt, generate=generate, arrivals=arrivals)
    return replace(report, notes=(*notes, *report.notes))


def _cache_of(dtype: str, device: Device) -> str:
    """Return the format of the cache for weights of a format, if none is asked for."""
    if dtype in ("fp8", "fp4"):
        return "fp8"
    return dtype if dtype in ("fp32", "bf16", "fp16") else choose_sixteen_bits(device)


def _check_division(served: ServedModel, tp: int, attention_dp: int, ep: int | None) -> None:
    """Refuse what no engine can start: heads that do not divide, or missing experts."""
    ranks, heads = max(1, tp // max(1, attention_dp)), served.shape.heads
    if heads % ranks:
        raise ArgumentError(
            f"{ranks} GPUs do not share {heads} heads evenly",
            fix="another number of GPUs (--tp), or groups of them that share the sequences (--attention-dp)",
        )
    if ep is not None and ep > 1 and not served.shape.experts:
        raise ArgumentError(f"ep={ep}: {served.name} has no experts", fix="leave ep out")


def _check_context(served: ServedModel, prompt: int, generate: int) -> None:
    """Refuse sequences that are longer than the model was made for, as engines do."""
    if served.context is not None and prompt + generate > served.context:
        raise ArgumentError(
            f"a prompt of {prompt:,} and an answer of {generate:,} tokens are longer than a sequence of {served.name}",
            why=f"its configuration allows {served.context:,} (max_position_embeddings)",
            fix="shorten one of them, or give a config.json that allows more",
        )


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value != int(value) or value < 1:
            raise ArgumentError(f"{name}={value!r} must be a whole number of at least 1")


def predict_serving(
    served: ServedModel, on: Deployment, *, batch: int, prompt: int, generate: int, arrivals: str = "steady"
) -> ServingReport:
    """Predict a server as `estimate_serving` does, for an existing `Deployment`."""
    find_engine(on.engine)
    decode = decode_pass(served, on, batch=batch, context=prompt + generate / 2)
    prefill = prefill_pass(served, on, batch=1, prompt=prompt)
    errors = find_errors(served, on, decode, prefill, batch=batch, prompt=prompt, generate=generate)
    mean, first = run_pass(decode, on, batch), run_pass(prefill, on, 1)
    # For each step of all sequences, batch / generate of them end and as many prompts come; each copy of the attention
    # works on its own prompts. A sequence's own prompt is over before its steps.
    steady = arrivals == "steady"
    prompts = batch / generate / on.replicas
    others = max(0.0, prompts - 1.0 / generate) if steady else 0.0
    wait_s, wait_j = run_wait(prefill, on) if steady else (0.0, 0.0)
    held_up_s = min(1.0, find_engine(on.engine).prefill if steady else 1.0) * first.seconds + wait_s
    step_s, token_s = mean.seconds + others * held_up_s, mean.seconds + prompts * held_up_s
    shown_j = mean.energy_j + prompts * (first.energy_j + wait_j)
    waits_s = _first_token_s(on, first.seconds, mean.seconds, batch / on.replicas, arrivals)
    power_w = on.gpus * min(shown_j / token_s, on.device.tdp_w.value if on.device.tdp_w else math.inf)
    weights, cache = count_memory(served, on, batch, prompt + generate)
    all_bytes = weights + cache + ENGINE_BYTES
    capacity = on.device.memory.capacity_bytes
    contexts = sorted({prompt, prompt + generate // 2, prompt + generate})
    curve = [(n, run_pass(decode_pass(served, on, batch=batch, context=n), on, batch)) for n in contexts]
    joules = on.gpus * shown_j / batch
    whole = (errors.step * mean.seconds + errors.prefill * (step_s - mean.seconds)) / step_s
    return ServingReport(
        served=served,
        deployment=on,
        batch=batch,
        prompt=prompt,
        generate=generate,
        arrivals=arrivals,
        time_to_first_token_s=Quantity(waits_s, errors.first * waits_s),
        time_per_output_token_s=Quantity(step_s, whole * step_s),
        tokens_per_s=Quantity(batch / token_s, whole * batch / token_s),
        joules_per_token=Quantity(joules, errors.energy * joules),
        power_w=Quantity(power_w, errors.power * power_w),
        memory_bytes=Quantity(all_bytes, _MEMORY_ERROR * all_bytes),
        weights_bytes=weights,
        cache_bytes=cache,
        engine_bytes=ENGINE_BYTES,
        prefill=_phase(first, on, prompt * on.replicas, errors.prefill, errors),
        decode=_phase(mean, on, batch, errors.step, errors),
        decode_by_context=tuple((n, _phase(run, on, batch, errors.step, errors)) for n, run in curve),
        capacity_bytes=capacity.value if capacity else None,
        largest_batch=find_largest_batch(served, on, prompt + generate),
        provenance=find_provenance(on, decode, prefill),
        waiting_s=prompts * wait_s,
        waiting_j=on.gpus * prompts * wait_j,
        notes=(*_notes(served, on), *note_exceeded(on.device, max(mean.power_w, first.power_w))),
    )


def _notes(served: ServedModel, on: Deployment) -> list[str]:
    stored = [on.weights, *([served.expert_format or on.experts] if served.shape.experts else [])]
    notes = [CPU_NOTE] if is_cpu(on.device) else []
    return [*notes, *note_formats(on, *stored), *note_nodes(on)]


def _first_token_s(on: Deployment, prefill_s: float, step_s: float, sequences: float, arrivals: str) -> float:
    """Return seconds to the first token: of a prompt among others at any time, or the mean if all come at once."""
    if arrivals == "once":
        return prefill_s * (sequences + 1) / 2
    waits = find_engine(on.engine).queue * max(0.0, sequences - 1.0) ** _QUEUE_POWER
    return float(prefill_s * (1.0 + waits) + FIRST_STEPS * step_s)


def _phase(run: PowerEstimate, on: Deployment, tokens: float, error: float, errors: ServingErrors) -> PhaseEstimate:
    watts, joules = on.gpus * run.power_w, on.gpus * run.energy_j
    return PhaseEstimate(
        time_s=Quantity(run.seconds, error * run.seconds),
        power_w=Quantity(watts, errors.power * watts),
        energy_j=Quantity(joules, errors.energy * joules),
        tokens=tokens,
    )


def count_memory(served: ServedModel, on: Deployment, batch: float, tokens: int) -> tuple[float, float]:
    """Return bytes on one GPU: weights, and the cache of `batch` sequences of `tokens`."""
    s = served.shape
    experts = s.expert_parameters()
    stored = served.expert_format or on.experts
    rest = s.parameters - experts - s.embedding_parameters
    # All GPUs share experts and MLPs; only its ranks share an attention.
    layers = served.full_layers + served.windowed_layers
    attention = min(rest, layers * sum(n * k for n, k in served.attention_matrices(1)))
    weights = experts / on.gpus * WEIGHT_BYTES[stored]
    weights += s.embedding_parameters / on.gpus * WEIGHT_BYTES[on.activations]
    weights += (attention / on.attention_ranks + (rest - attention) / on.gpus) * WEIGHT_BYTES[on.weights]
    cache = batch / on.replicas * served.cache_bytes(tokens, on.attention_ranks, WEIGHT_BYTES[on.cache])
    return weights, cache


def find_largest_batch(served: ServedModel, on: Deployment, tokens: int) -> int | None:
    """Return the nearest deployment and batch that fit: fewer sequences, more GPUs, or narrower weights, if any."""
    capacity = on.device.memory.capacity_bytes
    if capacity is None:
        return None
    weights, each = count_memory(served, on, 1, tokens)
    room = USED_SHARE * capacity.value - weights - ENGINE_BYTES
    return max(0, math.floor(room / each)) if each > 0 else None


def find_fitting(report: ServingReport) -> tuple[Deployment, int] | None:
    """Return the nearest deployment and batch that fit: fewer sequences, more GPUs, or narrower weights.

    Returns None if not even all GPUs of a node hold the narrowest weights.
    """
    on, served, tokens = report.deployment, report.served, report.prompt + report.generate
    if report.largest_batch:
        return on, report.largest_batch
    narrower = [form for form in ("fp8", "fp4") if WEIGHT_BYTES[form] < WEIGHT_BYTES[on.weights]]
    formats = [on, *(replace(on, weights=form, experts=form, cache=_cache_of(form, on.device)) for form in narrower)]
    sizes = [
        n for n in (on.gpus, 2 * on.gpus, 4 * on.gpus, 8 * on.gpus) if n == on.gpus or n <= find_node_gpus(on.device)
    ]
    for form in formats:
        for gpus in sizes:
            other = replace(form, gpus=gpus)
            divides = served.shape.heads % other.attention_ranks == 0
            if divides and (find_largest_batch(served, other, tokens) or 0) >= report.batch:
                return other, report.batch
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedServer:
    """A combination of a sweep that is not possible, and why."""

    on: str
    dtype: str | None
    gpus: int
    batch: int
    reason: str


def sweep_serving(
    model: Any,
    *,
    on: list[str | Device],
    dtype: Sequence[str | None],
    tp: list[int],
    batch: list[int],
    max_time_per_output_token_s: float | None = None,
    max_time_to_first_token_s: float | None = None,
    refused: list[RefusedServer] | None = None,
    **options: Any,
) -> tuple[list[ServingReport], ServingReport | None]:
    """Return every combination, and the one with the fewest joules per token that fits and meets the limits (or None).

    A combination that is not possible is added to `refused`, if that is given and another one is possible; otherwise
    its error is raised.
    """
    served = read_served_model(model)
    reports, errors = [], []
    for chip, form, ranks, size in itertools.product(on, dtype, tp, batch):
        try:
            reports.append(estimate_serving(served, on=chip, dtype=form, tp=ranks, batch=size, **options))
        except TesseraError as error:
            if refused is None:
                raise
            name = chip if isinstance(chip, str) else chip.id
            refused.append(RefusedServer(on=name, dtype=form, gpus=ranks, batch=size, reason=error.what))
            errors.append(error)
    if not reports and errors:
        raise errors[0]
    limits = (max_time_per_output_token_s or math.inf, max_time_to_first_token_s or math.inf)
    met = [
        r
        for r in reports
        if r.fits is not False
        and r.holds_limit
        and r.time_per_output_token_s <= limits[0]
        and r.time_to_first_token_s <= limits[1]
    ]
    return reports, min(met, key=lambda r: r.joules_per_token, default=None)
