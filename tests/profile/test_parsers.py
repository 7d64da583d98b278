"""Damaged input through every parser ends in a result or an error of ours, and soon. Longer: fuzz_parsers.py."""

from __future__ import annotations

import os
import socket
import sqlite3
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.errors import ArgumentError, RecordingError, TesseraError
from tessera.profile.attach import daemon
from tessera.profile.runfile import RunFile, RunWriter
from tessera.profile.runfile_checksum import unseal

from places import REPOSITORY
from synthetic_run import make

sys.path.insert(0, str(REPOSITORY / "benchmarks" / "fuzz"))

import fuzz_parsers

CASES = 120
SLOW = {"runfile": 60, "replay": 60}
# What a parser refuses though nothing is wrong with it: nvidia-smi's logs are not played again.
REFUSED = {("replay", 1), ("replay", 2)}
UNDAMAGED = [(name, i) for name in fuzz_parsers.TARGETS for i in range(len(fuzz_parsers._seeds(name)))]
quick = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.mark.parametrize(("name", "number"), UNDAMAGED)
def test_what_is_right_is_read(name, number, tmp_path):
    end = fuzz_parsers.run(name, number, tmp_path)
    assert end == ("error" if (name, number) in REFUSED else "result")


@pytest.mark.parametrize("name", fuzz_parsers.TARGETS)
def test_what_is_damaged_ends_well(name, tmp_path):
    ends = [fuzz_parsers.run(name, number, tmp_path) for number in range(SLOW.get(name, CASES))]
    assert set(ends) <= {"result", "error"}


@pytest.mark.parametrize("name", [n for n in fuzz_parsers.TARGETS if n != "runfile"])
@settings(quick, max_examples=25)
@given(data=st.binary(max_size=200) | st.text(max_size=100).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_any_bytes_end_well(name, data, tmp_path):
    try:
        fuzz_parsers.TARGETS[name].parse(data, tmp_path)
    except TesseraError as error:
        assert error.what


ODD = {
    "empty": b"", "a mark": b"\xef\xbb\xbf", "UTF-16": b"\xff\xfe{\x00}\x00", "lists": b"[" * 100_000,
    "objects": b'{"a":' * 100_000, "null": b"null", "a long text": b'"' + b"x" * 200_000, "NUL": b"\x00" * 100,
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", fuzz_parsers.TARGETS)
def test_odd_files_end_well(name, odd, tmp_path):
    try:
        fuzz_parsers.TARGETS[name].parse(ODD[odd], tmp_path)
    except TesseraError as error:
        assert len(str(error)) < 1000, str(error)[:200]


# -- run files ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("run") / "a.tessera"
    make(steps=2, layers=2).write(path).close()
    unseal(path)  # a checksum would refuse every damage; test_runfile_open.py has that
    return path.read_bytes()


def opened(data: bytes, folder: Path) -> RunFile:
    path = folder / "a.tessera"
    path.write_bytes(data)
    return RunFile(path)


def test_a_run_cut_anywhere_is_refused_or_read_in_part(whole, tmp_path):
    ends = set()
    for size in [*range(0, 400, 40), *range(512, len(whole), 2048), len(whole)]:
        try:
            with opened(whole[:size], tmp_path) as run:
                run.timeline()
            ends.add("read")
        except RecordingError as error:
            assert error.why, size
            assert "a.tessera" in error.what
            ends.add("refused")
    assert ends == {"read", "refused"}
    assert not [p for p in tmp_path.iterdir() if p.name != "a.tessera"], "a reader leaves nothing beside the file"


def changed(whole: bytes, *statements: str) -> bytes:
    db = sqlite3.connect(":memory:")
    db.deserialize(whole)
    for statement in statements:
        assert db.execute(statement).rowcount, statement
    db.commit()
    data = db.serialize()
    db.close()
    return data


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE chunks SET rows = 1 << 40", "rows"),
        ("UPDATE chunks SET data = x'00'", "damaged"),
        ('UPDATE chunks SET columns = \'[["kind", 0, "O", 0, 8]]\'', "which no writer uses"),
        ("DELETE FROM names WHERE id = 0", "names are lost"),
        ("UPDATE facts SET value = '{' WHERE key = 'meta'", "meta"),
        ("UPDATE facts SET value = '9223372036854775807' WHERE key = 'start_ns'", "no clock shows"),
        ("UPDATE samples SET watts = x'00'", "samples of gpu0"),
        ("UPDATE samples SET watts = zeroblob(length(watts) - 8)", "as many times as values"),
        ("UPDATE domains SET value = '[]'", "Domain"),
        ("UPDATE telemetry SET value = 'x'", "Telemetry"),
        ("PRAGMA user_version = 99", "version 99"),
    ],
)
def test_damage_inside_is_named(whole, tmp_path, statement, said):
    data = changed(whole, statement) if not statement.startswith("PRAGMA") else _versioned(whole)
    with pytest.raises(RecordingError) as caught, opened(data, tmp_path) as run:
        run.timeline()
        run.power()
        run.telemetry()
    assert said in str(caught.value)
    assert caught.value.fix


