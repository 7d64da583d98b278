"""What policies do to a job, in words, and which settings cannot work: found by computing the job (lockstep.py).

Each finding has a verdict: "ok" (the setting does what it is for), "costs" (it does, at the price named), "unclear"
(the file does not say enough) or "cannot" (it cannot do what it is for, with this job).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..analyze.spectrum import BAND_HZ
from ..policy import GroupShift, PhaseShift, Policies, PowerShaper, RackPowerGovernor, ThermalPolicy, UtilitySpec
from ..runtime.shaping import LOSS, choose_phases, is_whole
from ..units import format_count, format_duration, format_power, format_power_rate, format_share, format_temperature
from .engine import LIMIT_S
from .facility import GpuKind
from .heat import AisleHeat
from .lockstep import LockstepJob, ShapedWave, limit_wave, shape_wave
from .power_quality import PowerQuality, judge
from .power_quality import Verdict as SpecVerdict

Verdict = Literal["ok", "costs", "unclear", "cannot"]
RACK_UNITS = 52
"""Units of the tallest common rack: it holds no more nodes than this."""
GAINED = 0.05
"""A swing that becomes smaller by less than this share counts as unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFinding:
    """One setting of a policy: its effect on the job, and what to do if it cannot work."""

    policy: str
    setting: str
    verdict: Verdict
    text: str
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCheck:
    """The findings about a file, for one job; `before` and `after` are the job's power without and with the shaper.

    The qualities are for all its GPUs, by the functions that judge a simulated feed.
    """

    job: LockstepJob
    findings: tuple[PolicyFinding, ...]
    before: ShapedWave
    after: ShapedWave
    quality_before: PowerQuality
    quality_after: PowerQuality

    @property
    def works(self) -> bool:
        """Return whether every setting can work."""
        return not any(finding.verdict == "cannot" for finding in self.findings)

    def to_dict(self) -> dict[str, object]:
        waves = {
            "before": _wave_figures(self.before, self.quality_before, self.job),
            "after": _wave_figures(self.after, self.quality_after, self.job),
        }
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        return {"works": self.works, "job": dataclasses.asdict(self.job), "findings": findings, **waves}


def _wave_figures(wave: ShapedWave, quality: PowerQuality, job: LockstepJob) -> dict[str, float]:
    return {
        "low_w": quality.low_w,
        "peak_w": quality.peak_w,
        "mean_w": quality.mean_w,
        "crest_factor": quality.crest_factor,
        "ramp_w_per_s": quality.ramp_w_per_s,
        "band_share": quality.band_share,
        "throughput_loss": wave.loss,
        "ballast_share": wave.ballast_w / job.mean_w,
        "more_joules_per_work": wave.step_j / job.step_j - 1,
    }


def check_policies(policies: Policies, job: LockstepJob | None = None) -> PolicyCheck:
    """Check everything that can be said about these policies for a job."""
    job = job or LockstepJob()
    shaper = policies.power_shaper or PowerShaper()
    before, after = shape_wave(job, PowerShaper()), shape_wave(job, shaper)
    spec = policies.utility_spec
    band_hz = spec.band_hz if spec is not None and spec.band_hz is not None else BAND_HZ
    quality = after.measure(job.gpus, band_hz, hosts_w=job.nodes * job.host_w)
    findings: list[PolicyFinding] = []
    if policies.power_shaper is not None:
        findings += _check_jitter(shaper, job, before)
        findings += _check_shift(shaper.phase_shift, job, before)
        findings += _check_ballast(shaper, job)
    findings += _check_caps(shaper, policies.rack_power_governor, job)
    if policies.rack_power_governor is not None:
        findings += _check_start(policies.rack_power_governor, shaper.node_cap_w, spec, job)
    if policies.thermal_policy is not None:
        findings += _check_thermal(policies.thermal_policy, quality.mean_w, job.gpu)
    findings += _check_utility(judge(quality, spec))
    return PolicyCheck(
        job=job,
        findings=tuple(findings),
        before=before,
        after=after,
        quality_before=before.measure(job.gpus, band_hz, hosts_w=job.nodes * job.host_w),
        quality_after=quality,
    )


