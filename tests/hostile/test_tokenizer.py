"""A tokenizer's files, edited: a run ends in one line that names the file, or in text."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expertly import api
from expertly.core.errors import CheckpointError
from expertly.model import loading
from tests.families import make_checkpoint
from tests.hostile.cases import edited, run_command
from tests.hostile.conftest import RunChanged

SETTINGS, VOCABULARY = "tokenizer_config.json", "tokenizer.json"
UNREAD = "the tokenizer cannot be read: "


def settings(**values: Any) -> Callable[[Path], None]:
    return edited(SETTINGS, lambda config: config.update(values))


def parts(**values: Any) -> Callable[[Path], None]:
    """Parts of tokenizer.json."""
    return edited(VOCABULARY, lambda tokenizer: tokenizer.update(values))


def model(**values: Any) -> Callable[[Path], None]:
    return edited(VOCABULARY, lambda tokenizer: tokenizer["model"].update(values))


def bpe(merges: Any) -> Callable[[Path], None]:
    return parts(model={"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": merges})


def split(regex: str) -> Callable[[Path], None]:
    return parts(pre_tokenizer={"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False})


def added(*tokens: dict[str, Any]) -> Callable[[Path], None]:
    like = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False) | {"content": "<x>"}
    return edited(VOCABULARY, lambda tokenizer: tokenizer["added_tokens"].extend(like | token for token in tokens))


def content(name: str, text: str | bytes, *, instead: str = "") -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / (instead or name)).unlink(missing_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return apply


def sparse(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(4 << 30)

    return apply


def special(name: str, kind: str) -> Callable[[Path], None]:
    """A pipe, a folder, or a link to itself or to a device."""

    def apply(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a folder":
            path.mkdir()
        else:
            path.symlink_to({"a loop": name, "nothing": "nowhere", "a device": os.devnull}[kind])

    return apply


def replaced(*lengths: int) -> Callable[[Path], None]:
    steps = [{"type": "Replace", "pattern": {"String": "l"}, "content": "l" * length} for length in lengths]
    return parts(normalizer={"type": "Sequence", "normalizers": steps})


CODE = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
RANKS = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))


def tiktoken(**values: Any) -> Callable[[Path], None]:
    """Only the ranks of tokens, and in the settings the tokenizer that reads them."""

    def apply(folder: Path) -> None:
        content("tiktoken.model", RANKS, instead=VOCABULARY)(folder)
        settings(**values)(folder)

    return apply


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    # what tokenizers raises
    "a bad regular expression": (split("(("), UNREAD),
    "a merge that panics": (bpe(["a b"]), UNREAD),
    "no words": (model(vocab={}), "prompt: the tokenizer cannot read it: "),
    "a panic of a prompt": (
        parts(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<zz>", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        ),
        "prompt: the tokenizer cannot read it: ",
    ),
    "a panic of an answer": (
        parts(decoder={"type": "Strip", "content": "h", "start": 10**9, "stop": 10**9}),
        "the tokenizer cannot write the model's tokens as text: ",
    ),
    "words of another model": (model(vocab={"h": 5000, "<unk>": 7000}), "prompt: token 7000; accepted: 0 to 127"),
    # sizes
    "4 GiB of vocabulary": (sparse(VOCABULARY), f"{VOCABULARY}: 4294967296 bytes"),
    "4 GiB of sentencepiece": (sparse("tokenizer.model"), "tokenizer.model: 4294967296 bytes"),
    "a long regular expression": (split("a" * 10**7), "pattern.Regex: 10000000 characters"),
    "40 000 added tokens": (added(*({"id": 128 + at} for at in range(40_000))), "added_tokens: 40004 entries"),
    "300 normalisers": (replaced(*[1] * 300), "normalizers: 300 entries"),
    "texts that grow": (replaced(1000, 1000, 1000), "normalizer: makes 1000000000 characters of one"),
    "answers that grow": (
        parts(decoder={"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 8000}),
        "decoder: makes 8000 characters of one",
    ),
    "deep": (content(VOCABULARY, '{"x": ' + "[" * 10**5 + "]" * 10**5 + "}"), f"{VOCABULARY}: not JSON"),
    # kinds of files
    **{
        f"{kind} as {name}": (special(name, kind), sentence)
        for name, kind, sentence in (
            (VOCABULARY, "a pipe", f"{VOCABULARY}: a pipe; must be a file"),
            ("additional_chat_templates/tools.jinja", "a pipe", "tools.jinja: a pipe"),
            ("added_tokens.json", "a device", "added_tokens.json: a device"),
            ("vocab.json", "a folder", "vocab.json: a folder"),
            (SETTINGS, "nothing", f"{SETTINGS}: no such file"),
            (VOCABULARY, "a loop", f"{VOCABULARY}: cannot be read"),
        )
    },
    # settings
    "code that is a number": (settings(auto_map=5), f"{SETTINGS}: auto_map=5"),
    "a length of text": (settings(model_max_length="x"), "prompt: the tokenizer cannot read it: "),
    "a method's name": (settings(encode=5), UNREAD),
    "a path to files": (settings(fast_tokenizer_files=["../tokenizer.1.0.json"]), "fast_tokenizer_files=['../token"),
    # code
    "a tokenizer that is code": (tiktoken(auto_map=CODE), f"{SETTINGS}: auto_map=['tokenization_kimi."),
    "a class of nobody": (tiktoken(tokenizer_class="TikTokenTokenizer"), "tokenizer_class='TikTokenTokenizer': not a"),
}


LARGE = {"4 GiB of vocabulary", "4 GiB of sentencepiece", "a long regular expression", "40 000 added tokens", "deep"}
LARGE |= {"300 normalisers", "texts that grow", "answers that grow"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_tokenizer_is_refused(name: str, run_changed: RunChanged) -> None:
    change, sentence = REFUSED[name]
    ended = run_changed(change, is_large=name in LARGE)
    ended.is_refused(sentence)
    if name != "a panic of an answer":  # of which Rust says something, too
        assert all(line.startswith("expertly: ") for line in ended.err.splitlines()), ended.err


PIECES = b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02\n\x0b\n\x04\xe2\x96\x81a\x15\0\0\0\0"
"""A vocabulary of sentencepiece: <unk> and a word."""


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model"])
def test_what_a_vocabulary_of_sentencepiece_needs_is_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "is_sentencepiece_available", lambda: False)
    (tmp_path / name).write_bytes(PIECES)
    with pytest.raises(CheckpointError, match=f"{name}: a vocabulary of sentencepiece: pip install sentencepiece"):
        loading.load_tokenizer(tmp_path)
    make_checkpoint("qwen3_moe", tmp_path / "model", tokenizer=True)
    (tmp_path / "model" / name).write_bytes(PIECES)
    assert loading.load_tokenizer(tmp_path / "model") is not None, "beside a tokenizer.json nobody reads it"


@pytest.mark.parametrize(("family", "is_right"), [("mixtral", True), ("qwen3_moe", False)])
def test_a_vocabulary_of_sentencepiece_is_split_as_by_itself(family: str, is_right: bool, tmp_path: Path) -> None:
    """transformers reads it by the class of the family, which may be one of another kind."""
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    trained = {"model_prefix": str(tmp_path / "tokenizer"), "vocab_size": 300, "byte_fallback": True}
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_type="bpe", hard_vocab_limit=False, minloglevel=2, **trained
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    if is_right:
        processor = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
        ids = loading.load_tokenizer(tmp_path)("over the fox", add_special_tokens=False)["input_ids"]
        assert ids == processor.encode("over the fox")
        return
    with pytest.raises(CheckpointError, match="splits text otherwise than sentencepiece; accepted: the right"):
        loading.load_tokenizer(tmp_path)


RUNS: dict[str, Callable[[Path], None]] = {
    "4 GiB of what nobody reads": sparse("preprocessor_config.json"),
    "code beside a vocabulary": settings(auto_map=CODE, tokenizer_class="TikTokenTokenizer"),
    "paths to elsewhere": settings(vocab_file="/dev/zero", tokenizer_file="/dev/zero", added_tokens_file="/dev/zero"),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_not_needed_is_not_obeyed(name: str, run_changed: RunChanged) -> None:
    run_changed(RUNS[name], is_large="4 GiB" in name).is_answered()


def test_an_adapter_that_is_not_applied_is_said(
    imported: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "model", tokenizer=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    said = "adapter_config.json: an adapter (LoRA) is not applied"
    for command in (["run", "model", "hello", "--max-new-tokens", "1"], ["pack", "model", "--out", "store"]):
        ended = run_command(imported, tmp_path, *command)
        ended.is_answered()
        assert ended.err.count(said) == 1, ended.err
    loaded, _ = api.load(str(folder))
    api.unload(loaded)
    assert caplog.text.count(said) == 1
