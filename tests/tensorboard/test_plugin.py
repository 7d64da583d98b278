"""The TensorBoard plugin: a real TensorBoard over HTTP and in Chromium."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recordings import with_table
from tessera.profile.export import TensorBoard
from tessera.profile.runfile import RunFile
from tessera.tensorboard.compare import compare_runs
from tessera.tensorboard.runs import REFRESH_S, RunDirectory, parse_roots

from browser import chromium
from synthetic_run import EVIL, make

pytest.importorskip("tensorboard", minversion="2.21")

PLUGIN = "data/plugin/tessera"


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs as the exporter leaves them, one beside, one broken, and a secret next door."""
    top = tmp_path_factory.mktemp("logs")
    (top / "secret.tessera").write_text("not yours")
    root = top / "tb"
    for i, data_ms in enumerate((16.0, 2.0, 9.0)):
        made = make(steps=6, data_ms=data_ms, evil=i == 1, seed=i + 1)
        with made.write(top / f"run{i}.tessera", work={"token": 6 * 8192}) as run:
            TensorBoard(root / f"exp{i}").write(with_table(run, made.table))
            os.utime(next((root / f"exp{i}" / "plugins" / "tessera").iterdir()), (1000 + i, 1000 + i))
    (root / "broken.tessera").write_bytes(b"SQLite format 3\0 but no more")
    os.utime(root / "broken.tessera", (1, 1))
    (root / "out.tessera").symlink_to(top / "secret.tessera")
    return root


@contextmanager
def tensorboard(logdir: Path, *more: str) -> Iterator[str]:
    """A real TensorBoard, as `tensorboard` starts it; its address."""
    command = [sys.executable, "-W", "ignore", "-m", "tensorboard.main", "--port", "0", "--host", "127.0.0.1",
               "--load_fast", "false", *more, *([] if more else ["--logdir", str(logdir)])]  # fmt: skip
    log = logdir.parent / "tensorboard.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=logdir.parent)
    try:
        ends = time.monotonic() + 600
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < ends, log.read_text()
            time.sleep(0.1)
        yield found[0]
        assert "will become an error" not in log.read_text()  # TensorBoard's own check of the headers
    finally:
        server.terminate()
        server.wait(600)


@pytest.fixture(scope="module")
def served(logdir: Path) -> Iterator[str]:
    with tensorboard(logdir) as address:
        yield address


def get(address: str, **query: Any) -> tuple[int, dict[str, str], bytes]:
    full = f"{address}?{urllib.parse.urlencode(query, doseq=True)}" if query else address
    try:
        with urllib.request.urlopen(full, timeout=300) as reply:
            return reply.status, {k.lower(): v for k, v in reply.headers.items()}, reply.read()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, {k.lower(): v for k, v in exc.headers.items()}, exc.read()


def names(served: str) -> list[str]:
    return [row["run"] for row in json.loads(get(f"{served}{PLUGIN}/runs")[2])["runs"]]


# -- over HTTP ------------------------------------------------------------------------------------------------------


def test_the_entry_point_is_installed() -> None:
    (found,) = {e.value for e in importlib.metadata.entry_points(group="tensorboard_plugins") if e.name == "tessera"}
    assert found == "tessera.tensorboard.plugin:TesseraPlugin"


def test_tensorboard_finds_the_plugin_and_its_runs(served: str) -> None:
    listing = json.loads(get(f"{served}data/plugins_listing")[2])["tessera"]
    assert listing["enabled"] is True
    assert listing["tab_name"] == "Energy"
    assert listing["loading_mechanism"]["type"] == "IFRAME"
    status, headers, body = get(served.rstrip("/") + listing["loading_mechanism"]["module_path"])
    assert status == 200
    assert headers["content-type"].startswith("text/javascript")
    assert b"export const render" in body
    runs = names(served)
    assert [r.split("/")[0] for r in runs] == ["exp2", "exp1", "exp0", "broken"]  # newest first; not the link
    assert all("plugins" not in r for r in runs)


def test_the_page_is_that_of_the_report(served: str) -> None:
    run = names(served)[1]
    status, headers, body = get(f"{served}{PLUGIN}/page", run=run)
    text = body.decode()
    assert status == 200
    assert headers["x-content-type-options"] == "nosniff"
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'self'" in policy
    assert re.search(r"script-src 'sha256-[^']+';", policy)
    assert "'unsafe-inline'" not in policy.split("script-src")[1]
    assert "Power and what ran" in text
    assert EVIL not in text


@pytest.mark.parametrize("route", ["index.js", "index.css", "runs", "page?run=x", "compare?run=x"])
def test_every_answer_says_its_type(served: str, route: str) -> None:
    _, headers, _ = get(f"{served}{PLUGIN}/{route}")
    assert headers["x-content-type-options"] == "nosniff"
    assert "charset=utf-8" in headers["content-type"]