def _versioned(whole: bytes) -> bytes:
    return whole[:60] + struct.pack(">I", 99) + whole[64:]  # SQLite's header: user_version is the big-endian word at 60


def test_a_blob_that_unpacks_to_gigabytes_is_not_unpacked(whole, tmp_path):
    import tracemalloc
    import zlib

    bomb = zlib.compress(b"\0" * (64 << 20), 9)
    db = sqlite3.connect(":memory:")
    db.deserialize(whole)
    heads = f'[["kind",0,"<i8",0,{len(bomb)},true]]'
    db.execute("UPDATE chunks SET columns = ?, data = ?", (heads, bomb))
    db.commit()
    with opened(db.serialize(), tmp_path) as run:
        tracemalloc.start()
        with pytest.raises(RecordingError, match="cut off, or longer than stated"):
            run.timeline()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()
    db.close()


def test_rows_that_point_nowhere_lose_only_that(tmp_path):
    with RunWriter(tmp_path / "b.tessera") as writer:
        writer.add_row("kernel", "gemm", 10, 20, device=0, launch=7, shapes=99)
    with RunFile(tmp_path / "b.tessera") as run:
        timeline = run.timeline()
        (record,) = timeline.records()
    assert (record.name, record.grid, record.shapes) == ("gemm", None, None)
    assert timeline.notes == [f"the file is damaged: the {c} of 1 rows is lost" for c in ("shapes", "launch")]


# -- datagrams ------------------------------------------------------------------------------------------------------


@settings(quick, max_examples=60)
@given(
    size=st.integers(0, 2**64 - 1) | st.none(),
    kind=st.binary(max_size=32),
    body=st.binary(max_size=120),
    count=st.integers(-(2**31), 2**31 - 1) | st.none(),
)
def test_any_datagram_is_a_request_or_a_bad_message(size, kind, body, count):
    if count is not None:
        body = struct.pack("@iiq", 2, count, 0) + body
    data = struct.pack("@Q32s", len(body) if size is None else size, kind) + body
    try:
        found = daemon.decode_request(daemon.decode(data)[1])
    except daemon.BadMessage as error:
        assert error.what
    else:
        assert len(found.pids) <= len(body) // 4


def test_a_flood_of_nonsense_leaves_the_daemon_listening(tmp_path):
    with daemon.Endpoint(folder=str(tmp_path)) as endpoint, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.bind(str(tmp_path / "client"))
        for data in (b"", b"x", b"\xff" * 65_000, os.urandom(40), struct.pack("@Q32s", 2**63, b"req")):
            client.sendto(data, endpoint.address)
            assert endpoint.receive(0.5) is None
        client.sendto(daemon.encode("req", daemon.encode_request(2, 0, (1,))), endpoint.address)
        message = endpoint.receive(0.5)
        assert message is not None
        assert (message.kind, message.pid, message.uid) == ("req", os.getpid(), os.geteuid())


def test_a_fact_that_readers_could_not_read_is_refused_when_it_is_set(tmp_path):
    with RunWriter(tmp_path / "c.tessera") as writer:
        with pytest.raises(ArgumentError, match="'summary' cannot be kept") as caught:
            writer.set("summary", "my first try")
        writer.set("my summary", "my first try")
    assert caught.value.fix == "give it another name"
    with RunFile(tmp_path / "c.tessera") as run:
        assert run.facts == {"my summary": "my first try"}
