"""The documentation is true: its blocks run as they stand, its commands exist, it builds.

A page's blocks run in their order, in one folder. A block with a title is saved under it, other Python runs in this
process with a sensor of known watts, shell runs in bash. A comment "not run by the tests: why" above a block skips it.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from tessera import monitor
from tessera.cli.main import COMMANDS, cli
from tessera.hardware import lookup
from tessera.record import CAPABILITY, Record
from tessera.runtime import control_loop

from fakes.sensor import ScriptSensor

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDES = ("guides/performance.md", "guides/energy.md", "guides/counters.md")
RUN = ("tutorial.md", *(f"howto/{p.name}" for p in sorted((DOCS / "howto").glob("*.md"))), *GUIDES)
WRITTEN = (*RUN, "index.md")
HERE = ("report", "analyze", "diff", "predict", "hardware", "policy", "attribute", "export", "plan")
BLOCK = re.compile(
    r"(?:<!-- not run by the tests: (?P<why>[^>]+) -->\n)?"
    r"^```(?P<kind>\w+)(?P<rest>[^\n]*)\n(?P<body>.*?)^```",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """One fenced block of a page."""

    kind: str
    title: str | None
    body: str
    skipped: str | None


def blocks(text: str) -> Iterator[Block]:
    for found in BLOCK.finditer(text):
        title = re.search(r'title="([^"]+)"', found["rest"])
        yield Block(found["kind"], title[1] if title else None, found["body"], found["why"])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the examples in it, which is also the home of the user; power is known to this process."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("TESSERA_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(control_loop, "_loop", None)
    watching = monitor.Monitor([ScriptSensor(lambda t: 300.0, clock=time.monotonic_ns)]).start()
    monitor.use(watching)
    before = set(sys.modules)
    yield tmp_path
    control_loop.get_loop().stop()
    if control_loop.get_loop()._thread is not None:
        control_loop.get_loop()._thread.join(5.0)
    monitor.use(None)
    watching.stop()
    for name in set(sys.modules) - before:  # a page's own modules are not the next page's
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", RUN)
def test_blocks_run_as_they_stand(page: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # other tests may run beside this one
    names: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks((DOCS / page).read_text(encoding="utf-8")):
        if block.skipped is not None or block.kind in ("text", "yaml"):
            continue
        if block.title is not None:
            path = Path(block.title).expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
        elif block.kind == "python":
            exec(compile(block.body, page, "exec"), names)
        else:
            assert block.kind == "sh", f"{page} has a block of {block.kind} that nobody runs"
            code = _run_shell(block.body)
            out = capfd.readouterr()
            assert code == 0, f"{page}:\n{block.body}\n{out.out}\n{out.err}"
    _check(page, names, here)


def _run_shell(text: str) -> int:
    """The exit code of a shell block. Commands that only read files or predict are called in this process, which has
    torch: the same code, without an interpreter's start for each."""
    lines = [shlex.split(line) for line in text.replace("\\\n", " ").strip().splitlines() if line.strip()]
    if re.search(r"[|&;<>$*`#{(~]", text) or any(line[:1] != ["tessera"] or line[1] not in HERE for line in lines):
        return subprocess.run(["bash", "-euo", "pipefail", "-c", text], timeout=900, check=False).returncode
    for _, *words in lines:
        try:
            cli.main(words, prog_name="tessera")
        except SystemExit as exc:
            if exc.code:
                return int(exc.code)
    return 0


def _check(page: str, names: dict[str, Any], folder: Path) -> None:
    """What a reader would look at after the last block."""
    if page == "tutorial.md":
        assert (folder / "runs" / "train.html").stat().st_size > 10_000
        assert (folder / "runs" / "after.tessera").is_file()
        assert names["report"].total_energy_j > 0
    elif page == "howto/sensor.md":
        energy = names["energy"]
        assert energy.joules == pytest.approx(42.0, rel=0.1) and energy.source == "plug"
    elif page == "howto/power-cap.md":
        assert names["step"].report().cap.power_w == 275.0
        assert any("275 W" in action for action in names["planned"].actions())
    elif page == "howto/device.md":
        assert 0 < names["report"].average_power_w <= 350.0
    elif page == "howto/ci-gate.md":
        assert json.loads((folder / "now.json").read_text())
    elif page == "howto/hardware.md":
        assert (folder / "sweep.html").stat().st_size > 10_000


@pytest.mark.parametrize("page", WRITTEN)
def test_every_command_and_option_exists(page: str) -> None:
    context = click.Context(cli)
    text = (DOCS / page).read_text(encoding="utf-8")
    inline = re.findall(r"`(tessera [^`\n]+)`", text)
    shell = [
        line for b in blocks(text) if b.kind in ("sh", "yaml") for line in b.body.splitlines() if "tessera " in line
    ]
    for line in [*inline, *(s[s.index("tessera ") :] for s in shell)]:
        words = shlex.split(line.split("#")[0].split("|")[0].split(" -- ")[0])
        if words[1] == "--config":  # of tessera itself, with a value
            del words[1:3]
        assert words[1] in COMMANDS, f"{page}: {line}"
        command = cli.get_command(context, words[1])
        assert command is not None
        if isinstance(command, click.Group) and words[2:3] and words[2] in command.commands:
            command = command.commands[words[2]]
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        script = next((i for i, w in enumerate(words) if w.endswith(".py")), len(words))  # what follows is the script's
        assert {w for w in words[:script] if w.startswith("--")} <= known, f"{page}: {line}"


