"""The package as a user gets it: an sdist that builds itself, and a wheel that works in an empty venv."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(sysconfig.get_path("purelib"))
DATA = (
    "py.typed", "report/grafana.json", "report/templates/run.css", "report/templates/page.js",
    "tensorboard/static/index.js", "tensorboard/static/index.css", "hardware/catalog/h200.toml",
    "estimate/data/h200_gemm.json", "estimate/data/host.json",
)  # fmt: skip
HOOK = "import sys; from hatchling.build import build_{0} as b; print(b(sys.argv[1]))"

ROOMS_WITH_EXTRAS = {
    "dist", "estimate", "fleet", "graph", "op", "rewrite", "runtime", "tensorboard", "integrations", "selftest",
    "pytest_plugin",
}  # fmt: skip


def run(*argv: str | Path, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command with nothing of this checkout in its environment."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV") and not k.startswith("TESSERA_")
    }
    return subprocess.run(argv, cwd=cwd, env={**kept, **environ}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where hatchling is: in this environment, or fetched from the registry."""
    if importlib.util.find_spec("hatchling"):
        return str(SITE)
    folder = tmp_path_factory.mktemp("hatchling")
    done = run(sys.executable, "-m", "pip", "install", "-q", "--target", folder, "hatchling>=1.24")
    if done.returncode:
        pytest.skip(f"hatchling is not installed and cannot be fetched: {done.stderr.strip().splitlines()[-1][:200]}")
    return str(folder)


@pytest.fixture(scope="module")
def sdist(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    done = run(sys.executable, "-c", HOOK.format("sdist"), folder, cwd=ROOT, PYTHONPATH=backend)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(sdist: Path, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked sdist, where nothing else is."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = (p for p in folder.iterdir() if p.is_dir())
    done = run(sys.executable, "-c", HOOK.format("wheel"), folder, cwd=source, PYTHONPATH=backend)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin of a venv with the wheel and the dependencies it declares, linked from this environment; nothing more."""
    home = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        name = next(n for n in archive.namelist() if n.endswith("/METADATA"))
        needs = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
        scripts = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    for top in sorted(set(_tops(needs))):
        (site / top).symlink_to(SITE / top)
    for program, module, function in re.findall(r"^(tessera[\w-]*) = ([\w.]+):(main)$", scripts, re.MULTILINE):
        file = home / "bin" / program
        file.write_text(f"#!{home}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
        file.chmod(0o755)
    return home / "bin"


def _tops(requirements: list[str], seen: set[str] | None = None) -> Iterator[str]:
    """What lies in site-packages of distributions and of all they need."""
    seen = set() if seen is None else seen
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        if name is None or "extra ==" in requirement or name[0].lower() in seen:
            continue
        seen.add(name[0].lower())
        try:
            found = metadata.distribution(name[0])
        except metadata.PackageNotFoundError:
            continue  # for another platform
        for file in found.files or ():
            if file.parts[0] not in ("..", "__pycache__") and (SITE / file.parts[0]).exists():
                yield file.parts[0]
        yield from _tops(found.requires or [], seen)


def test_the_sdist_has_the_sources_and_nothing_of_this_machine(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = {m.name.split("/", 1)[1] for m in members if "/" in m.name}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/tessera/__init__.py", "tests/test_packaging.py"} <= names
    wrong = [n for n in names if re.search(r"__pycache__|\.pyc$|^\.venv|^runs/|\.tessera$|\.egg-info|(^|/)\.env", n)]
    assert not wrong
    assert all(m.isfile() or m.isdir() for m in members), "a link may lead out of the folder"
    assert sdist.stat().st_size < 20 << 20


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = ROOT / "src" / "tessera"
    files = [p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert {f"tessera/{p.relative_to(package).as_posix()}" for p in files} <= names
    assert {f"tessera/{name}" for name in DATA} <= names
    assert {n.split("/")[0] for n in names} == {"tessera", wheel.name.rsplit("-", 3)[0] + ".dist-info"}, (
        "tests stay out"
    )
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_it_works_without_the_repository_and_without_torch(bare: Path, tmp_path: Path) -> None:
    code = "import sys, tessera; print(tessera.__file__); import torch"
    found = run(bare / "python", "-c", code, cwd=tmp_path)
    assert str(bare.parent) in found.stdout
    assert "No module named 'torch'" in found.stderr, "the venv is not bare"
    for program in ("tessera", "tessera-prof"):
        helped = run(bare / program, "--help", cwd=tmp_path)
        assert (helped.returncode, helped.stdout[:6]) == (0, "Usage:"), helped.stderr


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("predict resnet18 --on h200", 1, "pip install torch, or in the clone: pip install '.[torch]'"),
        ("calibrate", 1, "pip install torch, or in the clone: pip install '.[torch]'"),
        ("metrics --once", 1, "pip install prometheus_client"),
        ("hardware list", 0, "h200"),
        ("hardware show h200", 0, "141"),
        ("metrics --dashboard", 0, "tessera"),
        ("measure --sensor modelled true", 0, "modelled"),
        ("watch --sensor modelled --once", 0, "cpu0"),
        ("completion zsh", 0, "compdef"),
        ("run --out run.tessera script.py", 0, "run.html"),
        ("report run.tessera --html run.html", 0, "tessera"),
        ("export run.tessera --chrome trace.json", 0, "trace.json"),
    ],
)
def test_commands_without_any_extra(bare: Path, script: Path, command: str, code: int, said: str) -> None:
    done = run(bare / "tessera", *command.split(), cwd=script)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program that knows tessera, and no torch; the commands run in it one after the other."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "script.py").write_text(
        "from tessera import profile\nwith profile.region('work'):\n    sum(range(10**6))\n"
    )
    return folder


def test_every_module_is_importable_or_says_what_it_needs(bare: Path, tmp_path: Path) -> None:
    """Modules that import an extra at their top are those nobody reaches without it."""
    code = (
        "import importlib, json, pkgutil, tessera\nfound = {}\n"
        "for m in pkgutil.walk_packages(tessera.__path__, 'tessera.', onerror=lambda n: None):\n"
        "    if not m.name.endswith('__main__'):\n"
        "        try: importlib.import_module(m.name)\n"
        "        except ImportError as e: found[m.name] = getattr(e, 'name', None) or str(e)\n"
        "public = [getattr(tessera, n) for n in tessera.__all__]\nprint(json.dumps(found))\n"
    )
    done = run(bare / "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    missing = {name for name in found.values() if not name.startswith("tessera")}
    extras = {"torch", "tensorboard", "triton", "pytest", "numba", "ray"}
    assert all(m in extras or "needs the package" in m for m in missing), missing
    rooms = {name.split(".")[1] for name in found}
    assert rooms <= ROOMS_WITH_EXTRAS, found
