"""`expertly run`: one answer, and conversations, against what the unmodified model says to the same messages."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input

import expertly
from expertly.cli.chat import Chat, ChatSampling
from expertly.cli.main import main
from expertly.core.errors import ConfigError
from tests.cli.asking import Captured
from tests.commands import RunningCommand
from tests.families import make_checkpoint, make_tokenizer, reference_generate

TEMPLATE = (
    "{% for m in messages %}{{ '#' + m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}#assistant:{% endif %}"
)
NUM_TOKENS = 12
CHARACTERS = make_tokenizer()


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


@contextmanager
def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> Iterator[None]:
    """A terminal, at which somebody types these lines and then Ctrl-D; a line may have keys in it."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with create_pipe_input() as keys, create_app_session(input=keys):
        keys.send_bytes(("".join(f"{line}\r" for line in lines) + "\x04").encode("utf-8", "surrogateescape"))
        yield


def run(model: Path, *arguments: str) -> int:
    greedy = ("--memory", "50%", "--max-new-tokens", str(NUM_TOKENS), "--temperature", "0")
    return main(["run", str(model), *arguments, *greedy])


def test_one_answer_is_the_models_own(model: Path, chatting: Path, capsys: Captured):
    """To the templated message; with --raw, and for a model without a template, to the text."""
    assert run(chatting, "Hello") == 0
    text, measures = capsys.readouterr()
    assert text == f"{written(expected(chatting, [('user', 'Hello')]))}\n"
    for word in (f"{NUM_TOKENS} tokens", "tokens/s", "of experts hit", "50.0% of", "system expertly"):
        assert word in measures
    for folder, arguments in ((chatting, ["--raw"]), (model, [])):
        assert run(folder, "Hello", *arguments) == 0
        captured = capsys.readouterr()
        assert captured.out == f"{written(continued(folder, 'Hello'))}\n"
        assert ("no chat template" in captured.err) == (folder == model)


