"""When requests arrive and how long they are: the CSV of the Azure LLM inference traces."""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_TOKENS = 10**9

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?", re.ASCII)
_WHOLE = re.compile(r"\d{1,10}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in the order in which they arrive."""

    times_ns: npt.NDArray[np.int64]  # [N], from the first request; rising or equal
    prompt_tokens: npt.NDArray[np.int64]  # [N]
    output_tokens: npt.NDArray[np.int64]  # [N]

    def __len__(self) -> int:
        return len(self.times_ns)


def read_arrivals(path: Path) -> Arrivals:
    """The requests of a CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens; others are ignored.

    Raises ConfigError naming file, line, column and value, also where a request arrives before the one above it: the
    published files are in order, and sorting what is not would hide that something else is wrong with it.
    """
    times, prompts, outputs = array("q"), array("q"), array("q")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            for where, row in _rows(path, file):
                time_ns = _time_ns(where, row[0])
                if times and time_ns < times[-1]:
                    raise ConfigError(f"{where}, TIMESTAMP={row[0]!r:.40}: earlier than the line before; sort the file")
                times.append(time_ns)
                prompts.append(_tokens(where, COLUMNS[1], row[1]))
                outputs.append(_tokens(where, COLUMNS[2], row[2]))
    except OSError as error:
        raise ConfigError(f"arrivals {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"arrivals {path}: not UTF-8 text ({error.reason})") from None
    if not times:
        raise ConfigError(f"arrivals {path}: no requests in it; accepted: a CSV file with {', '.join(COLUMNS)}")
    times_ns, prompt_tokens, output_tokens = (np.array(column, dtype=np.int64) for column in (times, prompts, outputs))
    return Arrivals(times_ns - times_ns[0], prompt_tokens, output_tokens)


def _rows(path: Path, file: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Where each request is, for messages, and its three fields."""
    reader = csv.reader(file, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        missing = [name for name in COLUMNS if header.count(name) != 1]
        if missing:
            found = ", ".join(header)
            raise ConfigError(f"arrivals {path}: line 1: must name the column {missing[0]} once, has: {found:.80}")
        places = [header.index(name) for name in COLUMNS]
        for row in reader:
            where = f"arrivals {path}: line {reader.line_num}"
            if not row:
                continue
            if len(row) != len(header):
                raise ConfigError(f"{where}: {len(row)} fields, but line 1 names {len(header)}")
            yield where, [row[place].strip() for place in places]
    except csv.Error as error:
        raise ConfigError(f"arrivals {path}: line {reader.line_num}: not CSV ({error})") from None


def _time_ns(where: str, text: str) -> int:
    match = _TIMESTAMP.fullmatch(text)
    try:
        if match is None or not 1970 <= int(match[1][:4]) < 2200:
            raise ValueError(text)
        second = datetime.fromisoformat(f"{match[1]} {match[2]}").replace(tzinfo=timezone.utc)
    except ValueError:
        accepted = "accepted: 2023-11-16 18:15:46.6805900 (UTC, up to 9 decimals)"
        raise ConfigError(f"{where}, TIMESTAMP={text!r:.40}: no time; {accepted}") from None
    since = second - datetime(1970, 1, 1, tzinfo=timezone.utc)
    return (since.days * 86400 + since.seconds) * 10**9 + int((match[3] or "").ljust(9, "0"))


def _tokens(where: str, column: str, text: str) -> int:
    if not _WHOLE.fullmatch(text) or int(text) > MAX_TOKENS:
        raise ConfigError(f"{where}, {column}={text!r:.40}: must be a whole number from 0 to {MAX_TOKENS}")
    return int(text)
