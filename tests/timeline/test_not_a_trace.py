"""Traces that are not torch's: said what they are, and which file to give."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tessera import analyze
from tessera.errors import RecordingError
from tessera.profile.open_recording import load
from tessera.profile.ranks.read import find_files

EVENTS = [{"name": f"fusion.{i}", "ph": "X", "ts": i * 1000, "dur": 500, "pid": 1, "tid": 1} for i in range(20)]


def write_jax(folder: Path) -> Path:
    deep = folder / "plugins" / "profile" / "2026_03_01"
    deep.mkdir(parents=True)
    path = deep / "host.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    return path


def test_events_without_a_category_are_not_no_event(tmp_path):
    path = tmp_path / "perfetto.json"
    path.write_text(json.dumps(EVENTS))
    said = str(analyze.kernels(path))
    assert "20 events of perfetto.json have no category" in said and "is empty" not in said
    said = str(analyze.kernels(write_jax(tmp_path)))
    assert "give that one" in said and "*.xplane.pb" in said


def test_events_of_other_tools_are_not_no_event(tmp_path):
    path = tmp_path / "nsys2json.json"
    path.write_text(json.dumps([{**event, "cat": cat} for cat in ("cuda", "nvtx") for event in EVENTS]))
    said = str(analyze.kernels(path))
    assert "40 events of nsys2json.json are of categories that are not read (cuda, nvtx)" in " ".join(said.split())
    assert "is empty" not in said


def test_a_folder_of_jax_is_looked_into(tmp_path):
    viewed = write_jax(tmp_path / "jax")
    assert find_files([tmp_path / "jax"]) == ([viewed], [])
    whole = viewed.with_name("host.xplane.pb")
    whole.write_bytes(b"")
    assert find_files([tmp_path / "jax"])[0] == [whole], "the same events twice are not two ranks"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nsys.sqlite", b"SQLite format 3\0" + bytes(100), "SQLite database, as Nsight Systems"),
        ("smi.csv", b"timestamp, index, power.draw [W]\n", "a table (CSV), and not a trace"),
    ],
)
def test_other_files_are_said_to_be_what_they_are(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecordingError) as refused:
        load(tmp_path / name)
    assert said in refused.value.what and "give" in str(refused.value.fix)


def test_kernels_of_rocprofv3_are_read_whatever_the_file_is_called(tmp_path):
    head = "Kind,Agent_Id,Queue_Id,Kernel_Id,Kernel_Name,Correlation_Id,Start_Timestamp,End_Timestamp"
    rows = [f"KERNEL_DISPATCH,1,1,1,gemm_A,{i},{1000 + i * 10_000},{6000 + i * 10_000}" for i in range(10)]
    (tmp_path / "mine.csv").write_text("\n".join([head, *rows]) + "\n")
    assert len(load(tmp_path / "mine.csv").timeline.rows("kernel")) == 10


def test_a_dispatch_with_several_counters_is_one_kernel(tmp_path):
    """counter_collection.csv has a row for each counter: with two, every kernel was there twice."""
    head = "Dispatch_Id,Agent_Id,Process_Id,Kernel_Name,Counter_Name,Counter_Value,Start_Timestamp,End_Timestamp"
    rows = [
        f"{i},Agent 1,{process},gemm,{counter},7,{1000 + i * 10_000},{6000 + i * 10_000}"
        for i in range(10) for process in (8, 9) for counter in ("SQ_WAVES", "GRBM_COUNT")
    ]  # fmt: skip
    (tmp_path / "1_counter_collection.csv").write_text("\n".join([head, *rows]) + "\n")
    assert len(load(tmp_path / "1_counter_collection.csv").timeline.rows("kernel")) == 20
