"""The frame of our pages: one file with its style and its script, which the browser is told to fetch nothing for.

The plots are hand-written SVG and canvas: a page of 200 000 kernels is under a megabyte and drawn in a fraction of a
second, where a plotting library alone would be four megabytes of script to parse before the first line.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from html import escape
from importlib import resources

SWITCH = "<button id='theme' type='button' aria-label='Switch between light and dark'>◐</button>"
"""For the reader who wants the other: every page has it once, page.js does the rest."""
_SCRIPTS = ("page.js", "timeline.js")


def document(title: str, body: str, *, data: str = "{}", style: str = "") -> str:
    """A whole page. `data` is the JSON that the timeline draws, `style` what is wanted beside the common one."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{template('run.css')}{style}</style></head>"
        f'<body><main>{body}</main><div id="tip" role="status" hidden></div>'
        f'<script type="application/json" id="data">{data}</script><script>{_script()}</script></body></html>\n'
    )


def policy() -> str:
    """What a page may do, said to the browser too: run this one script, and fetch nothing."""
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


@cache
def _script() -> str:
    """All scripts as one, in a scope of their own."""
    parts = "\n".join(template(name) for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


@cache
def template(name: str) -> str:
    """A file of the folder templates."""
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")
