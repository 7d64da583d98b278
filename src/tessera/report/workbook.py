"""A workbook (.xlsx) of all analyses of a recording: a sheet for each, with raw SI values, and one of single figures.

Written as the XML that a workbook is (ECMA-376), since a table needs a few dozen lines of it and a package for it would
have to be installed.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from .. import analyze
from ..analyze.result import Result, unit_of
from ..errors import TesseraError
from ..output import replace_when_written
from ..recording import Recording

KINDS: tuple[tuple[str, dict[str, str]], ...] = (
    ("breakdown", {}), ("breakdown by step", {"by": "step"}), ("kernels", {}), ("operators by shape", {"by": "op"}),
    ("modules", {}), ("sequences", {}), ("launches", {}), ("phases", {}), ("overlap", {}), ("collectives", {}),
    ("memcpy", {}), ("memory", {}), ("critical_path", {}), ("roofline", {}), ("power", {}), ("stalls", {}),
    ("divergence", {}), ("advise", {}),
)  # fmt: skip
"""The sheets in their order: the name of each, and the arguments of its analysis."""
_ANALYSES = {"breakdown by step": "breakdown", "operators by shape": "roofline"}
_MOST_ROWS = 1_000_000
_MOST_LETTERS = 32_000
"""Below what a sheet and a cell can hold: 1,048,576 rows, 32,767 letters."""
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_STYLES = (
    f'<styleSheet xmlns="{_MAIN}"><fonts count="2"><font><sz val="11"/><name val="Calibri"/></font><font><b/>'
    '<sz val="11"/><name val="Calibri"/></font></fonts><fills count="1"><fill><patternFill patternType="none"/></fill>'
    '</fills><borders count="1"><border/></borders><cellStyleXfs count="1"><xf/></cellStyleXfs><cellXfs count="2">'
    '<xf xfId="0"/><xf xfId="0" fontId="1" applyFont="1"/></cellXfs>'
    '<cellStyles count="1"><cellStyle name="Normal" xfId="0" builtinId="0"/></cellStyles></styleSheet>'
)
Table = tuple[str, Sequence[str], Iterator[Sequence[Any]] | Sequence[Sequence[Any]]]
"""The name of a sheet, its titles, its rows."""


def write_workbook(path: Path, recording: Recording) -> Path:
    """Write every analysis of a recording that has an answer."""
    results: dict[str, Result] = {}
    about: list[Sequence[Any]] = []
    for sheet, arguments in KINDS:
        kind = _ANALYSES.get(sheet, sheet)
        try:
            result: Result = getattr(analyze, kind)(recording, **arguments)
        except TesseraError as error:  # of one sheet: the others have their answers
            about.append((sheet, "not computed", error.what, ""))
            continue
        if result.rows:
            results[sheet] = result
        about += [(sheet, key, value, unit_of(key)) for key, value in result.facts.items() if _is_cell(value)]
        about += [(sheet, "missing", f"{what}: {why}", "") for what, why in result.missing.items()]
    notes: list[Sequence[Any]] = [("", "note", str(note), "") for note in recording.notes]
    head: Sequence[Any] = ("", "recording", recording.facts.name, "")
    sheets: list[Table] = [("about", ("sheet", "figure", "value", "unit"), [head, *notes, *about])]
    sheets += [(name, *_lay_out(result)) for name, result in results.items()]
    with replace_when_written(path, make_folder=True) as part:
        _write(part, sheets)
    return path


def _lay_out(result: Result) -> tuple[Sequence[str], Iterator[Sequence[Any]]]:
    """Return titles with their units, and the rows: the analysis's columns, then what its rows have besides."""
    columns = {c.key: f"{c.title} ({c.unit})" if c.unit else c.title for c in result.columns}
    more = dict.fromkeys(key for row in result.rows for key in row if key not in columns)
    titles = columns | {key: f"{key} (number)" if key in columns.values() else key for key in more}
    return list(titles.values()), ([_flatten(row.get(key)) for key in titles] for row in result.rows)


def _flatten(value: Any) -> Any:
    """Return a list or a mapping as one text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {part}" for key, part in value.items())
    return " + ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _is_cell(value: Any) -> bool:
    return value is not None and not isinstance(value, (list, tuple, Mapping))


def _write(path: Path, sheets: Sequence[Table]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as archive:
        parts = [(f"worksheets/sheet{i}.xml", "worksheet") for i in range(1, len(sheets) + 1)] + [
            ("styles.xml", "styles")
        ]
        types = "".join(
            f'<Override PartName="/xl/{name}" ContentType="application/vnd.openxmlformats-officedocument.spreadsheetml.'
            f'{kind}+xml"/>'
            for name, kind in [("workbook.xml", "sheet.main"), *parts]
        )
        defaults = '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        _add(archive, "[Content_Types].xml", f'<Types xmlns="{_PACKAGE}/content-types">{defaults}{types}</Types>')
        _add(archive, "_rels/.rels", _relate([("xl/workbook.xml", "officeDocument")]))
        _add(archive, "xl/_rels/workbook.xml.rels", _relate(parts))
        listed = "".join(
            f'<sheet name={quoteattr(name[:31])} sheetId="{i}" r:id="rId{i}"/>'
            for i, (name, *_) in enumerate(sheets, 1)
        )
        book = f'<workbook xmlns="{_MAIN}" xmlns:r="{_OFFICE}"><sheets>{listed}</sheets></workbook>'
        _add(archive, "xl/workbook.xml", book)
        _add(archive, "xl/styles.xml", _STYLES)
        for i, (_, titles, rows) in enumerate(sheets, 1):
            with archive.open(f"xl/worksheets/sheet{i}.xml", "w") as file:
                for text in _render_sheet(titles, rows):
                    file.write(text.encode())


def _add(archive: zipfile.ZipFile, name: str, text: str) -> None:
    archive.writestr(name, f'<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n{text}')


def _relate(targets: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<Relationship Id="rId{i}" Type="{_OFFICE}/{kind}" Target="{name}"/>'
        for i, (name, kind) in enumerate(targets, 1)
    )
    return f'<Relationships xmlns="{_PACKAGE}/relationships">{items}</Relationships>'


def _render_sheet(titles: Sequence[str], rows: Any) -> Iterator[str]:
    yield '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
    pane = '<pane ySplit="1" topLeftCell="A2" activePane="bottomLeft" state="frozen"/>'
    yield f'<worksheet xmlns="{_MAIN}"><sheetViews><sheetView workbookViewId="0">{pane}</sheetView></sheetViews>'
    yield '<cols><col min="1" max="1" width="44" customWidth="1"/></cols><sheetData>'
    yield f"<row>{''.join(_render_cell(title, 1) for title in titles)}</row>"
    for count, row in enumerate(rows):
        if count == _MOST_ROWS:
            break
        yield f"<row>{''.join(map(_render_cell, row))}</row>"
    yield "</sheetData></worksheet>"


def _render_cell(value: Any, style: int = 0) -> str:
    """Return a number, a boolean, or text, which is never taken for a formula."""
    value = value.item() if hasattr(value, "item") else value
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "<c/>"
    if isinstance(value, bool):
        return f'<c t="b"><v>{int(value)}</v></c>'
    if isinstance(value, (int, float)):
        return f"<c><v>{value!r}</v></c>"
    text = escape(_NOT_XML.sub(" ", str(value)[:_MOST_LETTERS]))
    return f'<c t="inlineStr" s="{style}"><is><t xml:space="preserve">{text}</t></is></c>'
