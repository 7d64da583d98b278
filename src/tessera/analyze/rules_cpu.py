"""Rules about programs that run on the CPU: data loading, slow steps, dropout, threads, narrow formats.

They apply only if nothing ran on a GPU; otherwise `rules_host.check_idle` says what the device waits for.
"""

from __future__ import annotations

import math
import re

import numpy as np

from ..advice import Advice
from ..notes import name_several
from ..recording import EVALUATION, CpuUse
from ..timeline.columns import NONE, Timeline
from ..timeline.link import Step
from ..units import format_duration
from .evidence import SAVES, RunEvidence
from .kernel_names import op_name, region_name
from .mean_step import find_expensive

# Shares of the time or the joules below which advice is not worth a user's time: chosen, not measured.
LOADING_SHARE = 0.15
STRAGGLER_SHARE = 0.08
FIRST_BATCH_SHARE = 0.25
BETWEEN_SHARE = 0.5
CHILDREN_SHARE = 0.5
BESIDE_SHARE = 0.10
DROPOUT_SHARE = 0.10
WAITED_SHARE = 0.10
PRODUCTS_SHARE = 0.4
# A program that uses at least this share of its cores keeps its own threads waiting; below that, other programs do.
SATURATED = 0.7
# Workers that each use less of a core than this are waiting, not computing.
WAITING_SHARE = 0.25
STEPS = 8
WORKER = "pt_data_worker"
"""Torch's name for the processes of a DataLoader."""
# Where Python waits for processes that it started, or for other threads, and does no work of its own.
_WAITS_FOR_CHILDREN = re.compile(r"\b(?:Popen\.(?:_try_wait|_?wait|_?communicate|poll)|waitpid|BaseProcess\.join)\b")
_WAITS_FOR_THREADS = re.compile(
    r"\bthreading\.py:\d+ (?:Thread\.(?:_wait_for_tstate_lock|join)|(?:Condition|Event)\.wait)\b"
    r"|\bselectors\.py:\d+ \w+\.select\b"
)
_LOADER = re.compile(r"enumerate\(DataLoader\)#(?P<kind>\w+)\.__next__")
_DROPOUT = ("aten::bernoulli_", "aten::native_dropout")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_convolution", "aten::_slow_conv2d")


def _is_on_host(run: RunEvidence) -> bool:
    return run.timeline is not None and not len(run.timeline.device_rows) and bool(run.table.ops)


def check_data_loading(run: RunEvidence) -> Advice | None:
    """Advise if the main thread is in the DataLoader's next for 15% of the traced time or more; all may be saved."""
    if not _is_on_host(run) or run.timeline is None:
        return None
    timeline = run.timeline
    loaders = {i: m["kind"] for i, name in enumerate(timeline.names) if (m := _LOADER.fullmatch(name))}
    rows = np.flatnonzero(np.isin(timeline["name"], list(loaders)))
    if not len(rows):
        return None
    waited_s = float((timeline["end_ns"][rows] - timeline["start_ns"][rows]).sum()) * 1e-9
    share = waited_s / run.table.time_s if run.table.time_s > 0 else 0.0
    if share < LOADING_SHARE:
        return None
    each = format_duration(waited_s / len(rows), 3)
    in_workers = any("MultiProcessing" in kind for kind in loaders.values())
    evidence = f"the main thread is in the DataLoader's next for {share:.0%} of the time, {each} a batch"
    joules = share * run.table.energy_j
    saves = (SAVES["data loading"] * joules, waited_s)
    action = _advise_workers(run) if in_workers else _add_workers(run)
    return run.advise("data loading", joules, evidence, action, saves=saves, by="experience", confidence="medium")


def _add_workers(run: RunEvidence) -> str:
    cores = run.cpu_use.cores if run.cpu_use is not None else 0.0
    if 0 < cores < 2:
        return f"it loads in the main process, and may use {cores:g} core: make the transforms cheaper, or cache them"
    return "it loads in the main process: num_workers=2 or more loads the next batches meanwhile"


def _advise_workers(run: RunEvidence) -> str:
    """Advise more workers if they are the limit and cores are free; otherwise cheaper loading."""
    use = run.cpu_use
    seconds = use.children.get(WORKER, (0, 0.0))[1] if use is not None else 0.0
    count, lived_s = _count_workers(use) if use is not None else (0, 0.0)
    if use is None or not count:
        return "raise num_workers or prefetch_factor, or make the transforms cheaper"
    share = f"{count} workers have {seconds / use.cpu_s:.0%} of the CPU time" if use.cpu_s > 0 else f"{count} workers"
    if seconds < WAITING_SHARE * lived_s:
        each = f"{count} workers use {seconds / lived_s:.0%} of a core each: they wait (disk, network)"
        crowded = ", or for a core that other programs have" if use.others_cores >= 0.5 * use.cores else ""
        return f"{each}{crowded}: raise num_workers and prefetch_factor, so that more of them wait at once"
    if count + 1 <= use.cores - 1:
        return f"{share}, of {use.cores:g} cores: raise num_workers and prefetch_factor, or make the transforms cheaper"
    return (
        f"{share}, and {use.cores:g} cores are all in use: make the transforms cheaper (decode once, cache, smaller "
        "images); more num_workers or prefetch_factor would not help"
    )


