"""Renders chat templates, which may be hostile, in a sandbox."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils import chat_template_utils

from expertly.core.errors import ConfigError
from expertly.model.sandbox import Sandbox

RENDER_CPU_S = 2.0
"""Processor time for one conversation. 400 messages with tools take 0.01 s."""

RENDER_S = 5.0
"""The same in time, on a machine that is busy with something else."""

RENDER_NBYTES = 256 << 20
"""Memory for one conversation."""

MAX_RENDERED = 16 << 20
"""Characters of a rendered conversation."""


class TooLongError(ConfigError):
    """A conversation is longer than the caller takes, in characters."""

    def __init__(self, length: int, most: int) -> None:
        super().__init__(f"messages: the model's chat template makes {length} characters of them; accepted: {most}")
        self.length = length


class Renderer(contextlib.AbstractContextManager["Renderer"]):
    """Renders conversations by a tokenizer's chat template. Any thread may call. For the limits see Sandbox."""

    def __init__(self, cpu_s: float = RENDER_CPU_S, seconds: float = RENDER_S, nbytes: int = RENDER_NBYTES) -> None:
        packages, settings = ("jinja2", "markupsafe", "packaging"), {"file": chat_template_utils.__file__}
        self.sandbox = Sandbox("templates", packages, cpu_s, seconds, nbytes, settings)

    def __exit__(self, *_: object) -> None:
        self.sandbox.close()

    def render(
        self,
        tokenizer: Any,
        messages: Sequence[Mapping[str, Any]],
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        most: int = MAX_RENDERED,
    ) -> str:
        """A conversation as the tokenizer's chat template, or `template`, writes it, up to where the model goes on, as
        `apply_chat_template` does. All is JSON. Raises ConfigError where the template raises anything, takes too much
        time (SlowError) or memory, makes more than `most` characters (TooLongError), or half of a surrogate
        pair.
        """
        try:
            source = tokenizer.get_chat_template(template, tools)
            request = {
                "messages": messages,
                "options": {"chat_template": source, "tools": tools},
                "variables": {"add_generation_prompt": True, **tokenizer.special_tokens_map, **(variables or {})},
                "most": most,
            }
            raw = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:  # it has no template for this, or it is no JSON
            raise _refused(str(error)) from None
        try:
            letter, text = self.sandbox.ask(raw)
        except ConfigError as error:
            raise type(error)(f"messages: the model's chat template {error}") from None
        if letter == b"L":
            raise TooLongError(int(text), most)
        if letter == b"E":
            raise _refused(" ".join(text.encode("utf-8", "replace").decode().split()))
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _refused("it makes half of a surrogate pair, which is no character") from None
        return text


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"messages: the model's chat template refuses them: {reason}")
