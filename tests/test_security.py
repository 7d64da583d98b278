"""What others wrote into a file, and what must not get out: markup, paths, pickles, open ports, secrets."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tessera
from tessera import analyze, profile
from tessera.analyze.answer import answer
from tessera.analyze.correlate import correlate
from tessera.cli.main import main
from tessera.errors import ArgumentError, TesseraError
from tessera.profile.open_recording import open_recording
from tessera.profile.runfile import RunFile
from tessera.profile.runfile_checksum import unseal
from tessera.recording import Recording

from synthetic_run import make

SOURCE = Path(tessera.__file__).parent
# Out of a script, out of an element, out of an attribute of either quote, and what a page could take for its own.
EVIL = "</script></style><xss>'\" xssattr=1 x='\"><!--`${1}\u2028&lt;xss&gt;"
SECRET = "hunter2-correct-horse"


# -- markup ---------------------------------------------------------------------------------------------------------


def _evil(value: Any, evil: str) -> Any:
    """Every string of a JSON value with the markup behind it, keys of objects left as they are."""
    if isinstance(value, str):
        return value + evil
    if isinstance(value, list):
        return [_evil(v, evil) for v in value]
    return {k: _evil(v, evil) for k, v in value.items()} if isinstance(value, dict) else value


KEPT = ("hold", "basis", "kind", "mode", "scope")  # of a few words each: others are refused when they are read


def _evil_json(text: str, evil: str) -> str:
    value = json.loads(text)
    found = _evil(value, evil)
    if isinstance(value, dict):
        found |= {k: v for k, v in value.items() if k in KEPT}
    return json.dumps(found)


def infested(path: Path, evil: str) -> Path:
    """A run in which every text that a program, a driver or another tool could have put there ends in `evil`."""
    facts = {"host": "node7", "device": "H200", "notes": ["a note"], "work": {"token": 8}, "odd": {"k": ["v"]}}
    make(steps=4, layers=2).write(path, **facts).close()
    unseal(path)
    with sqlite3.connect(path) as db:
        db.create_function("evil", 1, lambda text: _evil_json(text, evil))
        db.execute("UPDATE names SET text = text || ?", (evil,))
        db.execute("UPDATE facts SET value = evil(value)")
        db.execute("UPDATE about SET value = value || ? WHERE key NOT LIKE '%_ns' AND key != 'pid'", (evil,))
        db.execute("UPDATE domains SET value = evil(value), name = name || ?", (evil,))
        db.execute("UPDATE telemetry SET domain = domain || ?", (evil,))
        db.execute("INSERT INTO gaps VALUES (?, 1790000000000000000, 1790000000010000000, ?)", ("gpu0" + evil, evil))
    db.close()
    return path


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return infested(tmp_path_factory.mktemp("evil") / "run.tessera", EVIL)


class Page(HTMLParser):
    """What a browser would make of a text: elements, names of attributes, and the text of it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def harmless(text: str) -> None:
    page = Page(text)
    assert "xss" not in page.tags
    assert "xssattr" not in page.attributes
    assert not {a for a in page.attributes if a.startswith("on")}, "no handlers in attributes: the policy forbids them"
    assert "</script><" not in re.sub(r"</script>(?=\s*(<|$))", "", text)
    assert "<xss>" in "".join(page.text) or "\\u003cxss>" in text, "the names are not in the page at all"


def read(path: Path) -> tuple[Recording, Any, Any]:
    recording = open_recording(path)
    return recording, recording.energy(), answer(recording)


def test_the_page_of_a_run(evil: Path) -> None:
    from tessera.report.run_html import page

    run, table, said = read(evil)
    found = correlate(run.timeline, run.power, telemetry=run.telemetry)
    text = page(run, result=said)
    harmless(text)
    harmless(found._repr_html_())
    harmless(table._repr_html_())
    run.close()


def test_the_page_of_a_difference(evil: Path, tmp_path: Path) -> None:
    from tessera.report.diff_html import page

    make(steps=4, layers=2, data_ms=12.0).write(tmp_path / "a.tessera").close()
    found = analyze.diff(tmp_path / "a.tessera", evil)
    harmless(page(found, verdict=found.verdict(None, 0.05)))
    harmless(found._repr_html_())


