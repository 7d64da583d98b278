"""What leaves for other programs: whole files at the right place, cells that are not formulas."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.cli.options import check_writable
from tessera.errors import ArgumentError
from tessera.output import cannot_write, escape_formula, remove_controls, replace_when_written


def test_a_file_takes_its_name_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    with replace_when_written(target) as part:
        part.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new" and list(tmp_path.iterdir()) == [target]
    old = os.umask(0o027)
    try:
        with replace_when_written(target) as part:
            part.write_text("new")
    finally:
        os.umask(old)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640, "as any other file that the user makes"


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    for old in (None, "old"):
        if old is not None:
            target.write_text(old)
        with pytest.raises(ArgumentError, match="cannot write"), replace_when_written(target) as part:
            part.write_text("half")
            raise OSError(28, "No space left on device")
        assert list(tmp_path.iterdir()) == ([target] if old else [])
    assert target.read_text() == "old"


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "shared"
    folder.mkdir()
    target = folder / "s.csv"
    for name in ("s.csv", f".s.csv.{os.getpid()}.part"):
        (folder / name).symlink_to(victim)
    with replace_when_written(target) as part:
        assert not part.is_symlink()
        part.write_text("joules")
    assert victim.read_text() == "mine" and not target.is_symlink() and target.read_text() == "joules"


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_link_to_a_pipe_or_a_device_is_replaced(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "pipe" if kind == "pipe" else Path("/dev/null")
    if kind == "pipe":
        os.mkfifo(victim)
    target = tmp_path / "q.html"
    target.symlink_to(victim)
    with replace_when_written(target) as part:
        assert part != target, "a link that somebody put beside the run is no choice of the user"
        part.write_text("joules")
    assert not target.is_symlink() and target.read_text() == "joules"


def test_a_pipe_with_a_name_is_refused_instead_of_waiting_for_a_reader(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ArgumentError, match="a pipe, not a file"), replace_when_written(pipe):
        pass
    with pytest.raises(ArgumentError, match="a pipe, not a file"):
        check_writable(pipe)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


def test_what_this_process_has_open_is_written_to() -> None:
    reader, writer = os.pipe()
    try:
        path = Path(f"/dev/fd/{writer}")
        check_writable(path)
        with replace_when_written(path) as part:
            part.write_text("joules")
        assert os.read(reader, 100) == b"joules"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_disk_or_a_socket_is_never_written_to_or_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path has at most 108 characters
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.html")
        with pytest.raises(ArgumentError, match="a disk, a socket"), replace_when_written(Path("s.html")):
            pass
        assert stat.S_ISSOCK(Path("s.html").lstat().st_mode)
    block, real = os.stat_result((stat.S_IFBLK | 0o660, *(0,) * 9)), Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **how: block if path == Path("/dev/null") else real(path, **how))
    with pytest.raises(ArgumentError, match="a disk, a socket"), replace_when_written(Path("/dev/null")):
        pass


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    with replace_when_written(Path("/dev/null")) as part:
        assert part == Path("/dev/null")
    program = (
        "import sys; from pathlib import Path; from tessera.output import replace_when_written\n"
        "with replace_when_written(Path('/dev/stdout')) as part: part.write_text('joules')"
    )
    out = tmp_path / "out"
    with out.open("w") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, check=True, timeout=300)
    assert out.read_text() == "joules" and Path("/dev/stdout").is_symlink()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as caught, replace_when_written(tmp_path / "new" / "x.csv"):
        pass
    assert caught.value.fix == f"mkdir -p {tmp_path / 'new'}" and not (tmp_path / "new").exists()
    with pytest.raises(ArgumentError) as caught, replace_when_written(tmp_path / "a new one" / "x.csv"):
        pass
    assert caught.value.fix == f"mkdir -p '{tmp_path / 'a new one'}'", "the shell must see one folder"


@pytest.mark.parametrize("cell", ["=HYPERLINK(1)", "+1", "-2", "@x", "\t=1", "\r=1"])
def test_a_formula_becomes_text(cell: str) -> None:
    assert escape_formula(cell) == f"'{cell}"


def test_other_cells_stay() -> None:
    assert [escape_formula(v) for v in ("mm", "a=b", "", -1.5, None)] == ["mm", "a=b", "", -1.5, None]


def test_a_text_without_controls() -> None:
    assert remove_controls("a\x1b]8;;http://x\x07b\u202e\n\t") == "a ]8;;http://x b \n\t"


def test_a_missing_folder_is_not_the_reason_where_none_can_be_made(tmp_path: Path) -> None:
    """A new folder on a disk that is read-only, full or forbidden: `mkdir -p` fails there, too."""
    path = tmp_path / "runs" / "train.tessera"
    missing = cannot_write(path, FileNotFoundError(errno.ENOENT, "No such file or directory"))
    assert missing.fix == f"mkdir -p {path.parent}"
    for code in (errno.EROFS, errno.ENOSPC, errno.EACCES):
        refused = cannot_write(path, OSError(code, os.strerror(code)))
        assert refused.why == os.strerror(code) and "mkdir" not in (refused.fix or "")
