"""Shell completion, asked as a shell asks: by click's protocol, and in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.analyze import KINDS
from tessera.cli.main import COMMANDS
from tessera.hardware import catalogue

BIN = Path(sys.executable).parent


def offered(line: str, program: str = "tessera") -> list[str]:
    """What is offered for the last word of a line."""
    words = line.split(" ")
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), variable: "bash_complete"}
    done = subprocess.run([BIN / program], env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    return [item.split(",", 1)[1] for item in done.stdout.splitlines() if item]


def test_commands() -> None:
    assert offered("tessera ") == list(COMMANDS)
    assert offered("tessera me") == ["measure", "merge", "metrics"]
    assert offered("tessera hardware s") == ["show"]


def test_options_and_their_choices() -> None:
    assert {"--on", "--optimizer"} == set(offered("tessera predict --o"))
    assert offered("tessera predict m --mode t") == ["train"]
    assert offered("tessera completion ") == ["bash", "zsh", "fish"]
    assert "--sample-ms" in offered("tessera-prof --s", "tessera-prof")


def test_chips_of_the_catalogue() -> None:
    assert offered("tessera hardware show ") == list(catalogue())
    assert offered("tessera hardware show jetson-orin-") == ["jetson-orin-nano"]
    assert "a100" in offered("tessera predict m --on a1")
    assert offered("tessera predict m --on h200,h200-n") == ["h200,h200-nvl"]
    assert "h200,h200" not in offered("tessera predict m --on h200,h2"), "one that is there is not offered again"
    assert "h200" in offered("tessera analyze roofline t --arch h2")


def test_analyses_and_sensors() -> None:
    assert offered("tessera analyze ") == list(KINDS)
    assert offered("tessera analyze critical-") == ["critical_path"]
    assert offered("tessera measure --sensor r") == ["rapl", "redfish", "replay:"]


def test_a_broken_file_of_the_users_offers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tessera" / "hardware"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text("id =")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert offered("tessera hardware show h") == []


def script(shell: str) -> str:
    return subprocess.run([BIN / "tessera", "completion", shell], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_for_both_programs(shell: str) -> None:
    text = script(shell)
    assert "_TESSERA_COMPLETE" in text
    assert "_TESSERA_PROF_COMPLETE" in text


def test_bash_completes(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    (tmp_path / "tessera.bash").write_text(script("bash"))
    typed = 'COMP_WORDS=(tessera hardware show gb); COMP_CWORD=3; _tessera_completion tessera; echo "${COMPREPLY[@]}"'
    path = f"{BIN}:{os.environ['PATH']}"
    done = subprocess.run(
        [bash, "--norc", "-c", f"source tessera.bash; {typed}; complete -p tessera-prof"],
        cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split()[0] == "gb200", done.stderr
    assert "_tessera_prof_completion" in done.stdout


def test_commands_are_offered_without_importing_them() -> None:
    code = (
        "import sys, click; from tessera.cli.main import cli; cli.shell_complete(click.Context(cli), '');"
        "print([m for m in sys.modules if m.startswith('tessera.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['tessera.cli.failures', 'tessera.cli.options', 'tessera.cli.main']"