def _count_workers(use: CpuUse) -> tuple[int, float]:
    """Return how many workers there were at once, and for how many seconds they lived, together.

    A DataLoader starts new ones for every epoch. A file of before says only how many there were in all.
    """
    count = use.children.get(WORKER, (0, 0.0))[0]
    return use.alive.get(WORKER, (count, count * (use.over_s or 0.0)))


def check_children(run: RunEvidence) -> Advice | None:
    """Child processes use half of the CPU time or more. DataLoader workers do not count: another rule is about them."""
    use = run.cpu_use
    if use is None or not _is_on_host(run) or not use.cpu_s > 0:
        return None
    names, share = _find_children(use)
    if share < CHILDREN_SHARE:
        return None
    joules = share * run.table.energy_j
    evidence = f"child processes ({names}) use {share:.0%} of the CPU time, and are not traced"
    action = "profile their work alone: `tessera run` on their script, or on one that calls it in the main process"
    return run.advise("children", joules, evidence, action)


def _find_children(use: CpuUse) -> tuple[str, float]:
    """Return which children there were beside DataLoader workers, and their share of the CPU time."""
    children = {name: counted for name, counted in use.children.items() if name != WORKER}
    share = math.fsum(seconds for _, seconds in children.values()) / use.cpu_s if use.cpu_s > 0 else 0.0
    return name_several([f"{count} x {name}" for name, (count, _) in children.items()]), share


def advise_function(name: str, amount: str) -> tuple[str, str]:
    """Return evidence and action for the function in which the main thread is while most joules are used."""
    if _WAITS_FOR_CHILDREN.search(name):
        action = "they use the energy: `tessera run --mode sampling` on what they run shows where"
        return f"the program waits for its children ({name}) while {amount} are used", action
    seen = "if it waits for a GPU, `tessera run` without --mode shows the kernels"
    if _WAITS_FOR_THREADS.search(name):
        action = f"only its functions are shown: run the work of other threads in it once; {seen}"
        return f"the main thread waits ({name}) while {amount} are used", action
    return f"the host is in {name} while {amount} are used", f"make it faster, or call it less often; {seen}"


def check_between_operators(run: RunEvidence) -> Advice | None:
    """Advise if half of the joules or more are between operators, and the DataLoader is not half of those.

    Joules outside the steps are setup, saving or evaluation: no function of a step causes them.
    """
    steps_j = math.fsum(step.energy_j for step in run.table.steps)
    outside_j = max(run.table.energy_j - steps_j, 0.0) if run.table.steps else 0.0
    joules = run.table.idle_j - outside_j
    if not _is_on_host(run) or not run.has_joules or not run.share(joules) >= BETWEEN_SHARE:
        return None
    others = (check_data_loading(run), check_children(run))
    if any(other is not None and (other.share or 0.0) >= 0.5 * run.share(joules) for other in others):
        return None
    where = f"{run.table.idle_name}{' of the steps' if outside_j > 0 else ''}"
    evidence = f"{run.format_amount(joules)} are used {where}: by Python on the host, waiting included"
    action = "`tessera run --mode sampling SCRIPT` shows which of its functions use them"
    use = run.cpu_use
    if use is not None and use.beside_s > BESIDE_SHARE * use.cpu_s:
        busy = [(name, count) for name, (count, seconds) in use.beside.items() if seconds >= 0.1 * use.beside_s]
        threads = name_several([f"{count} x {name}" for name, count in busy])
        evidence += f", and by {threads}: threads whose operators are not traced"
        action = "run that work on the main thread once, to see its operators"
    names, share = _find_children(use) if use is not None else ("", 0.0)
    if share > BESIDE_SHARE:
        evidence += f", and by child processes ({names}), which are not traced"
    return run.advise(run.table.idle_name, joules, evidence, action)


