"""What users and scripts rely on, frozen: public names, the CLI's flags, import cost."""

from __future__ import annotations

import resource
import subprocess
import sys

import click
import pytest

import tessera
import tessera.monitor
from tessera.cli.main import COMMANDS, cli

PUBLIC = {
    "Energy", "EnergyBenchmark", "EnergyReport", "PowerTrace", "TesseraError", "__version__", "actuators", "analyze",
    "config", "dist", "errors", "estimate", "event", "fleet", "graph", "hardware", "memcpy", "monitor", "op",
    "optimize", "predict", "profile", "rewrite", "schedule", "schema", "sensors", "stream", "units",
}  # fmt: skip
MONITOR = {
    "BenchmarkResult", "EnergyBenchmark", "EnergyScope", "LiveTrace", "Monitor", "default", "energy_scope",
    "power_trace", "use",
}  # fmt: skip
_DIFF = {
    "files", "--by", "--fail-above", "--metric", "--power-a", "--power-b", "--html", "--top", "--json", "--github",
}  # fmt: skip
_GOVERNOR = {"--url", "--token-file", "--ca"}
FLAGS = {
    "measure": {
        "--steps", "--samples", "--tokens", "--work", "--unit", "--sensor", "--scope", "--trace", "--json", "command",
        "--runs", "--warmup", "--show-output",
    },
    "run": {
        "-m", "--mode", "--steps", "--limit", "--flush", "--shapes", "--stack", "--modules", "--memory", "--counters",
        "--scope", "--out", "--html", "--json", "--nproc", "--torchrun", "--operator-steps", "target", "arguments",
    },
    "report": {"run", "--power", "--html", "--by", "--top", "--json", "--open"},
    "runs": set(),
    "runs list": {"folder", "--top", "--read", "--json"},
    "runs diff": _DIFF,
    "runs prune": {"folder", "--keep", "--older-than", "--yes"},
    "export": {
        "run", "--power", "--chrome", "--critical-path", "--step", "--csv", "--xlsx", "--otlp", "--parquet",
        "--tensorboard", "--json",
    },
    "attribute": {"trace", "--power", "--by", "--top", "--json"},
    "merge": {"paths", "-o", "--force", "--json"},
    "analyze": {
        "kind", "trace", "--against", "--by", "--group-by", "--min-bytes", "--on", "--power", "--sort", "--step",
        "--threshold", "--top", "--json",
    },
    "diff": _DIFF,
    "plan": {
        "model",
        "--cluster",
        "--goal",
        "--seq",
        "--global-batch",
        "--precision",
        "--gpus",
        "--no-offload",
        "--json",
        "--html",
    },
    "policy": set(),
    "policy check": {
        "file", "--chip", "--period", "--duty", "--high", "--low", "--gpus", "--host", "--node-gpus", "--replicas",
        "--stages", "--microbatches", "--independent", "--json",
    },
    "simulate": {
        "file", "--duration", "--seed", "--distinct", "--engine", "--check", "--json", "--html", "--power",
    },
    "calibrate": {"--device", "--seconds", "--force", "--json", "--dry-run", "--out"},
    "predict": {
        "model", "--on", "--precision", "--batch", "--mode", "--launch", "--optimizer", "--input", "--seq", "--state",
        "--top", "--json", "--html", "--no-opportunities", "--serve", "--prompt", "--generate", "--tp", "--ep",
        "--attention-dp", "--cache-dtype", "--engine", "--max-tpot", "--max-ttft", "--power-curve",
    },
    "doctor": {"--sensor", "--json", "--restore"},
    "selftest": {"--seconds", "--json"},
    "watch": {"--interval", "--sensor", "--once", "--json", "--duration", "--processes"},
    "metrics": {"--listen", "--sensor", "--once", "--dashboard"},
    "fleet": set(),
    "fleet place": {"fleet", "--policy", "--order", "--compare", "--supply", "--slowdown", "--json"},
    "fleet migrate": {"folder", "--ranks", "--node", "--json"},
    "fleet run": {"folder", "words", "--ranks", "--node", "--fleet", "--policy", "--gpus", "--power", "--json"},
    "fleet incidents": {"runs", "--events", "--within", "--top", "--json"},
    "fleet watch": {
        "fleet", "--interval", "--duration", "--once", "--json", "--governor", "--token-file", "--ca", "--policy",
    },
    "fleet serve": {
        "fleet", "--listen", "--interval", "--dashboard", "--alerts", "--governor", "--token-file", "--ca", "--policy",
        "--json",
    },
    "governor": set(),
    "governor serve": {
        "--cap", "--policy", "--margin", "--soft-start", "--lease", "--heartbeat", "--listen", "--tls-cert",
        "--tls-key", "--state", "--json",
    },
    "governor join": {
        "--guaranteed", "--max", "--node", "--sensor", "--rack-meter", "--control", "--host-power", "--lease-file",
        "--json", *_GOVERNOR,
    },
    "governor request": {
        "job", "--watts", "--priority", "--user", "--min-share", "--ttl", "--soft-start", "--wait", "--json",
        *_GOVERNOR,
    },
    "governor renew": {"job", "--json", *_GOVERNOR},
    "governor release": {"job", "--json", *_GOVERNOR},
    "governor status": {"--json", *_GOVERNOR},
    "governor shed": {"--reason", "--to", "--json", *_GOVERNOR},
    "governor resume": {"--json", *_GOVERNOR},
    "governor remove": {"node", *_GOVERNOR},
    "governor token": set(),
    "governor token create": {"name", "--role", "--state", "--out", "--json"},
    "governor token list": {"--state", "--json"},
    "governor token revoke": {"name", "--state"},
    "hardware": set(),
    "hardware add": {"file", "--force", "--json"},
    "hardware list": {"--kind", "--json"},
    "hardware show": {"name", "--json"},
    "completion": {"shell"},
}  # fmt: skip


