"""`Note`: a sentence for the reader of a result, with a kind that tells a program what to do with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

NoteKind = Literal["info", "omission", "time_limit", "no_accelerator", "no_torch", "fitted", "replaced"]
"""`omission`: events or steps that are not in the result; `time_limit`: tracing stopped at its limit;
`no_accelerator`: torch sees none; `no_torch`: the program did not import it; `fitted`: joules within a power sample
were divided by a fit; `replaced`: a chip runs the program in another format or launch than asked. Everything else is
`info`."""


class Note(str):
    """A text with a kind. It is a `str`, so a plain text counts as a note of kind `info`."""

    __slots__ = ("kind",)
    kind: NoteKind

    def __new__(cls, text: str, kind: NoteKind = "info") -> Note:
        """Make a note of a kind."""
        note = super().__new__(cls, text)
        note.kind = kind
        return note

    def __reduce__(self) -> tuple[Any, ...]:
        return Note, (str(self), self.kind)


def kind_of(note: str) -> NoteKind:
    """Return the kind of a note."""
    return note.kind if isinstance(note, Note) else "info"


def name_several(names: Sequence[str]) -> str:
    """Join a few names; if there are more, return the first, the last and how many."""
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]} ({len(names)})"


def order_notes(notes: Iterable[str]) -> list[str]:
    """Return each note once; notes about omissions come last."""
    return sorted(dict.fromkeys(notes), key=lambda note: kind_of(note) == "omission")


def kinds_by_text(notes: Iterable[str]) -> dict[str, str]:
    """Return the kinds of the notes that are not `info`; a run file keeps them beside the texts."""
    return {str(note): kind_of(note) for note in notes if kind_of(note) != "info"}


def restore_kinds(texts: Iterable[str], kinds: Mapping[str, NoteKind]) -> list[str]:
    """Rebuild notes from the texts and kinds that a run file has."""
    return [Note(text, kinds[text]) if text in kinds else text for text in texts]
