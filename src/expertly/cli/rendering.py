"""How an answer looks in a terminal: as Markdown that is drawn while it comes, or as it is."""

from __future__ import annotations

import os
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import ClassVar, TextIO

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Markdown
from rich.segment import Segment
from rich.syntax import Syntax

DRAW_S = 0.1  # how often the block that is being written is drawn

CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}") | {13: None}
"""Characters that a model must not send to a terminal: they move its cursor or fill its clipboard."""

_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


@contextmanager
def shown(out: TextIO, is_plain: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows the next piece of an answer. `is_plain`: as it is, as also where `out` is no terminal."""
    is_terminal = out.isatty()
    if is_terminal and not is_plain and os.environ.get("TERM") not in ("dumb", "unknown"):
        blocks = _Blocks(Console(file=out))
        drawing = Live(console=blocks.console, auto_refresh=False, transient=True, redirect_stdout=False)
        with _without_echo(), drawing as live:
            yield lambda piece: blocks.add(piece.translate(CONTROLS), live)
            blocks.end(live)
        return

    def write(piece: str) -> None:
        out.write(piece.translate(CONTROLS) if is_terminal else piece)
        out.flush()

    yield write
    write("\n")


@contextmanager
def _without_echo() -> Iterator[None]:
    """Keys that are pressed, as Ctrl-C, leave no mark: it would move what is drawn. They are read later."""
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        is_in_front = os.tcgetpgrp(terminal) == os.getpgrp()  # else the terminal would stop this process
    except (OSError, ValueError, termios.error):
        is_in_front = False
    if not is_in_front:
        yield
        return
    local = before[3] & ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, [*before[:3], local, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


class _Blocks:
    """Prints each block of Markdown once no further text can change it. The last one is drawn again and again."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._text = ""  # of the last block
        self._num_printed = 0
        self._drawn_s = 0.0

    def add(self, piece: str, live: Live) -> None:
        self._text += piece
        if "\n" in piece:
            lines, starts = self._text.split("\n"), _starts(self._text)
            for start, end in pairwise(starts):
                self._print("\n".join(lines[start:end]))
            self._text = "\n".join(lines[starts[-1] :]) if starts else self._text
        if time.monotonic() - self._drawn_s >= DRAW_S:
            live.update(_Lines(self._text, self.console.height - 1), refresh=True)
            self._drawn_s = time.monotonic()

    def end(self, live: Live) -> None:
        live.update("", refresh=True)
        if self._text.strip():
            self._print(self._text)

    def _print(self, block: str) -> None:
        if self._num_printed:
            self.console.print()
        self._num_printed += 1
        self.console.print(_Lines(block))


def _starts(text: str) -> list[int]:
    """The lines that blocks begin with."""
    tokens = _PARSER.parse(text)
    return [token.map[0] for token in tokens if token.map is not None and token.level == 0 and token.nesting >= 0]


class _Code(CodeBlock):
    """Without the space at the left that would be copied with it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(str(self.text).rstrip(), self.lexer_name, theme=self.theme, word_wrap=True)


class _Markdown(Markdown):
    """Breaks lines where the text does, as poems and addresses need it; what looks like HTML is text."""

    elements: ClassVar = Markdown.elements | {"fence": _Code, "code_block": _Code}

    def __init__(self, text: str) -> None:
        super().__init__(text, code_theme="ansi_dark", hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for child in (child for token in self.parsed for child in token.children or ()):
            child.type = "hardbreak" if child.type == "softbreak" else child.type


class _Lines:
    """The last so many lines of a block, without empty ones around it."""

    def __init__(self, text: str, most: int = sys.maxsize) -> None:
        self._text, self._most = text, most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_Markdown(self._text), options, pad=False)
        is_empty = [not "".join(segment.text for segment in line).strip() for line in lines]
        while is_empty and is_empty[-1]:
            is_empty.pop()
        for line in lines[: len(is_empty)][[*is_empty, False].index(False) :][-self._most :]:
            yield from (*line, Segment.line())