@pytest.mark.parametrize(
    "run",
    ["../secret", "../secret.tessera", "/etc/passwd", "out", "exp0/../../secret", "..%2Fsecret", "exp0\0", "",
     "%2e%2e/secret", "file:///etc/passwd", "exp0/plugins/tessera/../../../../secret"],
)  # fmt: skip
def test_nothing_outside_the_logdir_is_served(served: str, logdir: Path, run: str) -> None:
    for name in (run, str(logdir / run)):
        status, _, body = get(f"{served}{PLUGIN}/page", run=name)
        assert status == 404
        assert b"not yours" not in body
        said = json.loads(get(f"{served}{PLUGIN}/compare", run=name)[2])
        assert said["runs"] == []


@pytest.mark.parametrize(
    "path", ["../../../../secret.tessera", "%2e%2e/%2e%2e/secret.tessera", "static/index.js", "secret"]
)
def test_no_other_route_is_served(served: str, path: str) -> None:
    status, _, body = get(f"{served}{PLUGIN}/{path}")
    assert status == 404
    assert b"not yours" not in body


def test_only_reading_is_allowed(served: str) -> None:
    request = urllib.request.Request(f"{served}{PLUGIN}/runs", data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=300)
    with caught.value:
        assert caught.value.code == 405


def test_a_broken_run_says_why(served: str) -> None:
    status, headers, body = get(f"{served}{PLUGIN}/page", run="broken")
    assert status == 422
    assert b"cannot be shown" in body
    assert "default-src 'none'" in headers["content-security-policy"]


def test_runs_are_compared(served: str) -> None:
    runs = names(served)
    found = json.loads(get(f"{served}{PLUGIN}/compare", run=[runs[2], runs[1], runs[1], "broken", "none"])[2])
    assert [r["run"] for r in found["runs"]] == [runs[2], runs[1]]
    assert {f["run"] for f in found["failed"]} == {"broken", "none"}
    rows = {row["title"]: row["cells"] for row in found["rows"]}
    assert {"energy", "mean power", "time", "per step", "per token", "idle"} <= set(rows)
    first, other = rows["energy"]
    assert "±" in first["text"]
    assert "change" not in first
    assert other["better"] is True  # less waiting for data, fewer joules
    assert rows["steps/s"][1]["better"] is True
    assert rows["time"][1]["same"] is False
    assert sum(share for _, share, _ in found["runs"][0]["parts"]) == pytest.approx(1.0)


def write_trace(path: Path, steps: int, kernel_us: float) -> None:
    events = []
    for i in range(steps):
        at = 1000.0 * i
        step = {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{i}",
            "pid": 1,
            "tid": 1,
            "ts": at,
            "dur": 900,
        }
        kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": at + 10, "dur": kernel_us}
        events += [step, {**kernel, "args": {"device": 0, "stream": 7}}]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"baseTimeNanoseconds": 1_790_000_000_000_000_000, "traceEvents": events}))


def test_traces_have_names_that_people_know_and_only_what_is_alike_is_compared(tmp_path: Path) -> None:
    write_trace(tmp_path / "resnet" / "node7_4711.1790000000123456789.pt.trace.json", 5, 500.0)
    write_trace(tmp_path / "resnet" / "node7_4711.1790000060123.pt.trace.json", 5, 250.0)
    write_trace(tmp_path / "vit" / "rank0.pt.trace.json", 8, 500.0)
    runs = RunDirectory({"": tmp_path})
    first, second = "resnet/node7_4711 2026-09-21 14:13:20", "resnet/node7_4711 2026-09-21 14:14:20"
    assert set(runs.list()) == {first, second, "vit/rank0"}
    answers = [(name, runs.answer(runs.list()[name])) for name in (first, second, "vit/rank0")]
    found = compare_runs(answers)
    rows = {row["title"]: row["cells"] for row in found["rows"]}
    assert "energy" not in rows and found["runs"][0]["basis"] == "time only"
    assert "change" in rows["time"][1] and "change" not in rows["time"][2]  # 5 and 8 steps
    assert "change" in rows["steps/s"][2] and rows["idle time"][1]["better"] is False
    assert any("5 and 8 steps" in note for note in found["notes"])


def test_runs_whose_power_is_known_differently_are_not_compared_by_joules(logdir: Path) -> None:
    runs = RunDirectory({"": logdir})
    name = next(name for name in runs.list() if name.startswith("exp0"))
    measured = runs.answer(runs.list()[name])
    modelled = dataclasses.replace(measured, basis="modelled", device="another")
    found = compare_runs([("a", measured), ("b", modelled)])
    rows = {row["title"]: row["cells"] for row in found["rows"]}
    assert "change" not in rows["energy"][1] and "change" not in rows["per step"][1]
    assert "change" in rows["time"][1] and "change" in rows["steps/s"][1]
    assert len(found["notes"]) == 2