# -- the shaper -----------------------------------------------------------------------------------------------------


def _gained(wave: ShapedWave, before: ShapedWave) -> float:
    return 1 - wave.swing_w / before.swing_w


def _check_jitter(shaper: PowerShaper, job: LockstepJob, before: ShapedWave) -> Iterator[PolicyFinding]:
    low_s, high_s = shaper.jitter_s
    if high_s <= 0:
        return
    setting = f"jitter {format_duration(low_s)} to {format_duration(high_s)}"
    alone = shape_wave(job, PowerShaper(jitter_s=shaper.jitter_s))
    others = not shaper.phase_shift.is_off or shaper.power_floor_w is not None or shaper.max_ramp_w_per_s is not None
    cost = f"a step of {format_duration(job.period_s)} takes {format_duration(alone.wait_s)} more ({_loss(alone)})"
    least_s = min(job.duty, 1 - job.duty) * job.period_s
    if alone.loss > LOSS:
        fix = "a narrower range, or fewer boundaries"
        yield _finding("power_shaper", setting, "cannot", f"{cost}: more than the {LOSS:.0%} that may be lost", fix)
    elif _gained(alone, before) >= GAINED:
        yield _finding("power_shaper", setting, "costs", f"takes {_gained(alone, before):.0%} of the swing; {cost}")
    else:
        text = (
            f"alone it leaves {alone.swing_w / before.swing_w:.0%} of the swing: all GPUs are high together for "
            f"{format_duration(least_s)} or longer, and starts scatter over less; {cost}"
        )
        yield _finding(
            "power_shaper", setting, "costs" if others else "cannot", text,
            None if others else "add phase_shift between groups that do not wait for each other, or power_floor",
        )  # fmt: skip
    if low_s > 0:
        wasted_s = low_s * job.microbatches
        text = f"all GPUs wait the first {format_duration(low_s)} alike: it spreads nothing"
        fix = f"[0, {1e3 * (high_s - low_s):g}] saves {format_duration(wasted_s)} of each step"
        yield _finding("power_shaper", setting, "costs", text, fix)


def _check_shift(shift: PhaseShift, job: LockstepJob, before: ShapedWave) -> Iterator[PolicyFinding]:
    kinds: tuple[tuple[str, GroupShift, int, PhaseShift], ...] = (
        ("dp_groups", shift.dp_groups, job.replicas, PhaseShift(dp_groups=shift.dp_groups)),
        ("tp_groups", shift.tp_groups, job.replicas * job.stages, PhaseShift(tp_groups=shift.tp_groups)),
        ("pp_stages", shift.pp_stages, job.stages, PhaseShift(pp_stages=shift.pp_stages)),
    )
    for name, how, groups, alone in kinds:
        if how is None:
            continue
        setting = f"phase_shift.{name} {how if isinstance(how, str) else format_duration(how)}"
        if groups == 1:
            fix = f"leave {name} out, or give the job's own number (--replicas, --stages)"
            yield _finding("power_shaper", setting, "unclear", "the job has one group: there is nothing to shift", fix)
            continue
        yield from _check_groups(setting, groups, how, PowerShaper(phase_shift=alone), job, before)


