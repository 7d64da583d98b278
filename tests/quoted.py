"""Figures as a document quotes them, the marks above its blocks, and what results files hold.

A figure is a number with a unit of ours (%, J, W, ms, µs, times ...). tests/test_proof.py says what marks look like.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

NUMBER = r"[-+±]?\d[\d,]*(?:\.\d+)?"
UNITS = r"%|[mkµup]?J|[mk]?W|ms|µs|us|ns|times|x(?!\s?\d)"
FIGURE = re.compile(rf"(?<![\w.,^³-])({NUMBER}(?:\s?(?:-|–|/|±|to)\s?{NUMBER})*)\s?({UNITS})(?![\w³^])")
DECIMAL = re.compile(r"(?<![\w.,/^-])[-+±]?\d[\d,]*\.\d+(?![\w.])")
MARK = re.compile(r"<!--\s*((?:from|given):.*?)\s*-->")
# What a quoted unit is of the unit that a name ends with (`cpu_s`, `region_off_ns`); other names may mean any.
SUFFIXES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "pct": 1.0, "w": 1.0, "j": 1.0, "bytes": 1.0, "mib": 2.0**20}
QUOTED = {
    "ms": ("s ms us ns", 1e-3), "µs": ("s ms us ns", 1e-6), "us": ("s ms us ns", 1e-6), "ns": ("s ms us ns", 1e-9),
    "%": ("pct", 1.0), "W": ("w", 1.0), "mW": ("w", 1e-3), "kW": ("w", 1e3), "J": ("j", 1.0), "mJ": ("j", 1e-3),
    "kJ": ("j", 1e3), "µJ": ("j", 1e-6), "uJ": ("j", 1e-6),
}  # fmt: skip
Quantity = tuple[str, float]  # the unit that its name says ("" where it says none), and the number


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number as it is quoted, and its unit."""

    text: str
    unit: str

    def __str__(self) -> str:
        return f"{self.text}{self.unit}" if self.unit in ("%", "x") else f"{self.text} {self.unit}".strip()

    def is_among(self, values: Iterable[Quantity]) -> bool:
        """Whether one of the values, brought to this unit and rounded as this is quoted, is this."""
        return any(self._is(abs(v)) for unit, value in values for v in self._brought(unit, value))

    def _brought(self, unit: str, value: float) -> Iterator[float]:
        suffixes, size = QUOTED.get(self.unit, ("", 1.0))
        if unit in suffixes.split():
            yield value * SUFFIXES[unit] / size
        elif unit == "" or not self.unit:  # a number that stands in a table, or a share: 0.12 is 12%
            yield from (value, 100 * value) if self.unit in ("%", "") else (value,)
            if not self.unit:
                yield from (value * SUFFIXES.get(unit, 1.0) * scale for scale in (1, 1e3, 1e6, 2**-20, 2**-30))

    def is_said(self, pairs: Iterable[tuple[str, str]]) -> bool:
        """Whether it is one of the texts' numbers of this unit, rounded as this is quoted."""
        return any(unit == self.unit and self._is(value(number)) for number, unit in pairs)

    def _is(self, value: float) -> bool:
        plain = self.text.lstrip("+-±").replace(",", "")
        half = 0.5 * 10.0 ** -len(plain.partition(".")[2]) * (1 + 1e-9)
        return abs(value - float(plain)) <= half


@dataclasses.dataclass(frozen=True)
class Mark:
    """What stands above a block: files, settings, and figures with how they are computed."""

    files: tuple[str, ...]
    given: frozenset[str]
    computed: dict[str, str]

    @classmethod
    def of(cls, text: str) -> Mark:
        parts = [p.strip() for p in text.split(";") if p.strip()]
        words = {p.partition(":")[0]: p.partition(":")[2] for p in parts if p.startswith(("from:", "given:"))}
        listed = {k: tuple(w.strip() for w in v.split(",") if w.strip()) for k, v in words.items()}
        computed = {p.partition("=")[0].strip(): p.partition("=")[2].strip() for p in parts if " = " in p}
        assert len(words) + len(computed) == len(parts), f"not understood: {text}"
        return cls(listed.get("from", ()), frozenset(listed.get("given", ())), computed)

    def comes_out(self, figure: Figure) -> bool:
        """Whether the mark computes the figure, and it is what comes out."""
        if str(figure) not in self.computed:
            return False
        names = {k: v for k, v in part_of(self.files[0]).items() if isinstance(v, (int, float))}
        expression = self.computed[str(figure)]
        assert re.fullmatch(r"[\w\s.+*/()-]+", expression), expression
        return figure.is_among([("", eval(expression, {"__builtins__": {}}, names))])


@dataclasses.dataclass(frozen=True)
class Block:
    """Lines without an empty one between them, and the mark above them."""

    page: str
    line: int
    text: str
    mark: Mark | None

    def figures(self) -> list[Figure]:
        """What is quoted, outside of code and links."""
        plain = re.sub(r"`[^`\n]*`|\]\([^)]*\)", " ", self.text)
        found = [Figure(*pair) for pair in pairs(plain)]
        if self.mark:
            found += [Figure(n, "") for n in DECIMAL.findall(FIGURE.sub(" ", plain))]
        return found


def value(number: str) -> float:
    return float(number.lstrip("+-±").replace(",", ""))


def pairs(text: str) -> list[tuple[str, str]]:
    """(number, unit) of every figure; `82-118 W` has two."""
    return [(n, unit) for numbers, unit in FIGURE.findall(text) for n in re.findall(NUMBER, _apart(numbers))]


def _apart(numbers: str) -> str:
    """`82-118` is two numbers, `-1.6 / -1.9` two negative ones."""
    return re.sub(r"(?<=\d)\s?[-–]\s?(?=\d)", " ", numbers).replace("±", " ")


def blocks_of(page: Path) -> Iterator[Block]:
    """The page without code, what benchmarks/page/build.py wrote, and its marks, which go with the block below them."""
    text = page.read_text()
    for unread in (r"^( *)```.*?^\1```", r"<!-- [\w ]+ from benchmarks/page/build\.py -->.*?<!-- end -->"):
        text = re.sub(unread, lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    lines: list[str] = []
    mark = None
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if found := MARK.fullmatch(line.strip()):
            mark = Mark.of(found[1])
        elif line.strip():
            lines.append(line)
        elif lines:
            yield Block(str(page.relative_to(ROOT)), number - len(lines), "\n".join(lines), mark)
            lines, mark = [], None


def part_of(source: str) -> Any:
    """A results file, or a part of it."""
    name, _, path = source.partition("#")
    found = json.loads((RESULTS / name).read_text())
    found.pop("stamp", None)
    for key in filter(None, path.split("/")):
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


@functools.cache
def numbers_of(source: str) -> tuple[Quantity, ...]:
    """Every number of a source, with the unit its name, or that of what holds it, ends with."""
    found = [
        (unit, v) for unit, v in _leaves(part_of(source)) if isinstance(v, (int, float)) and not isinstance(v, bool)
    ]
    return tuple((unit, float(v)) for unit, v in found)


@functools.cache
def texts_of(source: str) -> frozenset[tuple[str, str]]:
    """(number, unit) of the names and texts of a source: `tessera 50 ms`."""
    texts = [v for _, v in _leaves(part_of(source)) if isinstance(v, str)]
    return frozenset(pair for text in texts for pair in pairs(text))


def _leaves(value: Any, unit: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values, all the way down."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield "", name
            last = name.rpartition("_")[2]
            yield from _leaves(part, last if last in SUFFIXES and "_" in name else unit)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part, unit)
    else:
        yield unit, value
