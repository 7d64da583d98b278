"""Traces that are not torch's: said what they are, and which file to give."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tessera import analyze
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


def test_a_folder_of_jax_is_looked_into(tmp_path):
    viewed = write_jax(tmp_path / "jax")
    assert find_files([tmp_path / "jax"]) == ([viewed], [])
    whole = viewed.with_name("host.xplane.pb")
    whole.write_bytes(b"")
    assert find_files([tmp_path / "jax"])[0] == [whole], "the same events twice are not two ranks"
