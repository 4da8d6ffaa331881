"""`expertly run`: one answer, and conversations, against what the unmodified model says to the same messages."""

from __future__ import annotations

import builtins
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.cli.chat import Chat, ChatSampling
from expertly.cli.main import main
from expertly.core.errors import ConfigError
from tests.cli.asking import Captured
from tests.families import make_checkpoint, make_tokenizer, reference_generate

TEMPLATE = (
    "{% for m in messages %}{{ '#' + m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}#assistant:{% endif %}"
)
NUM_TOKENS = 12
CHARACTERS = make_tokenizer()
PROMPT = "\0"
"""Between what the command has written and what it reads: no model here writes it."""


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    folder = make_checkpoint("olmoe", tmp_path_factory.mktemp("chatting") / "model", tokenizer=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def loaded(chatting: Path) -> Iterator[tuple[Any, Any]]:
    model, tokenizer = expertly.load(str(chatting), memory="50%", system="lru")
    yield model, tokenizer
    expertly.unload(model)


Said = str | list[int]
"""A message: a user's text, or the tokens of an answer, which need not be those that its text is cut into."""


def expected(model: Path, messages: Sequence[tuple[str, Said]], num_tokens: int = NUM_TOKENS) -> list[int]:
    """What the unmodified model answers to these messages."""
    parts = [part for role, said in messages for part in (f"#{role}:", said, "\n")]
    return continued(model, *parts, "#assistant:", num_tokens=num_tokens)


def continued(model: Path, *parts: Said, num_tokens: int = NUM_TOKENS) -> list[int]:
    cut = [CHARACTERS(part)["input_ids"] if isinstance(part, str) else part for part in parts]
    tokens = [token for part in cut for token in part]
    return list(reference_generate(model, [tokens], max_new_tokens=num_tokens)[0])


def written(tokens: list[int]) -> str:
    return str(CHARACTERS.decode(tokens, skip_special_tokens=True))


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """A terminal, at which somebody types these lines and then Ctrl-D."""
    left = iter(lines)

    def read(prompt: str = "") -> str:
        print(PROMPT, end="")
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)


def run(model: Path, *arguments: str) -> int:
    greedy = ("--memory", "50%", "--max-new-tokens", str(NUM_TOKENS), "--temperature", "0")
    return main(["run", str(model), *arguments, *greedy])


def test_one_answer_is_the_models_own(model: Path, chatting: Path, capsys: Captured):
    """To the templated message; with --raw, and for a model without a template, to the text."""
    assert run(chatting, "Hello") == 0
    text, _, measures = capsys.readouterr().out.partition("\n\n")
    assert text == written(expected(chatting, [("user", "Hello")]))
    for word in (f"{NUM_TOKENS} tokens", "tokens/s", "of experts hit", "50.0% of", "system expertly"):
        assert word in measures
    for folder, arguments in ((chatting, ["--raw"]), (model, [])):
        assert run(folder, "Hello", *arguments) == 0
        captured = capsys.readouterr()
        assert captured.out.startswith(written(continued(folder, "Hello")))
        assert ("no chat template" in captured.err) == (folder == model)


def test_a_chat_of_three_turns(chatting: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured):
    """Each answer is what the unmodified model says to all that was said before; /clear and /system begin anew. A line
    that is no UTF-8 is told, and the chat goes on.
    """
    first = expected(chatting, [("user", "Hi")])
    second = expected(chatting, [("user", "Hi"), ("assistant", first), ("user", "And?")])
    instructed = expected(chatting, [("system", "Be brief"), ("user", "Hi")])
    lines = ("\udcff", "Hi", "And?", "/stats", "/what", "/clear", "Hi", "/system Be brief", "Hi", "/quit", "no")
    type_lines(monkeypatch, *lines)
    assert run(chatting) == 0
    captured = capsys.readouterr()
    answers = [part.partition("\n[")[0] for part in captured.out.split(PROMPT)[1:]]
    assert [answers[turn] for turn in (1, 2, 6, 8)] == [*map(written, (first, second, first, instructed))]
    assert "decode" in answers[3] and "/clear" in answers[4] and len(answers) == 10
    assert "a message must be UTF-8" in captured.err and "50.0% of" in captured.err


