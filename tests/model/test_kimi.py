"""Kimi's tokenizer, as it is published, splits and decodes text as tiktoken does with the pattern of its source."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from expertly.core.errors import CheckpointError
from expertly.model.loading import load_tokenizer

PARTS = [
    r"""[\p{Han}]+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""",
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
    r"""\s*[\r\n]+""",
    r"""\s+(?!\S)""",
    r"""\s+""",
]
CODE = f"raise SystemExit('this code was run')\n\nclass TikTokenTokenizer:\n    pat_str = '|'.join({PARTS!r})\n"
TEXTS = [
    "你好，世界！今天是2026年11月30日。",
    "Kimi說：「It's 3141592 tokens」",
    "def f(x):\n    return x**2  # Größe\r\n\n\tx = 'ß'\n",
    "HelloWorld CamelCase ÀÉÎ I'LL we've 12345 한국어 にほんご العربية 🙂🇩🇪",
    "  leading,  double  spaces \n\n trailing   ",
    "",
]
SPECIAL = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 4}
"""By their places behind the ranks."""


def make_ranks() -> dict[bytes, int]:
    """All bytes, and what pairs of a text's bytes, of these and so on make."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for text in TEXTS * 2:
        raw = text.encode()
        for width in (2, 3, 4, 6):
            for at in range(0, len(raw) - width, 2):
                left, right = raw[at : at + width // 2], raw[at + width // 2 : at + width]
                if left in ranks and right in ranks:
                    ranks.setdefault(left + right, len(ranks))
    return ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ranks = make_ranks()
    lines = [base64.b64encode(raw) + b" %d" % number for raw, number in ranks.items()]
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "tokenization_kimi.py").write_text(CODE)
    tokens = {str(len(ranks) + place): {"content": text, "special": True} for text, place in SPECIAL.items()}
    settings = {
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": tokens,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
        "chat_template": "{{ messages[0]['content'] }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_it_is_tiktoken_with_the_published_pattern(folder: Path) -> None:
    ranks = make_ranks()
    tokens = {text: len(ranks) + place for text, place in SPECIAL.items()}
    encoding = tiktoken.Encoding("kimi", pat_str="|".join(PARTS), mergeable_ranks=ranks, special_tokens=tokens)
    tokenizer = load_tokenizer(folder)
    for text in (*TEXTS, "[BOS]" + "<|im_end|>".join(TEXTS)):
        ids = encoding.encode(text, allowed_special="all")
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
        assert tokenizer.decode(ids) == text


def test_han_numbers_and_words_are_apart_and_special_tokens_have_their_numbers(folder: Path) -> None:
    tokenizer, num = load_tokenizer(folder), len(make_ranks())
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("世界12345Hello it's")
    assert [(begin, end) for _, (begin, end) in pieces] == [(0, 2), (2, 5), (5, 7), (7, 12), (12, 17)]
    assert tokenizer("<|im_end|>")["input_ids"] == [num + 4]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (num, num + 1)
    assert tokenizer.decode([num + 2]) == f"<|reserved_token_{num + 2}|>"
    assert tokenizer.decode([num, 72, 105, num + 1], skip_special_tokens=True) == "Hi"
    said = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert said == "Hi"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("tokenization_kimi.py", "pat_str = evil()", "has no pat_str that is a join of texts"),
        ("tokenization_kimi.py", "(" * 5000, "has no pat_str"),
        ("tiktoken.model", "AA== 0\nAQ== 2\n", "must have each single byte"),
        ("tokenization_kimi.py", "pat_str = '|'.join(['(', '[a'])", "the tokenizer cannot be read"),
        ("tiktoken.model", "AA== zero\n", "must be bytes in base 64 and a number"),
    ],
)
def test_files_that_are_not_as_published_are_refused(folder: Path, name: str, text: str, problem: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=problem):
        load_tokenizer(folder)


@pytest.mark.parametrize("number", ["3", "x", "99999999"])
def test_an_added_token_is_behind_the_ranks(folder: Path, number: str) -> None:
    path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text())
    settings["added_tokens_decoder"][number] = {"content": "<x>"}
    path.write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=rf"added_tokens_decoder\['{number}'\]"):
        load_tokenizer(folder)


def test_thousands_of_reserved_tokens_are_read_at_once(folder: Path) -> None:
    """Each by itself took 16 s for 4 000, and hours for as many as there may be."""
    ranks = [bytes([first]) for first in range(256)] + [bytes([1 + i // 256, i % 256]) for i in range(4000)]
    (folder / "tiktoken.model").write_bytes(
        b"".join(base64.b64encode(raw) + b" %d\n" % number for number, raw in enumerate(ranks))
    )
    path, last = folder / "tokenizer_config.json", 2 * len(ranks) - 1
    settings: dict[str, Any] = json.loads(path.read_text())
    settings["added_tokens_decoder"] = {str(last): {"content": "<|last|>", "special": True}}
    path.write_text(json.dumps({name: settings[name] for name in ("auto_map", "added_tokens_decoder")}))
    began_s = time.process_time()
    assert load_tokenizer(folder)("<|last|>")["input_ids"] == [last]
    assert time.process_time() - began_s < 5


def test_two_added_tokens_of_one_text_are_refused(folder: Path) -> None:
    """The second would have the number of the first, and all behind it another one."""
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"<|im_end|>"', '"[EOS]"'))
    with pytest.raises(CheckpointError, match=r"'\[EOS\]' is also another token"):
        load_tokenizer(folder)


def test_other_code_is_refused(folder: Path) -> None:
    (folder / "tokenization_kimi.py").unlink()
    with pytest.raises(CheckpointError, match="the tokenizer is code, which is not run"):
        load_tokenizer(folder)