def test_an_empty_stdin_is_no_prompt(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured):
    for arguments in ((), ("-",)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        assert run(model, *arguments) == 2
        assert "prompt: nothing came from stdin; accepted: some text" in capsys.readouterr().err


def test_a_chat_of_three_turns(chatting: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured):
    """Each answer is what the unmodified model says to all that was said before; /clear and /system begin anew. A line
    that is no UTF-8 is told, and the chat goes on.
    """
    first = expected(chatting, [("user", "Hi")])
    second = expected(chatting, [("user", "Hi"), ("assistant", first), ("user", "And?")])
    instructed = expected(chatting, [("system", "Be brief"), ("user", "Hi")])
    lines = ("\udcff", "Hi", "And?", "/stats", "/what", "/clear", "Hi", "/system Be brief", "Hi", "/quit", "no")
    with typed(monkeypatch, *lines):
        assert run(chatting) == 0
    captured = capsys.readouterr()
    answers = "(.*)".join(re.escape(f"{written(tokens)}\n") for tokens in (second, first, instructed))
    said = re.fullmatch(f"{re.escape(written(first))}\n{answers}", captured.out, re.DOTALL)
    assert said is not None and "decode" in said[1] and "[/what is none of these]" in said[1]
    assert said[2] == "[a new conversation]\n"
    assert "a message must be UTF-8" in captured.err and "50.0% of" in captured.err


def messages_of(monkeypatch: pytest.MonkeyPatch, chatting: Path, *lines: str) -> list[str]:
    """What the model is asked where these lines are typed: the last message of each prompt."""
    asked: list[str] = []
    answer = Chat.answer

    def noted(chat: Chat, text: str, *arguments: Any, **more: Any) -> Any:
        asked.append(text)
        return answer(chat, text, *arguments, **more)

    monkeypatch.setattr(Chat, "answer", noted)
    with typed(monkeypatch, *lines):
        assert run(chatting) == 0
    return asked


PASTE = "\x1b[200~{}\x1b[201~"


def test_what_is_typed_is_a_message_as_it_was_meant(chatting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of several lines where they are pasted, in three quotes, or with Alt-Enter; with a slash; a file's text."""
    (tmp_path / "notes.txt").write_text("one\n\ntwo\n")
    cases = {
        PASTE.format("one\r\n/two\r\n\tthree\r\n"): "one\n/two\n\tthree",
        PASTE.format("/* a comment */\nint i;"): "/* a comment */\nint i;",
        '"""\r  one\r/two\r"""': "  one\n/two",
        '"""one"""': "one",
        "one\x1b\rtwo": "one\ntwo",
        "//two": "/two",
        f"/load {tmp_path}/notes.txt": "one\n\ntwo",
        f'/load "{tmp_path}/notes.txt"': "one\n\ntwo",
    }
    ignored = ("", "   ", '""""""', "/load", "/no such command", "lost\x03")
    assert messages_of(monkeypatch, chatting, *cases, *ignored) == list(cases.values())


def test_a_message_again_and_another_instead(chatting: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured):
    """The answers before stay; what is too long leaves the conversation as it was; Ctrl-C leaves the message."""
    first = expected(chatting, [("user", "Hi")])
    said: list[tuple[str, Said]] = [("user", "Hi"), ("assistant", first)]
    long = PASTE.format("x" * 600)
    lines = ("/retry", "Hi", "And?", "/retry", "/edit", " so", "/edit", long, "/edit", "lost\x03", "/retry")
    with typed(monkeypatch, *lines):
        assert run(chatting) == 0
    captured = capsys.readouterr()
    answers = [first, *[expected(chatting, [*said, ("user", text)]) for text in ("And?", "And?", "And? so", "And? so")]]
    assert captured.out == "".join(f"{text}\n" for text in ("[there is no message yet]", *map(written, answers)))
    assert captured.err.count("expertly: prompt: ") == 1


def test_another_answer_is_another_one_with_a_seed_too(loaded: tuple[Any, Any]):
    chat = Chat(*loaded, ChatSampling(NUM_TOKENS, temperature=2.0, seed=3))
    first, second = (chat.answer("Hi", lambda text: None, is_instead=num > 0) for num in range(2))
    assert first.token_ids != second.token_ids and len(chat.messages) == 2
    assert second.cached_tokens == second.prompt_tokens - 1, "nothing of the message is computed again"


@pytest.mark.parametrize(("name", "said"), [("nowhere", "No such file"), ("", "Is a directory"), ("bytes", "decode")])
def test_a_file_that_is_no_text_is_told(
    chatting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, name: str, said: str
):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert messages_of(monkeypatch, chatting, f"/load {tmp_path}/{name}", "Hi") == ["Hi"]
    assert said in capsys.readouterr().err


def test_messages_are_kept_for_the_next_chat(chatting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where only their user can read them, at most a MiB; a file that cannot be written is no reason to stop."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    up = "\x1b[A"
    assert messages_of(monkeypatch, chatting, "Hi", PASTE.format("one\ntwo")) == ["Hi", "one\ntwo"]
    path = tmp_path / "expertly" / "history"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert messages_of(monkeypatch, chatting, f"{up}{up}{up}{up}") == ["Hi"]
    path.write_text("\n# a time\n+older\n" * 70_000 + "\n# a time\n+newest\n")
    path.chmod(0o644)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert messages_of(monkeypatch, chatting, up) == ["newest"]
    assert path.stat().st_size < 600_000 and path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    assert messages_of(monkeypatch, chatting, "Hi")[-1:] == ["Hi"]


def test_an_answer_without_a_length_that_was_asked_for_leaves_room_for_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    with typed(monkeypatch, "Once upon a time", "He said", "She said"):
        assert main(["run", "demo", "--seed", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("tokens/s") >= 2 and "accepted" not in captured.err


@pytest.mark.slow
def test_at_a_terminal(chatting: Path, imported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pasted lines are one message, Ctrl-C stops an answer, Ctrl-D ends; what was measured stands in the terminal."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    own, its = pty.openpty()
    terminal = Path(os.ttyname(its))
    for name in ("stdout", "stderr"):
        (tmp_path / name).symlink_to(terminal)
    words = ("run", str(chatting), "--memory", "50%", "--max-new-tokens", "400")
    running = RunningCommand(imported, tmp_path, words, tmp_path, stdin=terminal)
    shown = b""

    def until(word: bytes) -> bytes:
        nonlocal shown
        while word not in shown:
            assert select.select([own], [], [], 120)[0], shown
            shown += os.read(own, 1 << 16)
        before, _, shown = shown.partition(word)
        return before

    until(b"\x1b[?2004h")  # a terminal is asked to mark what is pasted: it waits for a message
    os.write(own, PASTE.format("one\ntwo").encode() + b"\r")
    until(b"two")
    until(b"\x1b[?2004l")  # it was sent
    while len(re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]|\s", b"", shown)) < 10:  # the answer begins
        shown += os.read(own, 1 << 16)
    os.write(own, b"typed meanwhile\x03")
    assert b"typed meanwhile" not in until(b"| stopped]"), "it would stand in the answer"
    until(b"\x1b[?2004h")
    os.write(own, b"\x04")
    assert running.exit_code(60) == 0
    os.close(own)
    os.close(its)
    assert (tmp_path / "expertly" / "history").read_text().endswith("\n+one\n+two\n")


def test_what_was_said_before_is_not_computed_again(chatting: Path, loaded: tuple[Any, Any]):
    conversation = Chat(*loaded, ChatSampling(NUM_TOKENS, temperature=0))
    first = conversation.answer("Hi", lambda text: None)
    second = conversation.answer("And?", lambda text: None)
    assert (first.cached_tokens, first.prompt_tokens) == (0, len("#user:Hi\n#assistant:"))
    assert second.cached_tokens == first.prompt_tokens + NUM_TOKENS - 1, "the last token was not computed with"
    assert written(first.token_ids) == first.text and CHARACTERS(first.text)["input_ids"] != first.token_ids


@pytest.mark.parametrize(
    ("family", "looks_up"),
    [("mixtral", False), ("mixtral", True), ("gpt_oss", False), ("qwen3_next", False), ("jamba", False)],
)
def test_a_cache_of_any_kind_gives_the_models_own_second_answer(family: str, looks_up: bool, tmp_path: Path):
    """Of full attention, windows and recurrent states: most of these cannot go back to what still holds."""
    folder = make_checkpoint(family, tmp_path / family, tokenizer=True)
    model, tokenizer = expertly.load(str(folder), memory="50%", system="lru")
    try:
        chat = Chat(model, tokenizer, ChatSampling(8, temperature=0, looks_up=looks_up))
        first = chat.answer("Hello there", lambda text: None)
        second = chat.answer(" and?", lambda text: None)
    finally:
        expertly.unload(model)
    is_kept = CHARACTERS.decode(first.token_ids) == first.text
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
    too_long = f"max_new_tokens={10**20}: accepted: at most the model's 512 positions"
    for arguments, said in (["--json"], "a chat is for people"), (["--max-new-tokens", str(10**20)], too_long):
        with typed(monkeypatch):
            assert main(["run", str(chatting), "--memory", "50%", *arguments]) == 2
        assert said in capsys.readouterr().err


def test_speculation_changes_no_token(chatting: Path, capsys: Captured):
    assert run(chatting, "Hello Hello Hello", "--json", "--speculate", "prompt-lookup") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == written(expected(chatting, [("user", "Hello Hello Hello")]))
