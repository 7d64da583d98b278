"""`tessera policy`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..units import parse_fraction
from .main import NearestGroup
from .options import ExistingPath, duration_option, is_typed, json_option, parse_option, power_option, print_json


@click.group("policy", cls=NearestGroup)
def command() -> None:
    """Explain power policies (shaper, rack governor, heat, utility), and find what cannot work.

    \b
    Example:
      tessera policy check policy.yaml
    """


@command.command("check")
@click.argument("file", type=ExistingPath())
@duration_option("--period", "How long a step of the job takes.", "2s")
@click.option("--duty", metavar="SHARE", default="75%", show_default=True, callback=parse_option(parse_fraction),
              help="The share of a step in which its GPUs work.")  # fmt: skip
@click.option("--chip", help="The GPU, from the catalogue: --high is its TDP, --low its idle power with a context.  "
              "[default: h200, with a limit of --high where that is more]")  # fmt: skip
@power_option("--high", "What a GPU draws while it works.", "650W")
@power_option("--low", "What it draws while it waits or communicates.", "200W")
@click.option("--gpus", default=64, show_default=True, help="GPUs of the job.")
@click.option("--node-gpus", default=8, show_default=True, help="GPUs of a node.")
@power_option("--host", "What a node draws beside its GPUs: processors, memory, fans.", "0W")
@click.option("--replicas", type=int, help="Data-parallel groups.  [default: 8, or what --gpus allows]")
@click.option("--stages", default=1, show_default=True, help="Pipeline stages of a replica.")
@click.option("--microbatches", default=4, show_default=True, help="Microbatches of a step: jitter comes at each.")
@click.option("--independent", is_flag=True, help="The replicas do not wait for each other at every step.")
@json_option
def check(file: Path, as_json: bool, independent: bool, replicas: int | None, chip: str | None, **job: Any) -> int:
    """Explain each policy of a YAML file for one job, and flag what cannot work, by computing it.

    \b
    Examples:
      tessera policy check policy.yaml
      tessera policy check policy.yaml --chip b200
      tessera policy check policy.yaml --period 1.2s --duty 60% --gpus 512 --replicas 16 --independent

    The job is a wave: its GPUs draw the high power for a share of each step, then the low power, all at the same time.
    Exit code: 0 if everything can work, 1 if something cannot, 2 if the file cannot be read.
    """
    from ..errors import ArgumentError
    from ..fleet.lockstep import LockstepJob
    from ..fleet.policy_check import check_policies
    from ..policy import load_policies

    job |= {name: value for name, value in _find_gpu(chip, job["high_w"]).items() if not is_typed(name)}
    if replicas and replicas > 0 and job["gpus"] % replicas:
        sizes = ", ".join(str(n) for n in range(1, job["gpus"] + 1) if job["gpus"] % n == 0)
        raise ArgumentError(f"{replicas} replicas do not divide {job['gpus']} GPUs", fix=f"--replicas: one of {sizes}")
    replicas = max(1, min(8, job["gpus"] // max(1, job["stages"]))) if replicas is None else replicas
    found = check_policies(load_policies(file), LockstepJob(**job, replicas=replicas, synchronous=not independent))
    if as_json:
        print_json(found.to_dict())
    else:
        from ..report.console import open_console
        from ..report.policy import print_policy_check

        print_policy_check(found, str(file), open_console())
    return 0 if found.works else 1


def _find_gpu(chip: str | None, high_w: float) -> dict[str, Any]:
    """Return the GPU, as a simulated facility has it.

    Of a chip of the catalogue also what it draws at work and waiting.
    """
    from ..errors import ArgumentError
    from ..fleet.facility import GpuKind, read_gpu
    from ..hardware import lookup

    if chip is None:
        usual = GpuKind()
        fits = high_w <= usual.limit_w
        return {"gpu": usual if fits else read_gpu({"limit": f"{high_w}W", "idle": f"{usual.idle_w}W"})}
    device = lookup(chip)
    if device.tdp_w is None or device.idle_w is None:
        missing = "TDP" if device.tdp_w is None else "idle power"
        fix = "leave --chip out, and give --high and --low"
        raise ArgumentError(f"the catalogue has no {missing} of {device.name}", fix=fix)
    gpu = read_gpu({"chip": chip})
    return {"gpu": gpu, "high_w": gpu.limit_w, "low_w": (device.idle_context_w or device.idle_w).value}