def check_stragglers(run: RunEvidence) -> Advice | None:
    """Advise if up to a quarter of the steps take 1.5 times the median, 8% of the time or more; say what ran then."""
    timeline = run.timeline
    if timeline is None or not _is_on_host(run):
        return None
    counted = {row.name for row in run.table.steps}
    steps = [s for s in timeline.linked.steps if s.name in counted][1:]  # the first one warms up
    if len(steps) < STEPS:
        return None
    lengths = np.array([(s.end_ns - s.start_ns) * 1e-9 for s in steps])
    median_s = float(np.median(lengths))
    # Beside really slow steps, what a loaded machine does to a step of a millisecond does not count.
    slow = find_expensive(lengths) & (lengths - median_s >= 0.25 * (lengths.max() - median_s))
    extra_s = float((lengths[slow] - median_s).sum())
    if not slow.any() or slow.sum() > len(steps) // 4 or extra_s < STRAGGLER_SHARE * lengths.sum():
        return None
    worst = steps[int(np.argmax(lengths))]
    cause, rare = _find_cause(timeline, [(s.start_ns, s.end_ns) for s in steps], slow, extra_s)
    loaded = None if rare else _find_first_batches(timeline, steps, slow, extra_s)
    if not rare and not loaded and run.cpu_use is not None and (run.cpu_use.waited_s or 0.0) >= 0.5 * extra_s:
        return None  # its thread was ready but had no core, so other programs caused it
    evidence = (
        f"{int(slow.sum())} of {len(steps)} whole traced steps after the first one take {format_duration(extra_s, 3)} "
        f"more than the median one ({worst.name}: {lengths.max() / median_s:.1f} times); "
        f"{loaded[0] if loaded else cause or 'no traced operator accounts for it'}"
    )
    if rare:
        action = "do it less often, or beside the steps"
    elif loaded:
        action = loaded[1]
    elif cause:
        action = "something disturbed these steps: look for other load, lower clocks, or data of another size"
    else:
        action = "tessera run --stack shows what the program does then: often saving, printing or garbage collection"
    joules = extra_s / run.table.time_s * run.table.energy_j
    saves = (SAVES["outliers"] * joules, extra_s)
    return run.advise("stragglers", joules, evidence, action, saves=saves, by="experience", confidence="low")


def _find_cause(
    timeline: Timeline, steps: list[tuple[int, int]], slow: np.ndarray, extra_s: float
) -> tuple[str | None, bool]:
    """Return what has most of the slow steps' extra time (or None), and whether other steps lack it.

    A checkpoint within the step's region is named, not the region, which every step has. None: nothing has half of the
    time.
    """
    links = timeline.linked
    ops = timeline.rows("op")
    own = {s.row for s in links.steps}
    rows = np.union1d(links.top_op[ops][links.top_op[ops] != NONE], timeline.rows("region"))
    rows = rows[~np.isin(rows, list(own))]
    begins, ends = (np.array([step[side] for step in steps]) for side in (0, 1))
    step = np.searchsorted(begins, timeline["start_ns"][rows], side="right") - 1
    inside = (step >= 0) & (timeline["start_ns"][rows] < ends[step])
    rows, step = rows[inside], step[inside]
    if not len(rows):
        return None, False
    names, which = np.unique(timeline["name"][rows], return_inverse=True)
    seconds = np.zeros((len(names), len(steps)))
    np.add.at(seconds, (which, step), (timeline["end_ns"][rows] - timeline["start_ns"][rows]) * 1e-9)
    usual_s = np.median(seconds[:, ~slow], axis=1, keepdims=True)
    more_s = (seconds[:, slow] - usual_s).sum(axis=1)
    enough = more_s >= 0.5 * extra_s
    if not enough.any():
        return None, False
    rare = enough & (usual_s[:, 0] == 0)
    most = int(np.argmax(np.where(rare if rare.any() else enough, more_s, -np.inf)))
    name = region_name(op_name(timeline.names[int(names[most])]))
    where = name if rare[most] else f"{name}, which other steps have too"
    return f"{format_duration(float(more_s[most]), 3)} of it in {where}", bool(rare[most])


