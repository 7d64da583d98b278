"""Pages that live outside docs/ (the proof page, the change log, the exercises) on the site, and links to them.

In the repository `docs/energy.md` links to `../benchmarks/README.md`, as GitHub and editors need it. mkdocs knows files
below docs/ only, so each page named here is added to the site under a name of its own, and links are rewritten to it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "benchmarks/README.md": "proof.md",
    "examples/exercises/README.md": "exercises/index.md",
    "examples/exercises/ex01-power-measurement/README.md": "exercises/ex01-power-measurement.md",
    "examples/exercises/ex02-energy-efficiency/README.md": "exercises/ex02-energy-efficiency.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
_HOME = {site: source for source, site in PAGES.items()}
_LINK = re.compile(r"(\]\()([^)#\s]+\.md)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, site in PAGES.items():
        files.append(File.generated(config, site, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links between pages inside and outside docs/ at where both are on the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(_HOME.get(here, f"docs/{here}"))

    def moved(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        site = PAGES.get(target, target.removeprefix("docs/"))
        return f"{found[1]}{posixpath.relpath(site, posixpath.dirname(here) or '.')}{found[3] or ''}{found[4]}"

    return _LINK.sub(lambda m: m[0] if "://" in m[2] else moved(m), markdown)
