"""A workbook of all analyses, read back with nothing but its own XML."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from click.testing import CliRunner

from tessera import analyze
from tessera.cli.main import cli
from tessera.report.workbook import _ANALYSES, KINDS, _render_cell

MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"


def read_workbook(path: Path) -> dict[str, list[list[Any]]]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        types = archive.read("[Content_Types].xml").decode()
        listed = ElementTree.fromstring(archive.read("xl/workbook.xml")).iter(f"{MAIN}sheet")
        sheets = {}
        for i, sheet in enumerate(listed, 1):
            assert f"/xl/worksheets/sheet{i}.xml" in types
            root = ElementTree.fromstring(archive.read(f"xl/worksheets/sheet{i}.xml"))
            sheets[sheet.attrib["name"]] = [[_value(cell) for cell in row] for row in root.iter(f"{MAIN}row")]
    return sheets


def _value(cell: ElementTree.Element) -> Any:
    text = cell.find(f"{MAIN}is/{MAIN}t")
    number = cell.find(f"{MAIN}v")
    return text.text if text is not None else None if number is None else float(number.text or "nan")


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 7, "ts": ts, "dur": dur, "args": args}


def test_a_trace_becomes_a_workbook(tmp_path):
    shapes = {"Input Dims": [[8, 16], [16, 32]], "Input type": ["float", "float"]}
    events = []
    for i in range(3):
        at = 100.0 * i
        events.append(event("cpu_op", "aten::mm", at, 20, **{"External id": i + 1}, **shapes))
        events.append(event("cuda_runtime", "cudaLaunchKernel", at + 5, 5, correlation=i + 1))
        name = "=HYPERLINK(1)" if i else "sgemm\x07"
        events.append(
            event("kernel", name, at + 30, 40, device=0, stream=7, correlation=i + 1, **{"External id": i + 1})
        )
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"baseTimeNanoseconds": 1_790_000_000_000_000_000, "traceEvents": events}))
    out = tmp_path / "report.xlsx"
    result = CliRunner().invoke(cli, ["export", str(trace), "--xlsx", str(out), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["written"] == {"xlsx": str(out)}
    sheets = read_workbook(out)
    assert next(iter(sheets)) == "about" and {"kernels", "breakdown", "operators by shape"} <= set(sheets)
    assert set(sheets) - {"about"} <= {name for name, _ in KINDS}
    head, *rows = sheets["kernels"]
    seconds = {row[0]: row[head.index("time (s)")] for row in rows}
    assert seconds == {"=HYPERLINK(1)": 80e-6, "sgemm ": 40e-6}  # text, not a formula; no control characters
    head, row = sheets["operators by shape"]
    assert row[head.index("Shapes")] == "[8,16]f32 [16,32]f32" and row[head.index("Calls")] == 3
    missing = [row for row in sheets["about"] if row[1] == "missing"]
    assert any(row[0] == "phases" for row in missing)  # what has no rows says why


def test_every_analysis_has_a_sheet():
    assert {_ANALYSES.get(sheet, sheet) for sheet, _ in KINDS} == set(analyze.KINDS)


def test_cells_are_numbers_text_or_empty():
    assert _render_cell(None) == _render_cell(float("nan")) == "<c/>"
    assert _render_cell(True) == '<c t="b"><v>1</v></c>' and _render_cell(2.5) == "<c><v>2.5</v></c>"
    assert len(_render_cell("x" * 99_999)) < 33_000