def _check_groups(
    setting: str, groups: int, how: GroupShift, shaper: PowerShaper, job: LockstepJob, before: ShapedWave
) -> Iterator[PolicyFinding]:
    wave = shape_wave(job, shaper)
    left = wave.swing_w / before.swing_w
    phases = choose_phases(groups, job.duty) if how == "auto" else groups
    if job.synchronous:
        free = shape_wave(dataclasses.replace(job, synchronous=False), shaper)
        text = (
            "the groups of a synchronous job wait for each other: whoever starts later ends later by as much. Within "
            f"{LOSS:.0%} of a step ({format_duration(LOSS * job.period_s)}) the shift leaves {left:.0%} of the swing"
        )
        verdict: Verdict = "cannot" if left > 1 - GAINED else "costs"
        fix = (
            f"shift jobs against each other, or replicas that meet rarely (--independent: "
            f"{free.swing_w / before.swing_w:.0%} of the swing would be left), or add power_floor"
        )
        yield _finding("power_shaper", setting, verdict, f"{text}; {_loss(wave)} of throughput lost", fix)
        return
    high = phases * job.duty
    if isinstance(how, str) and is_whole(high) and left <= GAINED:
        text = (
            f"{phases} phases x a duty of {job.duty:.0%} are {round(high)}: always as many are high, no swing is left"
        )
        yield _finding("power_shaper", setting, "ok", text)
    elif left <= 1 - GAINED:
        text = (
            f"{phases} phases x a duty of {job.duty:.0%} are {high:.3g}, not a whole number: the sum swings by one "
            f"phase, {left:.0%} of the swing is left"
        )
        fix = f"a number of groups for which groups x {job.duty:.2g} is whole"
        yield _finding("power_shaper", setting, "costs", text, fix)
    else:
        text = f"the groups start so near to each other that {left:.0%} of the swing is left"
        yield _finding("power_shaper", setting, "cannot", text, "auto, or a longer time between groups")


def _check_ballast(shaper: PowerShaper, job: LockstepJob) -> Iterator[PolicyFinding]:
    if shaper.power_floor_w is not None:
        setting = f"power_floor {format_power(shaper.power_floor_w)}"
        wave = shape_wave(job, PowerShaper(power_floor_w=shaper.power_floor_w))
        share = wave.ballast_w / job.mean_w
        if shaper.power_floor_w <= job.low_w:
            text = f"the job never draws less than {format_power(job.low_w)}: the floor does nothing"
            yield _finding("power_shaper", setting, "cannot", text, "a floor above it, or leave it out")
        elif shaper.power_floor_w > job.high_w:
            text = f"it is above the {format_power(job.high_w)} of the work itself: {share:+.0%} joules"
            yield _finding("power_shaper", setting, "cannot", text, "a floor between the low and the high power")
        else:
            text = f"takes {1 - wave.swing_w / (job.high_w - job.low_w):.0%} of the swing, for {share:+.1%} joules"
            yield _finding("power_shaper", setting, "costs", text)
    if shaper.max_ramp_w_per_s is not None:
        setting = f"max_ramp {format_power_rate(shaper.max_ramp_w_per_s)}"
        wave = shape_wave(job, PowerShaper(max_ramp_w_per_s=shaper.max_ramp_w_per_s))
        fall_s = (job.high_w - job.low_w) / shaper.max_ramp_w_per_s
        cost = f"{wave.ballast_w / job.mean_w:+.1%} joules"
        if fall_s > (1 - job.duty) * job.period_s:
            text = (
                f"a fall from {format_power(job.high_w)} to {format_power(job.low_w)} takes {format_duration(fall_s)}, "
                f"and the job is low for {format_duration((1 - job.duty) * job.period_s)}: power never gets down. It "
                f"is a floor at {format_power(float(wave.power_w.min()))}, for {cost}; the rise stays a step"
            )
            verdict: Verdict = "cannot" if fall_s > job.period_s else "costs"
            yield _finding("power_shaper", setting, verdict, text, "power_floor says the same openly; or a faster ramp")
        else:
            text = f"power falls within {format_duration(fall_s)}, for {cost}; ballast cannot slow the rise"
            yield _finding("power_shaper", setting, "costs", text)


# -- caps -----------------------------------------------------------------------------------------------------------


