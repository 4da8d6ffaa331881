"""How an answer looks in a terminal."""

from __future__ import annotations

import io
import re

import pytest

from expertly.cli import rendering
from expertly.cli.rendering import shown

ANSWER = """\
# Title

Roses are **red**,
violets `blue` <b>.

3. three
4. four

   of two paragraphs

| a | b |
| --- | --- |
| 1 | 2 |

```python
def f():

    return 1
```
The end"""

LOOKS = """\
                 Title

Roses are red,
violets blue <b>.

 3 three
 4 four
   of two paragraphs

 a  b
 ────
 1  2

def f():

    return 1

The end
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def seen(pieces: list[str], is_plain: bool = False, out: io.StringIO | None = None) -> str:
    out = out or Terminal()
    with shown(out, is_plain) as write:
        for piece in pieces:
            write(piece)
    return out.getvalue()


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which the block that is being written is not drawn before its end."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(rendering, "DRAW_S", 1e9)


@pytest.mark.parametrize("num", [1, 7, 1000])
def test_markdown_looks_the_same_however_it_comes(narrow: None, num: int) -> None:
    """Lines end where the answer's do, blocks are apart by one line, and code can be copied."""
    drawn = seen([ANSWER[at : at + num] for at in range(0, len(ANSWER), num)])
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", drawn)
    assert [line.rstrip() for line in text.strip("\n").split("\n")] == LOOKS.rstrip("\n").split("\n")
    assert "\x1b[1m" in drawn, "what is bold is"


def test_a_block_is_drawn_while_it_is_written_and_of_a_long_one_its_end(
    narrow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "DRAW_S", 0.0)
    monkeypatch.setenv("LINES", "10")
    drawn = seen(["```\n", *(f"line {number}\n" for number in range(30))])
    last = drawn.split("line 29")[-3].split("\x1b[2K")[-1]
    assert "line 21" in last and "line 20" not in last


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_model_cannot_move_the_cursor(narrow: None, is_plain: bool) -> None:
    drawn = seen(["a\x1b]52;c;aGk=\x07b\x9b2J\r\nc\x08"], is_plain)
    assert "\x1b]" not in drawn and "\x9b" not in drawn and "\x07" not in drawn and "\x08" not in drawn


def test_plain_text_is_as_it_is(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(["**a**\n", "b"], is_plain=True) == "**a**\nb\n"
    assert seen(["**a**\x1b"], out=io.StringIO()) == "**a**\x1b\n", "a file gets every character"
    monkeypatch.setenv("TERM", "dumb")
    assert seen(["**a**"]) == "**a**\n"