@pytest.mark.parametrize("kind", ["breakdown", "kernels", "overlap", "memcpy", "critical_path", "power", "advise"])
def test_the_table_of_an_analysis(evil: Path, kind: str) -> None:
    text = getattr(analyze, kind)(evil)._repr_html_()
    page = Page(text)
    assert "xss" not in page.tags
    assert "xssattr" not in page.attributes


def test_the_page_of_a_prediction(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tessera.report.predict_html import page

    class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<xss>' xssattr=1 \"><xss>", torch.nn.Linear(64, 64))

        def forward(self, x: Any) -> Any:
            for child in self.children():
                x = child(x)
            return x

    Block.__name__ = Block.__qualname__ = EVIL.replace(".", "")
    report = tessera.predict(Block(), torch.empty(4, 64), on="h200")
    harmless(page(report))
    harmless(report._repr_html_())


def test_what_tensorboard_is_served(evil: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", minversion="2.21")
    from werkzeug.test import Client

    from tessera.tensorboard.plugin import TesseraPlugin

    folder = tmp_path / "logs" / "a<xss>'b"
    folder.mkdir(parents=True)
    (folder / "run.tessera").write_bytes(evil.read_bytes())
    (folder / "broken<xss>.tessera").write_bytes(b"nothing")
    (tmp_path / "secret.tessera").write_bytes(evil.read_bytes())
    apps = TesseraPlugin(SimpleNamespace(logdir=str(tmp_path / "logs"), flags=None)).get_plugin_apps()
    listed = Client(apps["/runs"]).get("/runs")
    assert listed.content_type.startswith("application/json")
    names = [run["run"] for run in json.loads(listed.text)["runs"]]
    assert sorted(names) == ["a<xss>'b/broken<xss>", "a<xss>'b/run"]
    served = Client(apps["/page"]).get("/page", query_string={"run": "a<xss>'b/run"})
    harmless(served.text)
    assert "default-src 'none'" in served.headers["Content-Security-Policy"]
    assert served.headers["X-Content-Type-Options"] == "nosniff"
    sorry = Client(apps["/page"]).get("/page", query_string={"run": "a<xss>'b/broken<xss>"})
    assert (sorry.status_code, "<xss>" in sorry.text) == (422, False)
    for trick in ("../secret", "..%2fsecret", "/etc/passwd", "a<xss>'b/../../secret", str(tmp_path / "secret"), "\x00"):
        answered = Client(apps["/page"]).get("/page", query_string={"run": trick})
        assert answered.status_code == 404, trick


ESCAPES = "\x1b]0;pwned\x07\x1b[31m\x9b31m\r"


@pytest.mark.parametrize(
    "words",
    [
        "report b.tessera", "report b.tessera --by kernels", "analyze kernels b.tessera", "analyze advise b.tessera",
        "diff a.tessera b.tessera", "merge a.tessera b.tessera -o c.tessera", "export b.tessera --csv out.csv",
        "attribute b.tessera --power b.tessera", "analyze roofline b.tessera --arch \x1b[31m",
    ],
)  # fmt: skip
def test_a_name_cannot_command_the_terminal(
    words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(steps=4, layers=2, data_ms=12.0).write(tmp_path / "a.tessera").close()
    infested(tmp_path / "b.tessera", ESCAPES)
    with pytest.raises(SystemExit):
        main(words.split())
    out, err = capfd.readouterr()
    assert out + err
    assert not re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out + err)


def test_no_script_of_ours_makes_markup_of_text() -> None:
    scripts = list(SOURCE.rglob("*.js"))
    assert len(scripts) >= 3
    for script in scripts:
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script.read_text()
        )
        assert not found, (script.name, found)


# -- paths ----------------------------------------------------------------------------------------------------------

TRICKS = ("../../out", "/etc/out", "..\\out", "a/../../out", ".hidden", "")


def files_below(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_exporters_write_where_they_were_told(evil: Path, tmp_path: Path) -> None:
    """Names in a run, its host among them, are no part of any path."""
    (tmp_path / "in").mkdir()
    run = tmp_path / "in" / "run.tessera"
    run.write_bytes(evil.read_bytes())
    with sqlite3.connect(run) as db:
        db.execute("UPDATE about SET value = '../../../host' WHERE key = 'host'")
        db.execute("UPDATE names SET text = '../../../etc/' || text")
    db.close()
    target = tmp_path / "out" / "deep" / "er"
    with RunFile(run) as source:
        profile.chrome(target / "trace.json").write(source.recording())
        profile.summary(target / "summary.csv").write(source.recording())
        pytest.importorskip("tensorboard")
        profile.tensorboard(target / "tb").write(source.recording())
    written = files_below(tmp_path)
    assert {w for w in written if not w.startswith("out/deep/er/")} == {"in/run.tessera"}
    assert len(written) >= 5


@pytest.mark.parametrize("trick", TRICKS)
def test_a_calibration_is_named_by_its_device_alone(trick: str) -> None:
    from tessera.estimate import calibration

    try:
        path = calibration.path_of(trick)
    except ArgumentError:
        return
    assert path.parent == calibration.folder()


@pytest.mark.parametrize("trick", TRICKS)
def test_a_run_is_named_within_its_folder(trick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tessera.profile.session import default_path

    monkeypatch.chdir(tmp_path)
    try:
        path = default_path(Path(trick).stem or "run")  # as `tessera run` names it
    except (TesseraError, ValueError):
        return
    assert path.resolve().is_relative_to(tmp_path / "runs")


# -- what is executed -----------------------------------------------------------------------------------------------

FORBIDDEN = {
    "pickle": "a file of somebody's could run code", "marshal": "the same", "shelve": "a pickle", "dill": "a pickle",
    "joblib": "a pickle",
}  # fmt: skip
RUNS_CODE = {"profile/launch.py"}  # `tessera run SCRIPT`: it is what the user asked for


def test_nothing_is_unpickled_or_evaluated() -> None:
    seen = 0
    for path in SOURCE.rglob("*.py"):
        seen += 1
        name = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not {a.name.split(".")[0] for a in node.names} & set(FORBIDDEN), name
            elif isinstance(node, ast.ImportFrom) and not node.level:
                is_exception = node.module == "pickle" and [a.name for a in node.names] == ["PickleError"]
                assert is_exception or (node.module or "").split(".")[0] not in FORBIDDEN, name
            elif isinstance(node, ast.Call):
                _check_call(node, name)
    assert seen > 100


def _check_call(node: ast.Call, name: str) -> None:
    called = _dotted(node.func)
    keywords = {k.arg: getattr(k.value, "value", "?") for k in node.keywords}
    if called in ("eval", "exec"):
        assert name in RUNS_CODE, f"{name}: {called}"
    if called == "torch.load":
        assert keywords.get("weights_only") is True, name
    assert not keywords.get("allow_pickle"), name
    assert not keywords.get("shell"), f"{name}: a shell"
    assert not called.startswith("yaml.") or called in ("yaml.safe_load", "yaml.SafeLoader"), (
        f"{name}: {called} may build objects"
    )
    assert called not in ("os.system", "os.popen", "tempfile.mktemp"), name


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


# -- ports ----------------------------------------------------------------------------------------------------------


def test_only_the_exporter_listens_and_on_loopback() -> None:
    """Where a socket is bound in the package: the metrics server, the governor, and the local socket of attach."""
    bound = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"\.bind\(|HTTPServer|socketserver|create_server|\.listen\(", path.read_text(encoding="utf-8"))
    }
    assert bound <= {
        "cli/metrics.py", "report/metrics.py", "profile/attach/daemon.py", "fleet/governor/serve.py",
    }, bound  # fmt: skip
    from tessera.cli import metrics

    listen = next(p for p in metrics.command.params if p.name == "listen")
    assert metrics.Address.parse(str(listen.default)).loopback


def test_the_exporter_cannot_be_reached_from_elsewhere() -> None:
    pytest.importorskip("prometheus_client")
    from tessera.report import metrics as report

    with report.bind(socket.AF_INET, ("127.0.0.1", 0)) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        with socket.socket() as other:
            other.settimeout(1.0)
            outside = _own_address()
            if outside is not None:
                with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
                    other.connect((outside, server.server_port))


def _own_address() -> str | None:
    """An address of this machine that is not its loopback; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        found = str(probe.getsockname()[0])
        return None if found.startswith("127.") else found


# -- secrets --------------------------------------------------------------------------------------------------------


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TESSERA_REDFISH_PASSWORD", "AWS_SECRET_ACCESS_KEY", "OTEL_EXPORTER_OTLP_HEADERS", "MY_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("TESSERA_SENSORS", "modelled")


def test_the_environment_is_in_nothing_that_is_written(
    secrets: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(
        "from tessera import profile\nwith profile.region('work'):\n    sum(range(10**6))\n"
    )
    for words in (
        "run --out a.tessera --html a.html script.py", "report a.tessera --json", "doctor --json",
        "measure --sensor modelled --json --trace power.csv -- true",
        "export a.tessera --chrome trace.json --csv summary.csv",
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            main(words.split())
    out, err = capfd.readouterr()
    assert "a.tessera" in err + out
    assert SECRET not in out + err
    written = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "script.py"]
    assert len(written) >= 5
    for path in written:
        assert SECRET.encode() not in path.read_bytes(), path.name


def test_a_password_of_a_bmc_is_shown_nowhere(capfd: pytest.CaptureFixture[str], secrets: None) -> None:
    from tessera.sensors._redfish_http import RedfishClient, RedfishConfig, RequestFailed

    given: dict[str, Any] = {"url": "https://127.0.0.1:9", "username": "reader", "password": SECRET}
    config = RedfishConfig(**given, timeout_s=0.5)
    client = RedfishClient(config)
    shown = [repr(config), str(config), repr(client), f"{config}"]
    with pytest.raises(RequestFailed) as failed:
        client.get("/redfish/v1")
    shown += [str(failed.value), repr(failed.value), repr(failed.value.__cause__)]
    for wrong in (
        {"url": f"https://reader:{SECRET}@bmc"},
        {"url": f"http://{SECRET}"},
        {"username": ""},
        {"timeout_s": -1},
    ):
        with pytest.raises(ArgumentError) as refused:
            RedfishConfig(**(given | wrong))
        shown.append(str(refused.value))
    os.environ.update(TESSERA_REDFISH_URL="https://127.0.0.1:9", TESSERA_REDFISH_USER="reader")
    try:
        with pytest.raises(SystemExit):
            main(["doctor", "--sensor", "redfish"])
    finally:
        del os.environ["TESSERA_REDFISH_URL"], os.environ["TESSERA_REDFISH_USER"]
    shown += capfd.readouterr()
    assert SECRET not in "".join(shown)


def test_headers_of_a_collector_are_shown_nowhere(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    run = make(steps=2, layers=1).write(tmp_path / "a.tessera")
    exporter = profile.otlp("http://127.0.0.1:9", headers={"Authorization": SECRET}, timeout_s=0.5)
    with pytest.raises(TesseraError) as failed:
        exporter.write(run.recording())
    run.close()
    assert SECRET not in repr(exporter) + str(failed.value)
    with pytest.raises(ArgumentError) as refused:
        profile.otlp(f"http://reader:{SECRET}@collector:4318")
    assert SECRET not in str(refused.value)


def test_what_attach_reads_of_an_environment_is_what_it_needs(secrets: None) -> None:
    from tessera.profile.attach.process import find

    given = {"MY_TOKEN": SECRET, "KINETO_USE_DAEMON": "1", "CUDA_VISIBLE_DEVICES": "0", "PATH": os.environ["PATH"]}
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=given)
    try:
        target = find(child.pid)
        assert dict(target.environ) == {"KINETO_USE_DAEMON": "1", "CUDA_VISIBLE_DEVICES": "0"}
        assert "KINETO" not in repr(target)
        target.close()
    finally:
        child.communicate(b"\n")