def _check_caps(shaper: PowerShaper, rack: RackPowerGovernor | None, job: LockstepJob) -> Iterator[PolicyFinding]:
    node_gpus = min(job.node_gpus, job.gpus)
    cap_w = shaper.node_cap_w
    if shaper.cap_rate is not None and cap_w is None:
        text = (
            f"a node may draw {shaper.cap_rate:.0%} of the power at which its supplies switch off, which is not given"
        )
        fix = "psu_limit: 12kW (the over-current limit of all supplies of a node)"
        yield _finding("power_shaper", f"cap_rate {shaper.cap_rate:g}", "unclear", text, fix)
    limits = [("power_shaper", f"cap_rate {shaper.cap_rate:g}" if shaper.cap_rate else "", cap_w)]
    if rack is not None:
        setting = f"rack_cap {format_power(rack.rack_cap_w)} x {rack.breaker_margin:g}"
        limits.append(("rack_power_governor", setting, rack.usable_w))
    for policy, setting, limit_w in limits:
        found = None if limit_w is None else _check_limit(policy, setting, limit_w, shaper.power_floor_w, job)
        if found is not None and (found.verdict != "ok" or policy == "power_shaper"):
            yield found
    if rack is not None and cap_w is not None and rack.usable_w < cap_w:
        text = (
            f"a rack gives out {format_power(rack.usable_w)}, less than the {format_power(cap_w)} of one node's own cap"
        )
        fix = "a lower cap_rate, or a larger rack_cap"
        yield _finding("rack_power_governor", "rack_cap and cap_rate", "cannot", f"they contradict: {text}", fix)
    elif rack is not None:
        node_w = min(cap_w or job.node_high_w, job.node_high_w)
        racks = -(-job.gpus // (node_gpus * max(1, int(rack.usable_w // node_w))))
        fit = f"{int(rack.usable_w // node_w)} nodes of {format_power(node_w)}"
        text = f"{fit} fit into a rack; the job needs {format_count(racks, 'rack')}"
        if not job.host_w and node_w == job.node_high_w:
            text += ". This counts GPUs only: add what the rest of a node draws (--host 1450W)"
        if rack.usable_w >= RACK_UNITS * node_w:
            text += f". A rack has room for {RACK_UNITS} nodes at most, so this cap limits nothing"
            fix = f"the watts of one rack's feed: is {format_power(rack.rack_cap_w)} a slip of the unit?"
            yield _finding("rack_power_governor", limits[-1][1], "cannot", text, fix)
        elif rack.usable_w >= node_w:
            yield _finding("rack_power_governor", limits[-1][1], "ok", text)


def _check_limit(policy: str, setting: str, limit_w: float, floor_w: float | None, job: LockstepJob) -> PolicyFinding:
    """Check one limit against one node: its low power, its ballast, its high power."""
    node_gpus = min(job.node_gpus, job.gpus)
    low_w = job.node_w(job.low_w)
    if limit_w < low_w:
        text = f"{format_power(limit_w)} is below the {format_power(low_w)} that a node draws while it waits"
        return _finding(policy, setting, "cannot", text, "a higher limit: waiting cannot save what idling draws")
    if floor_w is not None and job.node_w(floor_w) > limit_w:
        held = format_power(job.node_w(floor_w))
        text = f"they contradict: power_floor holds a node at {held}, above {format_power(limit_w)}"
        return _finding(
            policy, setting, "cannot", text, f"power_floor below {format_power((limit_w - job.host_w) / node_gpus)}"
        )
    if limit_w >= job.node_high_w:
        text = f"{format_power(limit_w)} is above the {format_power(job.node_high_w)} of a node: never reached"
        return _finding(policy, setting, "ok", text)
    slower = limit_wave(job, limit_w)[1] / limit_wave(job, None)[1] - 1
    text = f"{format_power(limit_w)} for a node that works at {format_power(job.node_high_w)}: steps take {slower:+.1%}"
    text += f" (each begins above the limit, for about {format_duration(LIMIT_S)}, until it holds)"
    lost = slower / (1 + slower)
    if lost <= LOSS:
        return _finding(policy, setting, "costs", text)
    text += f", {lost:.1%} of throughput lost: more than the {LOSS:.0%} that may be"
    return _finding(policy, setting, "cannot", text, "a higher limit, or fewer GPUs under it")


def _check_start(
    rack: RackPowerGovernor, cap_w: float | None, utility: UtilitySpec | None, job: LockstepJob
) -> Iterator[PolicyFinding]:
    setting = f"soft_start {format_duration(rack.soft_start_s)}"
    # A lease rises to all of a node's watts, including those of its host.
    gpu_w = min(job.high_w, job.gpu.limit_w)
    power_w = min(job.gpus * gpu_w + job.nodes * job.host_w, math.inf if cap_w is None else job.nodes * cap_w)
    if rack.soft_start_s <= 0:
        yield _finding("rack_power_governor", setting, "unclear", "the whole job starts at once", "soft_start: 60s")
        return
    ramp = power_w / rack.soft_start_s
    text = f"the job's {format_power(power_w)} come at {format_power_rate(ramp)}"
    if utility is not None and utility.ramp_w_per_s is not None and ramp > utility.ramp_w_per_s:
        text += f", faster than the utility's {format_power_rate(utility.ramp_w_per_s)}"
        # rounded up, because a time that is rounded down would be too short
        least_s = math.ceil(10.0 * power_w / utility.ramp_w_per_s - 1e-6) / 10.0
        fix = f"soft_start: {least_s:g}s or longer"
        yield _finding("rack_power_governor", setting, "cannot", text, fix)
    else:
        yield _finding("rack_power_governor", setting, "ok", text)
    spread_s = rack.per_rack_jitter_s[1] - rack.per_rack_jitter_s[0]
    if rack.per_rack_jitter_s[1] > 0:
        text = (
            f"racks start over {format_duration(spread_s)}, {format_share(spread_s / job.period_s)} of a period, once"
        )
        verdict: Verdict = "ok" if not job.synchronous else "unclear"
        text += ": the first all-reduce of a synchronous job brings them together again" if job.synchronous else ""
        yield _finding("rack_power_governor", "per_rack_jitter", verdict, text)


# -- heat and the utility -------------------------------------------------------------------------------------------


def _check_thermal(thermal: ThermalPolicy, heat_w: float, gpu: GpuKind) -> Iterator[PolicyFinding]:
    idle_c = AisleHeat().supply_c + gpu.heat.resistance_c_per_w * gpu.idle_w
    acts = [name for name in ("redistribute", "migration_on_overheat") if getattr(thermal, name)]
    if thermal.hotspot_threshold_c is not None and thermal.hotspot_threshold_c <= idle_c:
        text = f"a GPU that idles is at about {format_temperature(idle_c, 2)}: every node is too hot, always"
        yield _finding("thermal_policy", "hotspot_threshold", "cannot", text, "hotspot_threshold: 85C")
    elif thermal.hotspot_threshold_c is not None:
        doing = " and ".join(acts) or "nothing is done"
        text = f"a GPU above {format_temperature(thermal.hotspot_threshold_c)} is too hot: {doing}"
        verdict: Verdict = "ok" if acts else "unclear"
        yield _finding("thermal_policy", "hotspot_threshold", verdict, text)
    elif acts:
        text = "nothing says what is too hot"
        yield _finding("thermal_policy", " and ".join(acts), "cannot", text, "hotspot_threshold: 85C")
    if thermal.cooling_budget_w:
        total_w = sum(thermal.cooling_budget_w.values())
        text = f"the aisles take {format_power(total_w)} of heat, the job makes {format_power(heat_w)}"
        fix = None if total_w >= heat_w else "more aisles, fewer GPUs, or a cap"
        yield _finding("thermal_policy", "cooling_budget", "ok" if fix is None else "cannot", text, fix)


def _check_utility(verdicts: Sequence[SpecVerdict]) -> Iterator[PolicyFinding]:
    for line in verdicts:
        found, limit = line.show()
        text = f"the job's {line.what} is {found}, the utility allows {limit}"
        fix = None if line.passed else "tessera simulate shows what meets it: shifted groups, a floor, a battery"
        setting = line.what.replace(" ", "_")
        yield _finding("utility_spec", setting, "ok" if line.passed else "cannot", text, fix)


def _finding(policy: str, setting: str, verdict: Verdict, text: str, fix: str | None = None) -> PolicyFinding:
    return PolicyFinding(policy=policy, setting=setting, verdict=verdict, text=text, fix=fix)


def _loss(wave: ShapedWave) -> str:
    return f"{wave.loss:.1%}"
