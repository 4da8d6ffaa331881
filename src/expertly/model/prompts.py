"""Prompts and chats from a JSON Lines file, and their tokens by the model's chat template."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import MinLen

from expertly.core.errors import ConfigError
from expertly.core.untrusted import parse_as

if TYPE_CHECKING:
    from expertly.model.templates import Renderer

_ACCEPTED = (
    'accepted: {"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}, "category": "text" may be '
    "added, one object a line"
)
PROMPTS_HELP = 'JSON Lines: {"prompt": "text"} or a chat, {"messages": [...]}, a line; "-" for stdin'
RAW_HELP = "prompts are texts to continue: the model's chat template is not used"


@dataclass
class _Message:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass
class _Line:
    prompt: Annotated[str, MinLen(1)] | None = None
    messages: Annotated[list[_Message], MinLen(1)] | None = None
    category: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. Lines are numbered from 1. `messages` is empty for a plain prompt; for a chat, `text` is its
    messages' text.
    """

    line: int
    text: str
    category: str | None
    messages: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt and its tokens."""

    prompt: Prompt
    tokens: list[int]


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def tokens_of(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], *, is_raw: bool = False, renderer: Renderer | None = None
) -> list[int]:
    """The tokens of a conversation, up to where the model goes on: by the chat template, or with `is_raw`, or where
    there is no template, of the mere text. Raises ConfigError where the template refuses the messages, or does not end,
    CheckpointError where the tokenizer fails. `renderer`: renders it; None starts a process for this conversation
    alone.
    """
    from expertly.model.loading import held_stderr, tokenizer_errors
    from expertly.model.templates import Renderer

    how = {}
    if is_raw or not has_template(tokenizer):
        text = "".join(message["content"] for message in messages)
    else:
        how = {"add_special_tokens": False}
        with contextlib.nullcontext(renderer) if renderer is not None else Renderer() as renders:
            text = renders.render(tokenizer, [dict(message) for message in messages])
    with tokenizer_errors("prompt: the tokenizer cannot read it"), held_stderr():
        return list(tokenizer(text, return_token_type_ids=False, **how)["input_ids"])


def asked(
    prompts: Sequence[Prompt], tokenizer: Any, *, is_raw: bool = False, most: int | None = None
) -> tuple[list[AskedPrompt], list[str]]:
    """The prompts as tokens, and a sentence for each prompt that is left out because it has no token or more than
    `most`. With a chat template a plain prompt becomes a user's message; without one, or with `is_raw`, it stays text.

    Raises ConfigError where there is no tokenizer, and for messages without a template.
    """
    if tokenizer is None:
        raise ConfigError("model: has no tokenizer, so prompts have no tokens")
    can_chat = has_template(tokenizer) and not is_raw
    from expertly.model.templates import Renderer

    asked_prompts, left_out = [], []
    with Renderer() as renderer:
        for prompt in prompts:
            if prompt.messages and not can_chat:
                reason = "with --raw" if is_raw else "and the model has no chat template"
                raise ConfigError(
                    f'prompts, line {prompt.line}: holds messages, {reason}; accepted: {{"prompt": "text"}}'
                )
            messages = prompt.messages or [{"role": "user", "content": prompt.text}]
            tokens = tokens_of(tokenizer, messages, is_raw=is_raw, renderer=renderer)
            if not tokens:
                left_out.append(f"the prompt in line {prompt.line} gives no token")
            elif most is not None and len(tokens) > most:
                left_out.append(
                    f"the prompt in line {prompt.line} has {len(tokens)} tokens; the model takes at most {most}"
                )
            else:
                asked_prompts.append(AskedPrompt(prompt, tokens))
    return asked_prompts, left_out


def read_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file, or of stdin ("-"). Blank lines and other keys are ignored.

    Raises ConfigError naming the file, the line and what is accepted.
    """
    name = "stdin" if source == "-" else source
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if source == "-" else open(source, "rb") as file:
            prompts = list(islice(_parse(name, file), limit))
    except OSError as error:
        raise ConfigError(f"prompts {name}: cannot be read ({error.strerror or error})") from None
    if not prompts:
        raise ConfigError(f"prompts {name}: holds no prompt; {_ACCEPTED}")
    return prompts


def _parse(name: str, lines: Iterable[bytes]) -> Iterator[Prompt]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"prompts {name}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place}: not UTF-8 ({error.reason}); {_ACCEPTED}") from None
        read = parse_as(_Line, text, place, ConfigError, f"; {_ACCEPTED}")
        if (read.prompt is None) == (read.messages is None):
            raise ConfigError(f"{place}: must have a prompt or messages, one of them; {_ACCEPTED}")
        if read.prompt is not None:
            yield Prompt(number, read.prompt, read.category)
            continue
        messages = [asdict(message) for message in read.messages or ()]
        while messages and messages[-1]["role"] == "assistant":  # the model gives its own answer
            messages.pop()
        if not any(message["role"] == "user" and message["content"] for message in messages):
            raise ConfigError(f"{place}: messages: none of a user, before an answer; {_ACCEPTED}")
        yield Prompt(number, "\n\n".join(message["content"] for message in messages), read.category, tuple(messages))