def test_the_guide_quotes_the_catalogue() -> None:
    """Joules per operation and byte are those predictions use for an H200."""
    text = (DOCS / "guides/energy.md").read_text(encoding="utf-8")
    figures = lookup("h200").energy
    for name, unit in (("matmul_bf16", "FLOP"), ("matmul_tf32", "FLOP"), ("matmul_fp32", "FLOP"), ("stream", "byte")):
        value = figures[f"{name}_j_per_{unit.lower()}"].value * 1e12
        assert re.search(rf"{value:.3g}0? pJ/{unit}", text), f"{name}: {value:.3g} pJ/{unit}"


# -- guides -----------------------------------------------------------------------------------------------------


def test_the_counter_guide_has_every_counter_and_only_those() -> None:
    text = (DOCS / "guides/counters.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE)) | set(
        re.findall(r"^\| `\w+`, `(\w+)`", text, re.MULTILINE)
    )
    named |= {
        n for row in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE) for n in re.findall(r"\w+", row)
    }
    fields = set(Record.__struct_fields__)
    assert named <= fields
    assert set(CAPABILITY) | {"stall_reasons", "memcpy_gbps", "collective_overlap_pct"} <= named


def test_ncu_names_in_the_guide_are_those_we_read() -> None:
    from tessera.profile.counters.nvidia import STALL_METRICS, TABLE

    text = (DOCS / "guides/counters.md").read_text(encoding="utf-8")
    ours = {m.partition(".")[0] for m in (*TABLE, *STALL_METRICS)}
    quoted = set(re.findall(r"`((?:smsp?|l1tex|lts|dram|gpu|launch)__\w+)", text))
    assert quoted and quoted <= ours


def test_nothing_is_copied_from_the_seed_guides() -> None:
    """Their sentences are not ours: no run of eight words is the same. The seeds lie beside the checkout, not in it."""
    folder = ROOT.parent / "shared" / "seeds"
    if not folder.is_dir():
        pytest.skip("the seed guides are not on this machine")
    seeds = {run for p in folder.glob("*.txt") for run in _runs(p.read_text(encoding="utf-8", errors="replace"))}
    written = [*(DOCS / p for p in WRITTEN), *(ROOT / "examples/exercises").rglob("*.md")]
    prose = {
        p: re.sub(r"^```.*?^```|`[^`]*`", "", p.read_text(encoding="utf-8"), flags=re.DOTALL | re.M) for p in written
    }
    assert not {f"{p.name}: {' '.join(run)}" for p, text in prose.items() for run in _runs(text) if run in seeds}


def _runs(text: str, length: int = 8) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"[A-Za-z0-9'-]+", text.lower())
    return (tuple(words[i : i + length]) for i in range(len(words) - length + 1))


# -- the site ---------------------------------------------------------------------------------------------------


def test_the_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs mkdocs-material: make docs installs it")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "-q",
        "--strict",
        "-f",
        f"{ROOT}/mkdocs.yml",
        "-d",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= 25
    fetched = re.compile(
        r"<(?:script|img|iframe|source)[^>]+src=[\"']https?:|<link[^>]+href=[\"']https?:|@import|url\(https?:"
    )
    for page in pages:
        found = fetched.search(page.read_text(encoding="utf-8"))
        assert found is None, f"{page.name} fetches {found[0]}"
    reference = (tmp_path / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("energy_scope", "predict", "schedule", "flash_attention", "EnergyCallback", "Record", "async_"):
        assert name in reference
    commands = (tmp_path / "reference" / "cli.html").read_text(encoding="utf-8")
    assert all(f'id="tessera-{name}"' in commands for name in (*COMMANDS, "prof"))


@pytest.mark.parametrize("name", ["", ".monitor", ".profile", ".analyze", ".estimate", ".op", ".memcpy", ".hardware"])
def test_the_reference_has_every_public_name(name: str) -> None:
    text = (DOCS / "reference/python.md").read_text(encoding="utf-8").lower()  # profile.chrome is the class Chrome
    public = set(importlib.import_module(f"tessera{name}").__all__) - {"__version__"}
    assert not {n for n in public if not re.search(rf"\b{n.lower()}\b", text)}


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = nav[nav.index("\nnav:") :]
    pages = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if not p.name.startswith("_part_")}
    assert not {p for p in pages if p not in nav}


def test_every_file_that_is_named_exists() -> None:
    """`runtime/controller.py` in a text is a file: of the package, of the docs or of the repository."""
    places = (ROOT, ROOT / "src/tessera", ROOT / "benchmarks", ROOT / "tests", DOCS)
    outside = {"shared/design.md"}  # the brief, which lies beside the developers' checkouts
    missing = []
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for name in set(re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|md|toml|json))`", page.read_text())) - outside:
            if not any((place / name).exists() for place in (*places, page.parent)):
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert not missing
