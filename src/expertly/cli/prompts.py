"""Prompts from a JSON Lines file: one object a line with `prompt` and, if known, `category`."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from expertly.core.errors import ConfigError

_ACCEPTED = 'accepted: {"prompt": "text"} or {"prompt": "text", "category": "text"}, one object a line'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to be. Lines are numbered from 1."""

    line: int
    text: str
    category: str | None


def read_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file, of a .gz file, or of stdin ("-"). Blank lines and other keys are ignored.

    Raises ConfigError naming the file, the line and what is accepted.
    """
    prompts: list[Prompt] = []
    where = "stdin" if source == "-" else source
    try:
        with _opened(source) as file:
            for prompt in _parse(where, file):
                prompts.append(prompt)
                if len(prompts) == limit:
                    break
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"prompts {where}: cannot be read ({reason})") from None
    if not prompts:
        raise ConfigError(f"prompts {where}: holds no prompt; {_ACCEPTED}")
    return prompts


@contextlib.contextmanager
def _opened(source: str) -> Iterator[Iterable[bytes]]:
    if source == "-":
        yield sys.stdin.buffer if isinstance(sys.stdin, io.TextIOWrapper) else io.BytesIO(sys.stdin.read().encode())
    elif source.endswith(".gz"):
        with gzip.open(source, "rb") as compressed:
            yield compressed
    else:
        with open(source, "rb") as file:
            yield file


def _parse(where: str, lines: Iterable[bytes]) -> Iterator[Prompt]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise _error(where, number, f"not UTF-8 ({error.reason})") from None
        except (ValueError, RecursionError) as error:
            raise _error(where, number, f"not JSON ({error})") from None
        if not isinstance(raw, dict):
            raise _error(where, number, f"{raw!r:.60} is no object")
        prompt, category = raw.get("prompt"), raw.get("category")
        if not isinstance(prompt, str) or not prompt:
            raise _error(where, number, f"prompt={prompt!r:.60}" if "prompt" in raw else "no prompt")
        if category is not None and not isinstance(category, str):
            raise _error(where, number, f"category={category!r:.60}")
        for name, text in (("prompt", prompt), ("category", category or "")):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise _error(where, number, f"{name}: holds half of a surrogate pair, which is no character") from None
        yield Prompt(number, prompt, category)


def _error(where: str, line: int, problem: str) -> ConfigError:
    return ConfigError(f"prompts {where}, line {line}: {problem}; {_ACCEPTED}")
