"""One step as spans of time on each pipeline stage: microbatches forward and backward, waits, and the end."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .layout import Layout

_MOST_SPANS = 256  # spans of one stage: more would be too thin to see, so microbatches in the middle are left out
_LAST_PARTS = ("data parallel", "optimizer", "host", "waiting")
_STAGE_PARTS = ("compute", "tensor parallel", "context parallel", "expert parallel", "pipeline sends")
# Time of a backward pass over that of a forward pass: two products for each one; one more forward pass if everything is
# recomputed.
_BACKWARD = {"none": 2.0, "selective": 2.15, "full": 3.0}


@dataclass(frozen=True, slots=True)
class StageSpan:
    """What one stage does from `start_s` to `end_s`: "forward", "backward", or a part of the step's end."""

    stage: int
    kind: str
    start_s: float
    end_s: float
    microbatch: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """The spans of a step. A gap between the spans of a stage is the bubble of the pipeline.

    Only `microbatches` of the layout's are drawn; if these are fewer, the middle of the step is left out and `time_s`
    is shorter than the step. Communication that compute does not hide is inside the spans of the microbatches, and
    `exposed` is its share of them.
    """

    stages: int
    microbatches: int
    time_s: float
    exposed: float
    bubble: float
    spans: tuple[StageSpan, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return dataclasses.asdict(self)


def draw_timeline(layout: Layout, parts: dict[str, float]) -> StepTimeline:
    """Return the timeline of a layout whose step has these parts (seconds)."""
    stages, chunks = layout.pp, layout.vp
    shown = min(layout.microbatches, max(2 * stages, _MOST_SPANS // (2 * chunks) // stages * stages))
    each = sum(parts[part] for part in _STAGE_PARTS) / layout.microbatches
    ratio = _BACKWARD[layout.recompute]
    forward = each / (1.0 + ratio) / chunks
    ends = _run_schedule(stages, chunks, shown, forward, forward * ratio)
    spans = [
        StageSpan(stage, kind, end - (forward if kind == "forward" else forward * ratio), end, microbatch, chunk)
        for (kind, stage, chunk, microbatch), end in ends.items()
    ]
    pipeline = max(ends.values())
    clock = pipeline
    # Waiting for the slowest rank is spread over the step, so fewer microbatches have less of it.
    last = {part: parts[part] * (shown / layout.microbatches if part == "waiting" else 1.0) for part in _LAST_PARTS}
    for part, seconds in last.items():
        if seconds > 0:
            spans += [StageSpan(stage, part, clock, clock + seconds) for stage in range(stages)]
            clock += seconds
    return StepTimeline(
        stages=stages,
        microbatches=shown,
        time_s=clock,
        exposed=1.0 - parts["compute"] / (each * layout.microbatches),
        bubble=1.0 - each * shown / pipeline,
        spans=tuple(sorted(spans, key=lambda span: (span.stage, span.start_s))),
    )


_Work = tuple[str, int, int, int]  # kind, stage, chunk, microbatch


def order_work(stage: int, stages: int, chunks: int, microbatches: int) -> list[_Work]:
    """Return a stage's work in order: 1F1B or, with several chunks, Megatron's interleaved form (arXiv 2104.04473)."""
    total = microbatches * chunks
    warm = stages - stage - 1
    if chunks > 1:
        warm = 2 * warm + (chunks - 1) * stages
    warm = min(total, warm)

    def place(k: int, *, back: bool) -> tuple[int, int]:
        turn, inside = divmod(k, stages * chunks)
        chunk = inside // stages
        return chunks - 1 - chunk if back else chunk, turn * stages + k % stages

    ahead: list[_Work] = [("forward", stage, *place(k, back=False)) for k in range(total)]
    back: list[_Work] = [("backward", stage, *place(k, back=True)) for k in range(total)]
    steady = [work for pair in zip(ahead[warm:], back, strict=False) for work in pair]
    return [*ahead[:warm], *steady, *back[total - warm :]]


def _run_schedule(
    stages: int, chunks: int, microbatches: int, forward_s: float, backward_s: float
) -> dict[_Work, float]:
    """Return when each piece of work ends, if it runs as soon as its stage is free and its input has arrived."""
    queues = [order_work(stage, stages, chunks, microbatches) for stage in range(stages)]
    done: dict[_Work, float] = {}
    free, at = [0.0] * stages, [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, queue in enumerate(queues):
            while at[stage] < len(queue):
                work = queue[at[stage]]
                needs = _find_need(work, stages, chunks)
                if needs is not None and needs not in done:
                    break
                start = max(free[stage], done[needs] if needs is not None else 0.0)
                free[stage] = done[work] = start + (forward_s if work[0] == "forward" else backward_s)
                at[stage] += 1
                moved = True
    return done


def _find_need(work: _Work, stages: int, chunks: int) -> _Work | None:
    """Return the work that must end before: forward on the stage before, or backward on the stage after."""
    kind, stage, chunk, microbatch = work
    step = 1 if kind == "backward" else -1
    near = stage + step
    if 0 <= near < stages:
        return kind, near, chunk, microbatch
    next_chunk = chunk + step
    if 0 <= next_chunk < chunks:
        return kind, 0 if step == 1 else stages - 1, next_chunk, microbatch
    return ("forward", stages - 1, chunks - 1, microbatch) if kind == "backward" else None