def _find_first_batches(
    timeline: Timeline, steps: list[Step], slow: np.ndarray, extra_s: float
) -> tuple[str, str] | None:
    """Return how long slow steps wait for an epoch's first batch, and what to do; None below a quarter of the extra.

    An epoch begins in a step before which the DataLoader was asked once more than usual, because it was empty the last
    time. A step in which it was asked still more often has another loop over data in it.
    """
    loaders = {i: m["kind"] for i, name in enumerate(timeline.names) if (m := _LOADER.fullmatch(name))}
    rows = np.flatnonzero(np.isin(timeline["name"], list(loaders)) & (timeline["start_ns"] >= steps[0].start_ns))
    rows = rows[np.argsort(timeline["start_ns"][rows], kind="stable")]
    asked_ns, got_ns = timeline["start_ns"][rows], timeline["end_ns"][rows]
    begins, ends = np.array([s.start_ns for s in steps]), np.array([s.end_ns for s in steps])
    first, last = np.searchsorted(asked_ns, begins), np.searchsorted(asked_ns, ends)
    usual = round(float(np.median((last - first)[~slow])))
    epoch = slow & (np.diff(last, prepend=0) > usual) & (last - first >= max(usual, 1))
    if usual == 0 or not epoch.any():
        return None
    waits_s = (got_ns[np.minimum(np.where(epoch, last - usual, first), len(rows) - 1)] - begins) * 1e-9
    more_s = float((waits_s[epoch] - np.median(waits_s[~slow])).sum())
    if more_s < FIRST_BATCH_SHARE * extra_s:
        return None
    spent, asked = f"{format_duration(more_s, 3)} of it", int((last - first)[epoch].max())
    if asked > usual + 1:
        advice = "if that is evaluation, model.eval() before and model.train() after it keep it out of the step"
        return f"{spent} while {asked} batches are loaded, where other steps load {usual}", advice
    evaluated = [i for i, name in enumerate(timeline.names) if name == EVALUATION]
    evaluated_ns = timeline["end_ns"][np.isin(timeline["name"], evaluated)]
    after = " (evaluation came before, and is in no step)" if np.isin(begins[epoch], evaluated_ns).any() else ""
    waited = f"{spent} until the DataLoader's first batch of an epoch came{after}"
    if any("MultiProcessing" in loaders[int(n)] for n in timeline["name"][rows[last[epoch] - usual]]):
        return waited, "its workers start anew then; persistent_workers=True keeps them from one epoch to the next"
    return waited, "see what its sampler and dataset do when an epoch begins"


def check_dropout(run: RunEvidence) -> Advice | None:
    """Advise if the random numbers of dropout take 10% of the joules or more."""
    if not _is_on_host(run):
        return None
    rows = [r for r in run.table.ops if r.name in _DROPOUT]
    joules = sum(r.energy_j for r in rows)
    if run.share(joules) < DROPOUT_SHARE:
        return None
    calls = sum(r.calls for r in rows)
    evidence = f"drawing the random numbers of dropout takes {run.format_amount(joules)} in {calls:,} calls"
    action = "drop whole channels (Dropout1d and Dropout2d draw one number for each), or set p=0 where it is not needed"
    saves = (SAVES["dropout"] * joules, SAVES["dropout"] * sum(r.time_s for r in rows))
    return run.advise("dropout", joules, evidence, action, saves=saves, by="experience", confidence="medium")


def check_threads(run: RunEvidence) -> Advice | None:
    """Advise if busy cores are fewer than threads and workers, and the main thread waited for one for 10%."""
    use = run.cpu_use
    if use is None or use.threads is None or use.waited_s is None or run.power is None or not _is_on_host(run):
        return None
    workers, _ = _count_workers(use)
    seconds = run.power.seconds
    share = use.waited_s / seconds if seconds > 0 else 0.0
    saturated = use.cpu_s >= SATURATED * use.cores * seconds
    if use.threads + workers <= use.cores or share < WAITED_SHARE or not saturated:
        return None
    beside = f" beside {workers} DataLoader workers" if workers else ""
    evidence = (
        f"{use.threads} x torch thread{beside} on {use.cores:g} cores, and the main thread waited for a core "
        f"{share:.0%} of the time"
    )
    fewer = max(1, int(use.cores) - workers)
    action = "use fewer num_workers" if fewer >= use.threads else f"torch.set_num_threads({fewer}) or fewer num_workers"
    joules = share * run.table.energy_j
    saves = (SAVES["threads"] * joules, None)
    return run.advise("threads", joules, evidence, action, saves=saves, by="experience", confidence="medium")


def check_formats(run: RunEvidence) -> Advice | None:
    """Advise if fp32 products take 40% of the joules or more, and this CPU has instructions for bf16."""
    use, timeline = run.cpu_use, run.timeline
    if use is None or "bf16" not in use.formats or timeline is None or not _is_on_host(run):
        return None
    joules = sum(r.energy_j for r in run.table.ops if r.name in _PRODUCTS)
    if run.share(joules) < PRODUCTS_SHARE:
        return None
    ops = timeline.rows("op")
    mine = np.isin(timeline["name"][ops], [i for i, name in enumerate(timeline.names) if name in _PRODUCTS])
    shapes = np.unique(timeline["shapes"][ops[mine]])
    texts = [timeline.names[int(i)] for i in shapes if i != NONE]
    if not texts or any("bf16" in text or "f32" not in text for text in texts):
        return None
    evidence = f"products and convolutions in fp32 take {run.format_amount(joules)}; this CPU has bf16 instructions"
    action = 'try torch.autocast("cpu", dtype=torch.bfloat16), and measure it'
    if "int8" in use.formats:
        action += " (for inference also int8)"
    saves = (SAVES["formats"] * joules, None)
    return run.advise("formats", joules, evidence, action, saves=saves, by="experience", confidence="low")
