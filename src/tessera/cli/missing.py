"""A file that is not there, answered with those that are: one wording for every command."""

from __future__ import annotations

from pathlib import Path

from ..errors import ArgumentError, did_you_mean

SHOWN = 5
"""Files that are named in place of the one asked for: the line stays readable."""
RUNS = Path("runs")
"""Where `tessera run` puts its files: looked in where a run is asked for and none lies in the folder named."""


def missing(path: Path, endings: tuple[str, ...], otherwise: str) -> ArgumentError:
    """The error for a file that is not there.

    `endings` are those of its kind, none for any; `otherwise` is what to do where nothing like it is there.
    """
    why = None
    if path.is_dir():
        why = "that is a folder"
    elif not path.parent.is_dir():
        why, otherwise = f"there is no folder {path.parent}", "check the path"
    near = did_you_mean(path.name, [p.name for p in _alike(path, _beside(path, endings))])
    return ArgumentError(f"there is no file {path}{near}", why=why, fix=instead(path, endings) or otherwise)


def instead(path: Path, endings: tuple[str, ...]) -> str:
    """The files of that kind in its folder: those named alike, or else the newest; empty where there are none."""
    found = _beside(path, endings)
    if not found and ".tessera" in endings:
        found = _beside(RUNS / path.name, (".tessera",))
    shown = _alike(path, found)
    if not shown and endings:  # of files of any kind the newest say nothing
        shown = sorted(found, key=lambda p: p.stat().st_mtime, reverse=True)
    return f"one of: {', '.join(map(str, shown[:SHOWN]))}" if shown else ""


def _alike(path: Path, found: list[Path]) -> list[Path]:
    """Those whose names are near, the nearest first. Without their endings: all of a kind have that in common."""
    import difflib

    stems = [_stem(p) for p in found]
    near = difflib.get_close_matches(_stem(path), set(stems), n=SHOWN, cutoff=0.7)  # at 0.6 "other" is near "notes"
    return [p for one in near for p, stem in zip(found, stems, strict=True) if stem == one]


def _stem(path: Path) -> str:
    """The name up to its first dot, as `trace` of `trace.json.gz`; the dot of a hidden file begins its name."""
    return path.name[:1] + path.name[1:].split(".", 1)[0]


def _beside(path: Path, endings: tuple[str, ...]) -> list[Path]:
    """What lies in its folder, or in itself where it is one: files with these endings, or all there is."""
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if not endings or (p.is_file() and p.suffix in endings))
