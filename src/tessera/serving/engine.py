"""Engines: what a server adds to the kernels of a pass, and how prompts and decoding share the GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import check_choice
from ..estimate.power import DeviceWork, PowerEstimate, PowerModel
from .deployment import Deployment
from .forward_pass import PassWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine under CUDA graphs.

    `kernel_s`: seconds of a small kernel between two larger ones. `step_s` and `sequence_s`: scheduling, sampling and
    output of a step, and of each sequence in it. `prefill`: how long prompts delay the steps of other sequences, over
    what they take alone. `queue`: the prefills of others for which a prompt waits, by their number. `blackwell`: how
    much longer products and experts take there than with kernels made for that chip. `fp8_experts`: how much longer
    experts in fp8 take, if their kernels scale blocks on the way.
    """

    kernel_s: float
    step_s: float
    sequence_s: float
    prefill: float
    queue: float
    blackwell: float = 1.0
    fp8_experts: float = 1.0


# Chosen on half of the published servers (benchmarks/measure/published_serving.py), by model and system.
ENGINES = {
    "vllm": Engine(kernel_s=4.3e-6, step_s=0.67e-3, sequence_s=13e-6, prefill=1.33, queue=0.394),
    # Of late 2025 (ML.ENERGY's third benchmark), when Blackwell was new to it.
    "vllm-0.11": Engine(
        kernel_s=4.3e-6, step_s=0.67e-3, sequence_s=13e-6, prefill=1.33, queue=0.394, blackwell=1.45, fp8_experts=2.0
    ),
    "trtllm": Engine(kernel_s=1.3e-6, step_s=2.2e-3, sequence_s=10e-6, prefill=1.16, queue=0.653),
    "sglang": Engine(kernel_s=7.0e-6, step_s=0.65e-3, sequence_s=10e-6, prefill=0.69, queue=1.482),
}
# Time of a small kernel on Blackwell over one on Hopper: on Blackwell, the next one starts before its end. Chosen on
# the same half.
_BLACKWELL_KERNEL = 0.85
# The host of an eager program needs about 21 us for a kernel (467 kernels in 10 ms: a served 1.1B model on the H200's
# host), and there are about as many large kernels as small ones.
_EAGER_KERNEL_S, _ALL_KERNELS = 21e-6, 2.0
# Dynamic energy of served models over that of random operands on an H200, also used for other chips: chosen on half of
# the published joules, where servers draw about an eighth more than kernels alone would.
_SWITCHING = 1.2


def find_engine(name: str) -> Engine:
    """Return an engine by name."""
    check_choice("engine", name, ENGINES)
    return ENGINES[name]


def run_pass(work: PassWork, on: Deployment, sequences: float) -> PowerEstimate:
    """Return seconds and joules of one GPU for a pass, including its launches and the engine's own work."""
    engine = find_engine(on.engine)
    kernels_s = engine.kernel_s * work.kernels
    if on.device.architecture == "blackwell":
        kernels_s *= _BLACKWELL_KERNEL
    heavy = work.products.work + work.experts.work
    if on.experts == "fp8":
        more_s = (engine.fp8_experts - 1.0) * work.experts.work.seconds
        heavy = heavy + DeviceWork(fixed_s=more_s, busy_s=more_s)
    if on.device.architecture == "blackwell":
        more_s = (engine.blackwell - 1.0) * heavy.seconds
        heavy = heavy + DeviceWork(fixed_s=more_s, busy_s=more_s)
    busy = heavy + work.attention.work + work.small
    # Exchanges and small kernels keep the chip awake, and about half of it at work.
    busy = busy + DeviceWork(fixed_s=kernels_s + work.exchange_s, busy_s=0.5 * (kernels_s + work.exchange_s))
    host_s = engine.step_s + engine.sequence_s * sequences
    if on.launch == "eager":
        host_s += max(0.0, _EAGER_KERNEL_S * _ALL_KERNELS * work.kernels - busy.seconds)
    return PowerModel.from_device(on.device).estimate(busy + DeviceWork(idle_s=host_s), switching=_SWITCHING)


def run_wait(work: PassWork, on: Deployment) -> tuple[float, float]:
    """Return seconds and joules of a GPU that waits for the scheduler beside a prefill that delays other sequences.

    The host's clock is not the GPU's, so a limit of the GPU does not stretch it. Zero if the engine overlaps them.
    """
    unlimited = replace(on, device=replace(on.device, power_limit_w=None, clock_limit_hz=None))
    seconds = max(0.0, find_engine(on.engine).prefill - 1.0) * run_pass(work, unlimited, 1).seconds
    return seconds, seconds * PowerModel.from_device(on.device).static_w
