"""Prefill and decode of a served language model, by the passes that serving engines annotate in their traces.

::

    vLLM     execute_context_2(6144)_generation_3(3)                  2 prompts of 6144 tokens, 3 requests that decode
             execute_6147_context_2(sq6144sk7144...)_generation_3(sq3sk6144...)
    SGLang   step[EXTEND bs=2 toks=6144]   step[DECODE bs=64]   step[MIXED bs=5 c=2 g=3 c_sq=6144 g_sq=3]
    ATOM     prefill[bs=2 tok=6144 ctx=[...]]   decode[bs=117/128 tok=117 d=117]

A pass is what one such region launched, from its first to its last row on the device: the host runs ahead of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import check_choice
from ..joules import Floats
from ..profile.open_recording import Progress, open_recording
from ..timeline.columns import Ints, Timeline
from .devices import busy_spans, explain_no_device, explain_no_power, row_joules
from .result import Result, columns

BY = ("phase", "batch")
PHASES = ("prefill", "decode", "mixed")
NO_PASSES = (
    "the trace has no passes of a serving engine: profile vLLM or SGLang with their own profiler, or put regions such "
    "as execute_context_1(512)_generation_8(8) around each pass"
)
_VLLM = re.compile(r"execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)[^)]*\)_generation_(\d+)\((?:sq)?(\d+)[^)]*\)")
_SGLANG = re.compile(r"step\[(EXTEND|DECODE|MIXED)\b([^\]]*)\]")
_ATOM = re.compile(r"(prefill|decode)\[(.*)\]")
_FIELD = re.compile(r"(\w+)=(\d+)")
_COLUMNS = columns(
    ("phase", "phase"),
    ("batch", "requests"),
    ("passes", "passes"),
    ("prompt_tokens", "prompt tokens"),
    ("new_tokens", "new tokens"),
    ("time_s", "time", "of each pass from its first to its last row on the device"),
    ("share_pct", "share"),
    ("pass_s", "a pass"),
    ("busy_pct", "device busy"),
    ("tokens_per_s", "rate", "of prompts in prefill, new ones in decode, both where they are mixed"),
)
_JOULES = columns(
    ("energy_j", "energy", "of what ran, without idle time"),
    ("error_j", "±"),
    ("token_j", "a token"),
    ("power_w", "power"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePass:
    """What an engine tells about one pass: requests and tokens of prompts, and of requests that decode."""

    prompts: int = 0
    prompt_tokens: int = 0
    decoding: int = 0
    new_tokens: int = 0

    @property
    def phase(self) -> str:
        """Return "prefill", "decode", or "mixed" for prompts and decoding requests in one pass (chunked prefill)."""
        return "mixed" if self.prompts and self.decoding else "prefill" if self.prompts else "decode"

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens


def parse_pass(name: str) -> EnginePass | None:
    """Return a pass from the name of its region; None if it is not one."""
    if match := _VLLM.fullmatch(name):
        prompts, prompt_tokens, decoding, new = map(int, match.groups())
        return EnginePass(prompts=prompts, prompt_tokens=prompt_tokens, decoding=decoding, new_tokens=new)
    if match := _SGLANG.fullmatch(name):
        fields = {key: int(value) for key, value in _FIELD.findall(match[2])}
        requests = fields.get("bs", 0)
        if match[1] == "DECODE":
            return EnginePass(decoding=requests, new_tokens=fields.get("g_sq", requests))
        tokens = fields.get("c_sq", fields.get("toks", 0))
        if match[1] == "EXTEND":
            return EnginePass(prompts=requests, prompt_tokens=tokens)
        decoding = fields.get("g", 0)
        prompts = fields.get("c", requests - decoding)
        return EnginePass(
            prompts=prompts, prompt_tokens=tokens, decoding=decoding, new_tokens=fields.get("g_sq", decoding)
        )
    if match := _ATOM.fullmatch(name):
        fields = {key: int(value) for key, value in _FIELD.findall(match[2])}
        requests, tokens = fields.get("bs", 0), fields.get("tok", 0)
        if match[1] == "prefill":
            return EnginePass(prompts=requests, prompt_tokens=tokens)
        return EnginePass(decoding=requests, new_tokens=tokens)
    return None


def phases(trace: Any, *, power: Any = None, by: str = "phase", progress: Progress | None = None) -> Result:
    """Return prefill, decode and mixed passes of a serving engine: passes, tokens, seconds, tokens/s, joules a token.

    With `by` "batch", there is a row for each number of requests too.

    >>> analyze.phases("vllm.json.gz").facts["decode_tokens_per_s"]
    """
    check_choice("by", by, BY)
    recording = open_recording(trace, power=power, progress=progress)
    timeline, table = recording.timeline, recording.find_energy()
    found = _find_passes(timeline)
    spent = None if table is None else row_joules(timeline, np.arange(len(timeline)), table)
    groups: dict[tuple[str, int | None], list[tuple[EnginePass, Ints]]] = {}
    for one, rows in found:
        batch = one.prompts + one.decoding if by == "batch" else None
        groups.setdefault((one.phase, batch), []).append((one, rows))
    lines = [_describe(timeline, phase, batch, own, spent) for (phase, batch), own in groups.items()]
    whole_s = sum(r["time_s"] for r in lines)
    lines = [{**r, "share_pct": 100.0 * r["time_s"] / whole_s if whole_s else None} for r in lines]
    lines.sort(key=lambda r: (PHASES.index(r["phase"]), r["batch"] or 0))
    facts: dict[str, Any] = {"passes": len(found), "time_s": whole_s}
    for phase in PHASES:
        own = [r for r in lines if r["phase"] == phase]
        seconds, tokens = (sum(r[key] for r in own) for key in ("time_s", "tokens"))
        facts[f"{phase}_tokens_per_s"] = tokens / seconds if seconds else None
    missing = {}
    if not lines:
        missing["phases"] = NO_PASSES if len(timeline.device_rows) else explain_no_device(recording)
    elif table is None:
        missing["energy"] = explain_no_power(recording)
    return Result(
        kind="phases",
        title=f"Prefill and decode of {recording.facts.name}",
        columns=(*_COLUMNS, *(_JOULES if spent is not None else ())),
        rows=lines,
        facts=facts,
        notes=recording.notes,
        missing=missing,
    )


def _find_passes(timeline: Timeline) -> list[tuple[EnginePass, Ints]]:
    """Return passes with the device rows that each launched. A pass inside another (a wrapper's) is the same pass."""
    parsed = {number: parse_pass(name) for number, name in enumerate(timeline.names)}
    regions = [r for r in timeline.rows("region").tolist() if parsed[int(timeline["name"][r])] is not None]
    links, device = timeline.linked, timeline.device_rows
    known = set(regions)
    outermost = [r for r in regions if known.isdisjoint(links.path(r)[:-1])]
    order = device[np.argsort(links.launch_ns[device], kind="stable")]
    launched = links.launch_ns[order]
    passes = []
    for region in outermost:
        inside = slice(*np.searchsorted(launched, [timeline["start_ns"][region], timeline["end_ns"][region]]))
        rows = order[inside]
        rows = rows[timeline["rank"][rows] == timeline["rank"][region]]
        one = parsed[int(timeline["name"][region])]
        if len(rows) and one is not None:
            passes.append((one, rows))
    return passes


def _describe(
    timeline: Timeline, phase: str, batch: int | None, own: Sequence[tuple[EnginePass, Ints]], spent: Floats | None
) -> dict[str, Any]:
    spans = [int(timeline["end_ns"][rows].max()) - int(timeline["start_ns"][rows].min()) for _, rows in own]
    busy_ns = sum(busy_spans(timeline, rows).total_ns for _, rows in own)
    time_s, tokens = sum(spans) / 1e9, sum(one.tokens for one, _ in own)
    joules = error_j = None
    if spent is not None:
        every = np.concatenate([rows for _, rows in own])
        joules = float(spent[every].sum())
        error_j = None if timeline.error_j is None else float(np.nansum(timeline.error_j[every]))
    return {
        "phase": phase,
        "batch": batch,
        "passes": len(own),
        "prompt_tokens": sum(one.prompt_tokens for one, _ in own),
        "new_tokens": sum(one.new_tokens for one, _ in own),
        "tokens": tokens,
        "time_s": time_s,
        "pass_s": time_s / len(own),
        "busy_pct": 100.0 * busy_ns / sum(spans) if sum(spans) else None,
        "tokens_per_s": tokens / time_s if time_s and tokens else None,
        "energy_j": joules,
        "error_j": error_j,
        "token_j": joules / tokens if joules is not None and tokens else None,
        "power_w": joules / busy_ns * 1e9 if joules is not None and busy_ns else None,
    }
