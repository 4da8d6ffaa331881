"""Kimi's tokenizer, whose code is not run: tiktoken's ranks of bytes, a pattern in its source, tokens in its config."""

from __future__ import annotations

import ast
import base64
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from expertly.core.errors import CheckpointError
from expertly.core.untrusted import TOKENIZER_CONFIG, VOCABULARY, Bounds, read_file, read_json_object
from expertly.store.packed import KIMI_CODE

_CLASS, _RANKS = "tokenization_kimi.TikTokenTokenizer", "tiktoken.model"
_SOURCE = Bounds(1 << 20)
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def names_kimi(folder: Path, by_code: object) -> bool:
    """Whether the class that a tokenizer's `auto_map` names is Kimi's, and what it reads is there."""
    is_named = by_code == _CLASS or (isinstance(by_code, list) and by_code[:1] == [_CLASS])
    return is_named and all((folder / name).is_file() for name in (KIMI_CODE, _RANKS))


def kimi_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Raises CheckpointError where a file of it is not as published."""
    path, ranks = folder / "tokenizer_config.json", _ranks(folder)
    settings = read_json_object(path, CheckpointError, TOKENIZER_CONFIG)
    of_config = settings.get("added_tokens_decoder")
    added: dict[int, AddedToken] = {}
    for number, token in of_config.items() if isinstance(of_config, dict) else ():
        content = token.get("content") if isinstance(token, dict) else None
        if not number.isdecimal() or not isinstance(content, str) or not 0 <= int(number) - len(ranks) < len(ranks):
            said = f"added_tokens_decoder[{number!r:.80}]={token!r:.80}"
            raise CheckpointError(f"{path}: {said}: must be a token behind {len(ranks)}")
        added[int(number)] = AddedToken(content, special=token.get("special", True) is True, normalized=False)
    made = _Converter(folder / _RANKS, _pattern(folder / KIMI_CODE), ranks).converted()
    numbers = range(len(ranks), max(added, default=-1) + 1)
    reserved = partial(AddedToken, special=True, normalized=False)
    tokens = [added.get(number) or reserved(f"<|reserved_token_{number}|>") for number in numbers]
    made.add_tokens(tokens)  # at once: each call makes a table of all anew
    for number, token in zip(numbers, tokens, strict=True):
        if made.token_to_id(token.content) != number:
            raise CheckpointError(
                f"{path}: added_tokens_decoder[{number}]: {token.content!r:.80} is also another token"
            )
    named = {name: text for name in _NAMED if isinstance(text := settings.get(name), str)}
    template = folder / "chat_template.jinja"
    written = template.read_text() if template.is_file() else settings.get("chat_template")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **named)
    tokenizer.chat_template = written if isinstance(written, str) else None
    return tokenizer


def _ranks(folder: Path) -> dict[bytes, int]:
    """Of all tokens but special ones: their bytes, in base 64, and numbers from 0."""
    path = folder / _RANKS
    lines = read_file(path, VOCABULARY, CheckpointError).split(b"\n")
    ranks: dict[bytes, int] = {}
    for line in filter(None, lines):
        text, _, number = line.partition(b" ")
        try:
            ranks[base64.b64decode(text, validate=True)] = int(number)
        except ValueError:
            raise CheckpointError(f"{path}: line {line!r:.80}: must be bytes in base 64 and a number") from None
    if sorted(ranks.values()) != [*range(len(ranks))] or not {bytes([byte]) for byte in range(256)} <= ranks.keys():
        raise CheckpointError(f"{path}: must have each single byte, and all numbers below those of its tokens, once")
    return ranks


def _pattern(path: Path) -> str:
    """`pat_str` of the class, a join of texts."""
    try:
        tree: Any = ast.parse(read_file(path, _SOURCE, CheckpointError))
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "pat_str":
                call: Any = node.value
                between, parts = ast.literal_eval(call.func.value), ast.literal_eval(call.args[0])
                return str(between.join(parts))
    except (SyntaxError, ValueError, AttributeError, IndexError, TypeError, RecursionError, MemoryError):
        pass
    raise CheckpointError(f"{path}: has no pat_str that is a join of texts, by which the tokenizer splits text")


class _Converter(TikTokenConverter):  # type: ignore[misc]
    """Reads no file: the package tiktoken would be asked to."""

    def __init__(self, path: Path, pattern: str, ranks: dict[bytes, int]) -> None:
        super().__init__(str(path), pattern)
        self._ranks = ranks

    def load_tiktoken_bpe(self, tiktoken_url: str) -> dict[bytes, int]:  # type: ignore[override]
        return self._ranks