def test_an_answer_without_a_length_that_was_asked_for_leaves_room_for_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    type_lines(monkeypatch, "Once upon a time", "He said", "She said")
    assert main(["run", "demo", "--seed", "0"]) == 0
    captured = capsys.readouterr()
    answers = captured.out.split(PROMPT)[1:4]
    assert all("tokens/s" in answer for answer in answers) and "accepted" not in captured.err


def test_what_was_said_before_is_not_computed_again(chatting: Path, loaded: tuple[Any, Any]):
    conversation = Chat(*loaded, ChatSampling(NUM_TOKENS, temperature=0))
    first = conversation.answer("Hi", lambda text: None)
    second = conversation.answer("And?", lambda text: None)
    assert (first.cached_tokens, first.prompt_tokens) == (0, len("#user:Hi\n#assistant:"))
    assert second.cached_tokens == first.prompt_tokens + NUM_TOKENS - 1, "the last token was not computed with"
    assert written(first.token_ids) == first.text and CHARACTERS(first.text)["input_ids"] != first.token_ids


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_next", "jamba", "switch_transformers"])
def test_a_cache_of_any_kind_gives_the_models_own_second_answer(family: str, tmp_path: Path):
    """Of full attention, windows, recurrent states and an encoder: most of these cannot go back to what still holds."""
    folder = make_checkpoint(family, tmp_path / family, tokenizer=True)
    model, tokenizer = expertly.load(str(folder), memory="50%", system="lru")
    try:
        chat = Chat(model, tokenizer, ChatSampling(8, temperature=0))
        first = chat.answer("Hello there", lambda text: None)
        second = chat.answer(" and?", lambda text: None)
    finally:
        expertly.unload(model)
    is_kept = CHARACTERS.decode(first.token_ids) == first.text and family != "switch_transformers"  # no special token
    said = first.token_ids if is_kept else first.text
    assert second.text == written(continued(folder, "Hello there", said, " and?", num_tokens=8))


def test_an_interrupt_stops_the_answer_and_not_the_conversation(chatting: Path, loaded: tuple[Any, Any]):
    conversation = Chat(*loaded, ChatSampling(NUM_TOKENS, temperature=0))
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = conversation.answer("Hi", write)
    assert stopped.was_stopped and len(stopped.token_ids) < NUM_TOKENS
    assert expected(chatting, [("user", "Hi")])[: len(stopped.token_ids)] == stopped.token_ids
    assert "stopped" in stopped.line()
    following = conversation.answer("And?", lambda text: None)
    assert not following.was_stopped
    talk: list[tuple[str, Said]] = [("user", "Hi"), ("assistant", stopped.token_ids), ("user", "And?")]
    assert following.token_ids == expected(chatting, talk)


def test_what_does_not_fit_the_model_is_refused_and_forgotten(loaded: tuple[Any, Any]):
    model, tokenizer = loaded
    positions = model.config.max_position_embeddings
    conversation = Chat(model, tokenizer, ChatSampling(NUM_TOKENS, temperature=0))
    with pytest.raises(ConfigError, match=f"prompt.*{positions}"):
        conversation.answer("x" * positions, lambda text: None)
    assert conversation.messages == []


def test_what_no_chat_can_be_is_refused(chatting: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured):
    type_lines(monkeypatch)
    too_long = f"max_new_tokens={10**20}: accepted: at most the model's 512 positions"
    for arguments, said in (["--json"], "a chat is for people"), (["--max-new-tokens", str(10**20)], too_long):
        assert main(["run", str(chatting), "--memory", "50%", *arguments]) == 2
        assert said in capsys.readouterr().err


def test_speculation_changes_no_token(chatting: Path, capsys: Captured):
    assert run(chatting, "Hello Hello Hello", "--json", "--speculate", "prompt-lookup") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == written(expected(chatting, [("user", "Hello Hello Hello")]))