def test_an_empty_logdir(tmp_path: Path) -> None:
    empty = tmp_path / "nothing"
    empty.mkdir()
    with tensorboard(empty) as address:
        assert json.loads(get(f"{address}data/plugins_listing")[2])["tessera"]["enabled"] is False
        assert json.loads(get(f"{address}{PLUGIN}/runs")[2]) == {"runs": [], "looked_in": [str(empty)]}
        with chromium() as window:
            window.open(f"{address}data/plugin_entry.html?name=tessera", "document.querySelector('h1')")
            assert "No Tessera runs yet" in window.js("return document.body.innerText")
            assert str(empty) in window.js("return document.body.innerText")
            assert [line for line in window.console() if "favicon" not in line] == []  # TensorBoard's, opened like this
            window.shot("tensorboard_empty")


# -- without a server -----------------------------------------------------------------------------------------------


def test_a_listing_is_used_for_some_seconds(tmp_path: Path) -> None:
    now = [0.0]
    runs = RunDirectory({"": tmp_path}, clock=lambda: now[0])
    assert runs.list() == {}
    make(steps=1).write(tmp_path / "a.tessera").close()
    assert runs.list() == {}
    now[0] = REFRESH_S + 1
    assert list(runs.list()) == ["a"]


def test_a_page_is_made_once_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tessera.tensorboard.runs as module

    made = []
    monkeypatch.setattr(module, "page", lambda *a, **k: made.append(1) or "page")
    make(steps=1).write(tmp_path / "a.tessera").close()
    now = [0.0]
    runs = RunDirectory({"": tmp_path}, clock=lambda: now[0])
    for _ in range(3):
        runs.page(runs.list()["a"])
    assert len(made) == 1
    os.utime(tmp_path / "a.tessera", (5, 5))
    now[0] = 60.0
    runs.page(runs.list()["a"])
    assert len(made) == 2


def test_where_runs_are_looked_for(tmp_path: Path) -> None:
    assert parse_roots("runs") == {"": Path("runs")}
    spec = SimpleNamespace(logdir_spec="a:/x/y, b:/z")
    assert parse_roots("", spec) == {"a": Path("/x/y"), "b": Path("/z")}
    assert parse_roots(None, SimpleNamespace(logdir_spec="/x")) == {"0": Path("/x")}
    assert parse_roots(None) == {}
    assert RunDirectory({"": tmp_path / "gone"}).list() == {}


def test_a_run_below_the_logdir_is_not_copied(tmp_path: Path) -> None:
    made = make(steps=1)
    with made.write(tmp_path / "a.tessera") as run:
        TensorBoard(tmp_path).write(with_table(run, made.table))
        assert list(RunDirectory({"": tmp_path}).list()) == ["a"]
        TensorBoard(tmp_path / "other").write(with_table(run, made.table))
    (copy,) = (tmp_path / "other").rglob("*.tessera")
    with RunFile(copy) as copied:
        assert not copied.crashed
        assert len(copied.timeline()) == len(made.timeline)


# -- in a browser ---------------------------------------------------------------------------------------------------


def test_the_tab_in_chromium(served: str) -> None:
    with chromium(1400, 1000) as window:
        window.open(f"{served}#tessera", "document.querySelector('iframe')", 60)
        driver = window.driver
        driver.switch_to.frame(driver.find_element("css selector", "iframe"))
        window.wait("document.querySelector('nav select')", 60)
        assert window.js("return document.querySelectorAll('option').length") == 4
        window.wait("document.querySelector('iframe').contentWindow.performance"
                    ".getEntriesByName('tessera-first-plot').length", 60)  # fmt: skip
        inner = window.js("return document.querySelector('iframe').contentDocument.body.innerText")
        assert "Power and what ran" in inner
        driver.switch_to.default_content()
        window.shot("tensorboard_report")
        driver.switch_to.frame(driver.find_element("css selector", "iframe"))
        driver.find_element("id", "view-compare").click()
        window.wait("document.querySelector('#totals')", 60)
        assert "within the intervals" in window.js("return document.body.innerText")
        assert "energy" in window.js("return document.querySelector('#totals').innerText")
        driver.switch_to.default_content()
        window.shot("tensorboard_compare")
        # TensorBoard's own page asks Google for fonts and complains that it may not: that is not ours.
        assert [line for line in window.console() if "plugin/tessera" in line or "plugin_entry" in line] == []
        asked = {urllib.parse.urlsplit(url).path for url in window.requests() if "plugin/tessera" in url}
        assert f"/{PLUGIN}/compare" in asked
