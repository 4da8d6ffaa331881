"""A chat at a terminal: what is typed there, as messages and commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output

from expertly.cli.output import message
from expertly.cli.rendering import shown
from expertly.core.errors import ConfigError

if TYPE_CHECKING:
    from expertly.cli.chat import Chat

HELP = '''\
  """             begins and ends a message of several lines; Alt-Enter adds a line, too
  //TEXT          a message that begins with a slash
  /load FILE      send the text of a file
  /retry          another answer to the last message
  /edit           change the last message, and send it instead
  /system TEXT    begin anew with a system message
  /clear          begin anew; a system message stays
  /stats          experts hit and missed so far
  /quit           end, as Ctrl-D does'''

QUOTES = '"""'

MAX_FILE_NBYTES = 16 << 20  # of a file that /load sends
MAX_HISTORY_NBYTES = 1 << 20  # of the file of messages; of a larger one the older half goes


def chat(conversation: Chat, stats: Callable[[], str], out: TextIO, is_plain: bool) -> None:
    """Read messages and answer them until the input ends. `stats`: what /stats shows."""
    ask = _asking(out)
    while True:
        try:
            text = ask("").strip()
            text.encode()  # what is no UTF-8 may come as lone surrogates
            if text == "/quit":
                return
            reply, sent = _told_and_sent(conversation, text, stats, ask)
            if reply:
                print(reply, file=out, flush=True)
            elif sent:
                with shown(out, is_plain) as write:
                    answer = conversation.answer(sent, write, is_instead=text in ("/retry", "/edit"))
                print(answer.line(), file=out if out.isatty() else sys.stderr, flush=True)
        except EOFError:
            return
        except UnicodeError as error:
            message(f"expertly: a message must be UTF-8 ({error})")
        except ConfigError as error:
            message(f"expertly: {error}")


def _told_and_sent(
    conversation: Chat, text: str, stats: Callable[[], str], ask: Callable[[str], str]
) -> tuple[str, str]:
    """What a command says, or else what is sent to the model."""
    name, _, rest = text.partition(" ")
    if name in ("/system", "/clear"):
        conversation.begin_anew(rest.strip() if name == "/system" else None)
        return "[a new conversation]", ""
    if not text.startswith("/") or text.startswith("//") or "\n" in text:  # a command is one line
        if text.startswith(QUOTES):
            return "", text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
        return "", text[1:] if text.startswith("//") else text
    if text == "/stats":
        return stats(), ""
    if name == "/load":
        path = rest.strip().strip("\"'")
        return ("", _read(path)) if path else ("[/load FILE sends the file's text]", "")
    if text in ("/retry", "/edit"):
        last = conversation.last_message
        if last is None:
            return "[there is no message yet]", ""
        return "", last if text == "/retry" else ask(last).strip()
    return HELP if text == "/help" else f"[{name} is none of these]\n{HELP}", ""


def _read(name: str) -> str:
    try:
        with open(os.path.expanduser(name), "rb") as file:
            data = file.read(MAX_FILE_NBYTES + 1)
        if len(data) > MAX_FILE_NBYTES:
            raise ConfigError(f"/load {name}: accepted: at most {MAX_FILE_NBYTES >> 20} MiB")
        text = data.decode("utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"/load {name}: cannot be read as text: {error}") from None
    if not text:
        raise ConfigError(f"/load {name}: holds no text")
    return text


def _asking(out: TextIO) -> Callable[[str], str]:
    """A function that reads what is typed, from a text that is there already; nothing where Ctrl-C leaves it."""
    keys = KeyBindings()

    @Condition
    def is_open() -> bool:
        text = get_app().current_buffer.text.strip()
        return text.startswith(QUOTES) and not (text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES))

    @keys.add("enter", filter=is_open)
    @keys.add("escape", "enter")
    def add_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    output = create_output(out if out.isatty() else sys.stderr)
    if isinstance(output, Vt100_Output):
        output.enable_cpr = False  # nobody needs to know where the cursor is, and some terminals do not say
    session: PromptSession[str] = PromptSession(
        "> ", multiline=is_open, prompt_continuation="  ", history=_history(), key_bindings=keys, output=output
    )

    def ask(text: str) -> str:
        try:
            return session.prompt(default=text)
        except KeyboardInterrupt:
            return ""

    return ask


class _Kept(FileHistory):
    def store_string(self, string: str) -> None:
        with suppress(OSError, UnicodeError):  # of a full disk; of what is no UTF-8
            super().store_string(string)


def _history() -> History:
    """The messages of earlier chats, in a file that only the user may read; of this one where there can be none."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(state if os.path.isabs(state) else os.path.expanduser("~/.local/state")) / "expertly"
        folder.mkdir(0o700, parents=True, exist_ok=True)
        path = folder / "history"
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            os.fchmod(file.fileno(), 0o600)
            data = file.read()
            if len(data) > MAX_HISTORY_NBYTES:
                newer = data[-MAX_HISTORY_NBYTES // 2 :].partition(b"\n# ")
                file.seek(0)
                file.write(b"".join(newer[1:]))
                file.truncate()
    except OSError as error:
        message(f"expertly: messages are not kept for the next chat: {error}")
        return InMemoryHistory()
    return _Kept(path)
