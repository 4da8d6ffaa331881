"""A report as a reader finds it: its tables' cells, what its pictures show, its text."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser


@dataclass
class Found(HTMLParser):
    """What was found in a page."""

    tables: list[list[list[str]]] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    text: str = ""
    links: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    _within: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href") and value]
        self.pictures += [value for name, value in attrs if name == "alt" and value]
        if tag in ("meta", "link", "img"):
            return
        self._within.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag in ("h1", "h2", "h3"):
            self.headings.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._within.pop() == tag, "every element ends where it should"

    def handle_data(self, data: str) -> None:
        self.text += data
        for tag in reversed(self._within):
            if tag in ("td", "th"):
                self.tables[-1][-1][-1] += data
            elif tag in ("h1", "h2", "h3"):
                self.headings[-1] += data
            if tag != "small":
                break


def read(page: str) -> Found:
    result = Found()
    result.feed(page)
    result.close()
    return result
