"""`tessera policy check` in the terminal."""

from __future__ import annotations

from itertools import groupby

from rich.text import Text

from ..fleet.lockstep import LockstepJob, ShapedWave
from ..fleet.policy_check import PolicyCheck, PolicyFinding
from ..fleet.power_quality import RAMP_S, PowerQuality
from ..units import format_duration, format_power, format_power_rate
from .console import Console, HangingText

_MARKS = {
    "ok": ("✓", "green", ""),
    "costs": ("✓", "green", ""),
    "unclear": ("?", "yellow", ""),
    "cannot": ("✗", "red", "cannot work: "),
}


def print_policy_check(check: PolicyCheck, file: str, console: Console) -> None:
    """Print the conclusion, each finding with its fix, the job's power before and after, the next command."""
    wrong = sum(finding.verdict == "cannot" for finding in check.findings)
    conclusion = f"{wrong} of {len(check.findings)} findings cannot work" if wrong else "everything in it can work"
    console.print(HangingText(Text(f"{file}: {conclusion}", style="bold red" if wrong else "bold"), 2))
    console.print(HangingText(Text(_describe_job(check.job), style="dim"), 2))
    for policy, findings in groupby(check.findings, key=lambda finding: finding.policy):
        console.print(Text(f"\n{policy}", style="bold"))
        for finding in findings:
            _print_finding(finding, console)
    console.print()
    waves = [("without the shaper", check.before, check.quality_before)]
    if any(finding.policy == "power_shaper" for finding in check.findings):
        waves.append(("with it", check.after, check.quality_after))
    for name, wave, quality in waves:
        console.print(HangingText(f"{name:<19} {_describe_wave(wave, quality, check.job)}", 20))
    console.print(Text("next: tessera simulate cluster.yaml", style="cyan"), soft_wrap=True)


def _print_finding(finding: PolicyFinding, console: Console) -> None:
    mark, style, verdict = _MARKS[finding.verdict]
    line = Text(f"  {mark} ", style=style).append(f"{finding.setting}: ", style="bold")
    console.print(HangingText(line.append(verdict, style=style).append(finding.text, style=""), 6))
    if finding.fix:
        console.print(HangingText(Text(f"    fix: {finding.fix}", style="cyan"), 9))


def _describe_job(job: LockstepJob) -> str:
    wait = "wait for each other at every step" if job.synchronous else "do not wait for each other"
    return (
        f"for a job of {job.gpus:,} GPUs that draw {format_power(job.high_w)} for {job.duty:.0%} of "
        f"{format_duration(job.period_s)} and {format_power(job.low_w)} for the rest, together; its {job.replicas} "
        f"replicas {wait} (--period, --duty, --high, --low, --gpus, --host, --replicas, --independent: your own)"
    )


def _describe_wave(wave: ShapedWave, quality: PowerQuality, job: LockstepJob) -> str:
    parts = [f"{format_power(quality.low_w)} to {format_power(quality.peak_w)}"]
    parts.append(f"crest factor {quality.crest_factor:.3g}")
    parts.append(f"ramp {format_power_rate(quality.ramp_w_per_s, 3)} within {format_duration(RAMP_S)}")
    if wave.loss:
        parts.append(f"throughput {-wave.loss:+.1%}")
    if wave.loss or wave.ballast_w:
        parts.append(f"joules per unit of work {wave.step_j / job.step_j - 1:+.1%}")
    return "   ".join(parts)