def test_public_names() -> None:
    assert set(tessera.__all__) == PUBLIC
    assert set(dir(tessera)) == PUBLIC
    for name in tessera.__all__:
        assert getattr(tessera, name) is not None
    assert set(tessera.monitor.__all__) == MONITOR


@pytest.mark.parametrize("name", ["profile.open_recording", "estimate.predict", "analyze.roofline"])
def test_a_public_name_is_not_hidden_by_the_module_of_that_name(name: str) -> None:
    """Whatever was imported before: importing a submodule sets it as an attribute of its package."""
    room, own = name.split(".")
    code = f"import tessera.{name}; from tessera import {room}; assert callable({room}.{own}), {room}.{own}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        tessera.nothing  # noqa: B018


def _commands(group: click.Group, prefix: str = "") -> dict[str, click.Command]:
    """Every command and subcommand by the words a user types."""
    context, found = click.Context(group), {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found[prefix + name] = command
        if isinstance(command, click.Group):
            found |= _commands(command, f"{prefix}{name} ")
    return found


def test_cli_flags() -> None:
    commands = _commands(cli)
    assert set(commands) == set(FLAGS)
    assert set(COMMANDS) == {name for name in FLAGS if " " not in name}
    for name, command in commands.items():
        found = {(p.opts[0] if isinstance(p, click.Option) else str(p.name)) for p in command.params}
        assert found - {"--debug"} == FLAGS[name] - {"--debug"}  # every command takes it from its first call on
        assert "Example" in (command.help or ""), f"{name} --help has no example"


def test_import_brings_in_neither_torch_nor_numpy() -> None:
    code = "import sys, tessera; print(sorted({m.split('.')[0] for m in sys.modules} & set(sys.argv[1:])))"
    heavy = ["torch", "numpy", "click", "rich", "pynvml", "msgspec", "yaml", "plotly", "jinja2", "pandas"]
    out = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def _cpu_ms(*args: str) -> float:
    """CPU time of a Python process, the best of nine: what it costs, however busy the machine is."""
    costs = []
    for _ in range(9):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *args], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3)
    return min(costs)


def test_import_time() -> None:
    extra = _cpu_ms("-c", "import tessera") - _cpu_ms("-c", "pass")
    assert extra <= 30, f"import tessera costs {extra:.1f} ms above bare Python"


def test_help_time() -> None:
    assert _cpu_ms("-m", "tessera", "--help") <= 150


def test_submodules_do_not_import_torch() -> None:
    code = "import sys, tessera.monitor, tessera.sensors.discover, tessera.cli.measure; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_what_the_docs_name_is_there_after_import_tessera() -> None:
    code = "import tessera; print(tessera.rewrite.checkpoint.__name__, tessera.actuators.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tessera.rewrite.checkpoint", "tessera.actuators"]
