"""Writes a Parquet table: one row per record, with the fields of `tessera.record.Record`; unknown values are null."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import needs_extra
from ...output import replace_when_written
from ...record import KINDS
from ...timeline.columns import FLOATS, INTEGERS, NONE, TEXTS, Chunk, Launch

if TYPE_CHECKING:
    from ...recording import Recording, Rows

_RENAMED = {"stream": "stream_id", "thread": "thread_id", "external": "external_id", "parent": "parent_row"}
_ENERGY = ("energy_j", "energy_error_j")


@dataclass(frozen=True, slots=True)
class Parquet:
    """`profile.parquet("run.parquet")`: for pandas, polars, DuckDB, Spark. Times are int64 nanoseconds (epoch).

    `row` numbers the rows; `parent_row` refers to that number. The facts of the run are JSON in the metadata of the
    schema, under "tessera".
    """

    path: str | Path

    def write(self, recording: Recording) -> Path:
        with needs_extra("pyarrow", "parquet", "profile.parquet"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        target = Path(self.path)
        recording.find_energy()
        maker = _Maker(pa, recording)
        with (
            replace_when_written(target, make_folder=True) as part,
            pq.ParquetWriter(part, maker.schema, compression="zstd") as out,
        ):
            for chunk in recording.rows.chunks(maker.columns):
                out.write_table(pa.table(maker.arrays(chunk), schema=maker.schema))
        return target


class _Maker:
    """Converts chunks to Arrow arrays. Texts and launches are dictionaries: each is stored once."""

    def __init__(self, pa: Any, recording: Recording) -> None:
        rows, facts = recording.rows, recording.facts
        self._pa = pa
        self._own_joules = rows.has_energy
        self.columns = (*INTEGERS, *FLOATS, *(_ENERGY if self._own_joules else ()))
        self._names = pa.array(rows.names, pa.string())
        self._launches = self._launch_columns(rows.launches)
        self._extra = self._extra_types(rows)
        text = pa.dictionary(pa.int32(), pa.string())
        types = {"kind": text, **dict.fromkeys(TEXTS, text)}
        integers = {_RENAMED.get(c, c): types.get(c, pa.int64()) for c in INTEGERS if c != "launch"}
        fields = {
            "row": pa.int64(), **integers, "value": pa.float64(), **dict.fromkeys(_ENERGY, pa.float64()),
            **{name: column.type for name, column in self._launches.items()}, **self._extra,
        }  # fmt: skip
        about = {"run": facts.name, "meta": facts.meta, "notes": [str(n) for n in facts.notes]}
        self.schema = pa.schema(fields.items(), metadata={"tessera": json.dumps(about, default=str)})

    def arrays(self, chunk: Chunk) -> dict[str, Any]:
        pa, count = self._pa, len(chunk)
        out: dict[str, Any] = {"row": chunk.first_row + np.arange(count)}
        for column in INTEGERS:
            values = chunk[column]
            empty = values == NONE
            if column == "kind":
                out[column] = pa.DictionaryArray.from_arrays(values.astype(np.int32), pa.array(KINDS))
            elif column in TEXTS:
                indices = pa.array(np.where(empty, 0, values).astype(np.int32), mask=empty)
                out[column] = pa.DictionaryArray.from_arrays(indices, self._names)
            elif column != "launch":
                out[_RENAMED.get(column, column)] = pa.array(values, mask=empty)
        joules = {c: chunk[c] if self._own_joules else np.full(count, np.nan) for c in _ENERGY}
        for name, values in (("value", chunk["value"]), *joules.items()):
            out[name] = pa.array(values, mask=np.isnan(values))
        launch = chunk["launch"]
        at = pa.array(np.where(launch == NONE, 0, launch), mask=launch == NONE)
        for name, values in self._launches.items():
            out[name] = values.take(at) if len(values) else pa.nulls(count, values.type)
        for name, kind in self._extra.items():
            cells: list[Any] = [None] * count
            for row, fields in chunk.extra.items():
                cells[row] = fields.get(name)
            out[name] = pa.array(cells, kind)
        return out

    def _launch_columns(self, launches: Sequence[Launch]) -> dict[str, Any]:
        pa = self._pa
        kinds = {"grid": pa.list_(pa.int32()), "block": pa.list_(pa.int32()), "pinned": pa.bool_()}
        whole = ("registers", "shared_bytes", "collective_bytes", "group_size")
        return {
            f: pa.array(
                [getattr(launch, f) for launch in launches],
                kinds.get(f, pa.int64() if f in whole else pa.string()),
            )
            for f in Launch.__struct_fields__
        }

    def _extra_types(self, rows: Rows) -> Mapping[str, Any]:
        """Return the fields that single rows have beside the columns, with their types."""
        pa = self._pa
        types: dict[str, Any] = {}
        for chunk in rows.chunks(("kind",)):
            for fields in chunk.extra.values():
                for name, value in fields.items():
                    number = isinstance(value, (int, float)) and not isinstance(value, bool)
                    kind = pa.float64() if number else pa.bool_() if isinstance(value, bool) else pa.string()
                    if value is not None and types.setdefault(name, kind) != kind:
                        types[name] = pa.string()
        taken = {*INTEGERS, *FLOATS, *_ENERGY, *Launch.__struct_fields__}
        return {name: kind for name, kind in sorted(types.items()) if name not in taken}
