"""What models are fed: pages of Python's own manual, which every Python brings along, as the demo model's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGES = (
    *("specialnames", "compound", "types", "formatstrings"),
    *("string-methods", "debugger", "attribute-access", "typesseq"),
)
"""Each long enough for a request of 2 000 tokens, which begins at its first line."""


def make_requests(model: Path, count: int, num_prompt: int, num_tokens: int) -> list[dict[str, Any]]:
    """`count` requests of `num_prompt` tokens to read and `num_tokens` to decode."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = []
    for number in range(count):
        _, _, text = topics[PAGES[number % len(PAGES)]].partition("\n\n")  # behind its title, underlined by asterisks
        ids = tokenizer.encode(text).ids
        first = number // len(PAGES) * (num_prompt + num_tokens)
        part = ids[first : first + num_prompt + num_tokens]
        if len(part) < num_prompt + num_tokens:
            raise ValueError(f"--requests {count} of {num_prompt} + {num_tokens} tokens: the pages are not that long")
        found.append({"ids": part, "num_prompt": num_prompt})
    return found


def record_requests(model: Any, requests: list[dict[str, Any]], folder: Path, *, full: bool = True) -> None:
    """Record what a loaded model routes while it is fed these requests, as a trace in a new folder."""
    from expertly_lab.playing import feed
    from expertly_lab.recording import record

    with record(model, folder, full=full, name="demo") as recording:
        for one in requests:
            recording.begin_request(num_prompt_tokens=one["num_prompt"])
            feed(model, one["ids"], one["num_prompt"])
