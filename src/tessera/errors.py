"""All exceptions that Tessera raises.

::

    TesseraError                 every error of ours; carries what, why, fix
    ├── ArgumentError            a wrong argument (also a ValueError)
    │   ├── UnitError            a quantity that cannot be parsed; shows the position
    │   ├── BadDevice            a device file that cannot be used; names the file and the key
    │   ├── PolicyError          a policy that cannot be used; names the file and the key
    │   ├── TileError            a tile that cannot work; names the nearest one that does
    │   └── ToleranceError       an error bound that no precision meets
    ├── SensorError              something about a sensor
    │   ├── SensorUnavailable    the library, device or file does not exist
    │   ├── SensorPermission     it exists, but this user may not read it
    │   └── SensorLost           it answered before and no longer does
    ├── MeasurementError         a measurement that is not possible
    ├── CaptureError             a model that cannot be captured; names the line
    │   └── DataDependent        its control flow depends on values that nothing computed
    ├── PredictionError          a prediction that cannot be made: a chip that lacks a figure, a precision
    │   └── DoesNotFit           a model larger than the chip's memory
    ├── RecordingError           a recorded file that cannot be read
    ├── RewriteError             a rewrite or an optimisation that cannot be made, or that changed the result
    ├── ActuatorError            hardware that cannot be controlled
    │   └── ActuatorPermission   it could be, but this user may not
    ├── ScheduleError            a schedule that cannot be held
    ├── GovernorError            a governor that cannot be reached, or that cannot work
    │   └── GovernorRefusal      it says no; `code` says why
    ├── MigrationError           a job that cannot be saved, or not go on from what was saved
    └── MissingExtra             an optional dependency is needed (also an ImportError)

Every message says what happened, why, and what to do. These parts are attributes, so that a renderer can lay them out
and a test can check that all three are there.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import sys
import warnings
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeGuard


class TesseraError(Exception):
    """Base of all Tessera errors: `what` happened, `why`, and the `fix` to try."""

    def __init__(self, what: str, *, why: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.why = why
        self.fix = fix
        super().__init__(what)

    def __reduce__(self) -> tuple[Any, ...]:
        # Some subclasses build `what` from other arguments, so unpickling (an error from a worker process) must not
        # call their __init__ with `what`.
        return _restore_error, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


def _restore_error(kind: type[TesseraError], args: tuple[Any, ...], state: dict[str, Any]) -> TesseraError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ArgumentError(TesseraError, ValueError):
    """A wrong argument."""


class UnitError(ArgumentError):
    """A quantity such as "275W" that cannot be parsed; shows where it goes wrong."""

    def __init__(self, text: str, position: int, problem: str, accepted: str) -> None:
        self.text = text
        self.position = position
        # A line break or tab in the text would shift the caret away from its character.
        line = "".join(c if c.isprintable() else " " for c in text)
        caret = " " * (position + 4) + "^"
        super().__init__(f"cannot read {text!r}: {problem}\n    {line}\n{caret}", fix=f"accepted: {accepted}")


class BadDevice(ArgumentError):
    """A device file that cannot be used; `what` names the file and the key."""


class PolicyError(ArgumentError):
    """A power policy that cannot be used; `what` names the file and the key."""


class TileError(ArgumentError):
    """A tile that cannot work; `fix` names the nearest one that does."""


class ToleranceError(ArgumentError):
    """An error bound that no precision meets."""


class SensorError(TesseraError):
    """Something about a sensor."""


class SensorUnavailable(SensorError):
    """The sensor's library, device or file does not exist."""


class SensorPermission(SensorError):
    """The sensor exists, but this user may not read it."""


class SensorLost(SensorError):
    """The sensor answered before and no longer does."""


class MeasurementError(TesseraError):
    """A measurement that is not possible."""


class CaptureError(TesseraError):
    """A model that cannot be captured; `what` names the line."""


class DataDependent(CaptureError):
    """The program asks for a value that nothing computed: its control flow depends on data."""


class PredictionError(TesseraError):
    """A prediction that cannot be made."""


class DoesNotFit(PredictionError):
    """A model larger than the chip's memory."""


