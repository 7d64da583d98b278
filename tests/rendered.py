"""What is rendered, read back: a screen as text, a page as its tags."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from rich.console import Console, RenderableType


def text_of(rendered: RenderableType, width: int = 100) -> str:
    """What a terminal of this width shows, without colours."""
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(rendered, crop=False)
    return captured.get()


class StrictParser(HTMLParser):
    """Fails on tags that do not nest, and keeps what a page would fetch and what it shows as text."""

    void = frozenset({"meta", "line", "circle", "rect", "path", "polyline", "br", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetches: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetches += [str(v) for k, v in attrs if k in ("src", "href", "srcset", "data", "action")]
        self.ids += [str(v) for k, v in attrs if k == "id"]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text.append(data)


def check_page(html: str) -> StrictParser:
    """The page, read: its tags nest, it fetches nothing, and no id is there twice."""
    parser = StrictParser()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert parser.fetches == []
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttp|import\(", html)
    assert len(parser.ids) == len(set(parser.ids))
    return parser
