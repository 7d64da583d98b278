"""Names of streams: `meta["stream_names"]` has names by "device/stream", in merged runs "rank/device/stream"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .columns import NONE

KEY = "stream_names"
_PLAIN = re.compile(r"stream \d+\s*")
_NUMBERED = re.compile(r" \(stream \d+\)$")


def key(device: int, stream: int, rank: int = NONE) -> str:
    """Return the key under which a stream's name is stored."""
    return f"{device}/{stream}" if rank == NONE else f"{rank}/{device}/{stream}"


def label(meta: Mapping[str, Any], device: int, stream: int, rank: int | None = NONE) -> str:
    """Return how a stream is shown: "h2d (stream 13)", or "stream 13" if it has no name."""
    names = meta.get(KEY) or {}
    name = names.get(key(device, stream, NONE if rank is None else rank)) or names.get(key(device, stream))
    return f"{name} (stream {stream})" if name else f"stream {stream}"


def name_in(shown: str) -> str | None:
    """Return the name in a label of ours or of another tool; None for a plain number."""
    return None if _PLAIN.fullmatch(shown) else _NUMBERED.sub("", shown).strip() or None


def of_rank(names: Mapping[str, str] | None, rank: int) -> dict[str, str]:
    """Return the names of one rank's file with the keys of a merged run."""
    return {text if text.count("/") > 1 else f"{rank}/{text}": name for text, name in (names or {}).items()}