class RecordingError(TesseraError):
    """A recorded file that cannot be read."""


class RewriteError(TesseraError):
    """A rewrite or an optimisation that cannot be made, or that changed the result."""


class ActuatorError(TesseraError):
    """Hardware that cannot be controlled: no such control, a refusal, a value out of range."""


class ActuatorPermission(ActuatorError):
    """The control exists, but this user may not use it."""


class ScheduleError(TesseraError):
    """A schedule that cannot be held."""


class GovernorError(TesseraError):
    """A governor that cannot be reached, or that cannot work."""


class GovernorRefusal(GovernorError):
    """A governor says no. `code` is for programs: unknown_node, unknown_job, too_large, conflict, busy ..."""

    def __init__(self, code: str, what: str, *, why: str | None = None, fix: str | None = None) -> None:
        super().__init__(what, why=why, fix=fix)
        self.code = code


class MigrationError(TesseraError):
    """A job that cannot be saved, or cannot go on from what was saved."""


class MissingExtra(TesseraError, ImportError):
    """An optional dependency is needed for what was asked."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        fix = f"pip install {package}, or in the clone: pip install '.[{extra}]'"
        if extra == "models":  # each of them brings a torch of its own choice
            fix += " -c constraints.txt, which keeps the tested versions"
        super().__init__(f"{purpose} needs the package {package!r}, which is not installed", fix=fix)


@contextlib.contextmanager
def needs_extra(package: str, extra: str, purpose: str) -> Iterator[None]:
    """Import an optional dependency in the body; if it is not installed, the error says how to install it.

    >>> with needs_extra("pandas", "frame", "PowerTrace.to_frame"):
    ...     import pandas
    """
    try:
        yield
    except ImportError as exc:
        raise MissingExtra(package, extra, purpose) from exc


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the nearest known word, or an empty string."""
    import difflib

    # Leading dashes do not make options similar: --bogus is not --out.
    lowered = {k.lower().lstrip("-"): k for k in known}
    typed = word.lower().lstrip("-")
    near = difflib.get_close_matches(typed, lowered, n=9, cutoff=0.6)
    if not near:
        return ""
    # difflib counts common letters, which is not the distance between words. Among words with the same distance, prefer
    # the one with the same beginning, since mistakes are made late in a word.
    nearest = min(near, key=lambda k: (_count_edits(typed, k), -_common_prefix(typed, k), abs(len(k) - len(typed))))
    return f"; did you mean {lowered[nearest]!r}?"


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ArgumentError, with the nearest word, if a value is not one of some words."""
    words = tuple(choices)
    if value not in words:
        near = did_you_mean(value, words) if isinstance(value, str) else ""
        raise ArgumentError(f"{name}={value!r} is not known{near}", fix=f"one of: {', '.join(words)}")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number (numpy's too) and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer (numpy's too) and not a bool."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def check_positive(name: str, value: object, *, fix: str | None = None) -> None:
    """Raise ArgumentError if a value is not a finite number above 0; text is none, whatever it says."""
    if not (is_number(value) and 0 < value < math.inf):
        raise ArgumentError(f"{name}={value!r} is not a positive number", fix=fix)


def _common_prefix(one: str, two: str) -> int:
    """Return how many letters at the beginning are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def _count_edits(one: str, two: str) -> int:
    """Return how many letters must be added, dropped, replaced or swapped to turn one word into the other."""
    older: list[int] = []
    last = list(range(len(two) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(two, 1):
            cost = min(last[j] + 1, row[-1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == two[j - 2] and b == one[i - 2]:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
        older, last = last, row
    return last[-1]


def find_caller() -> tuple[str, int, int]:
    """Return file, line and `stacklevel` (for our caller) of the first frame outside this package and contextlib."""
    ours, level, frame = str(Path(__file__).parent), 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((ours, contextlib.__file__)):
        frame, level = frame.f_back, level + 1
    return frame.f_code.co_filename, frame.f_lineno, level


def warn_caller(text: str) -> None:
    """Warn at the line of the user's program that called us."""
    warnings.warn(text, UserWarning, stacklevel=find_caller()[2])
