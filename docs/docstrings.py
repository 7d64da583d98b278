"""Docstrings as Markdown for the reference: a doctest becomes a fenced block, and a lone `::` goes.

Docstrings are written for `help()`. In Markdown `>>>` would be a quote in a quote in a quote.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"(?:^[ ]*(?:>>>|\.\.\.).*\n?)+", re.MULTILINE)
_LITERAL = re.compile(r"^::\n", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites the text of every docstring once, when its object is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of one object."""
        if obj.docstring is not None:
            text = _DOCTEST.sub(lambda m: f"\n```pycon\n{m[0].rstrip()}\n```\n\n", obj.docstring.value + "\n")
            obj.docstring.value = _LITERAL.sub("", text).strip()
