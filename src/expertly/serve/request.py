"""One client's request while it is served: its texts as they grow, and what its client gets of them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from expertly.model.answers import AnswerPart, AnswerReader
from expertly.model.text import Decoder
from expertly.serve.sampling import SampledToken, Sampling

Reason = Literal["stop", "length"]

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token adds to one text. `reason`: why the text ended, in its last delta."""

    index: int
    text: str
    choices: tuple[SampledToken, ...] = ()  # the tokens behind the text, where logprobs were asked for
    reason: Reason | None = None


class StopStrings:
    """Passes text on up to the first of `stops`, and holds back an end that may begin one of them."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.matched = ""  # the stop string that was met

    def add(self, text: str) -> str:
        """The text that may be shown now; nothing once one is `matched`."""
        if self.matched or not self._stops:
            return "" if self.matched else text
        text = self._held + text
        if places := [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]:
            (place, self.matched), self._held = min(places), ""
            return text[:place]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def end(self) -> str:
        """The text that was held back and is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, word: str) -> int:
    """The length of the longest proper prefix of `word` that `text` ends with."""
    lengths = range(min(len(text), len(word) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(word[:length])), 0)


@dataclass(eq=False)
class Text:
    """One text of a request, from its prompt to its end."""

    request: ServedRequest
    index: int
    prompt: Sequence[int]
    max_tokens: int
    ends: Sequence[int]
    sampling: Sampling
    stops: StopStrings
    tokens: list[int] = field(default_factory=list)
    reason: Reason | None = None
    num_cached: int = 0  # tokens of the prompt that were not computed
    last_s: float | None = None  # when its last token came
    _untold: list[SampledToken] = field(default_factory=list)  # their text is held back

    def __post_init__(self) -> None:
        self.name = f"{self.request.number}.{self.index}"
        self._decoder = Decoder(self.request.decode)

    def add(self, choice: SampledToken) -> Delta:
        self.tokens.append(choice.token)
        is_scripted = len(self.tokens) <= len(self.sampling.script) + self.sampling.min_tokens  # whatever it says
        is_end = choice.token in self.ends
        is_last = is_end or len(self.tokens) >= self.max_tokens
        came = "" if is_end else self._decoder.add([choice.token])
        if is_last:
            came += self._decoder.end()
        shown = came if is_scripted else self.stops.add(came)
        if is_last:
            shown += self.stops.end()
        if self.stops.matched or is_last:
            self.reason = "stop" if self.stops.matched or is_end else "length"
        if self.sampling.logprobs is not None and not is_end:
            self._untold.append(choice)
        choices = tuple(self._untold) if shown or self.reason is not None else ()
        self._untold = self._untold[len(choices) :]
        return Delta(self.index, shown, choices, self.reason)


@dataclass(eq=False)
class ServedRequest:
    """All texts that one client asked for at once. They are admitted together, and fail together.

    Only the server's thread uses it. `deltas` ends with None, or with the exception that ended the request.
    `readers`: by index, those of texts that may hold more than content.
    """

    decode: Callable[[Sequence[int]], str]
    readers: Mapping[int, AnswerReader] = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_numbers))
    texts: list[Text] = field(default_factory=list)
    deltas: asyncio.Queue[Delta | BaseException | None] = field(default_factory=asyncio.Queue)
    came_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None

    def add(
        self, prompt: Sequence[int], max_tokens: int, ends: Sequence[int], sampling: Sampling, stops: Sequence[str]
    ) -> None:
        self.texts.append(Text(self, len(self.texts), prompt, max_tokens, ends, sampling, StopStrings(stops)))

    def parts(self, delta: Delta) -> list[AnswerPart]:
        """The parts that `delta` adds to its text. Call it once for each delta, in order."""
        reader = self.readers.get(delta.index)
        if reader is None:
            return [AnswerPart("content", delta.text)] if delta.text else []
        parts = reader.add(delta.text) if delta.text else []
        return parts + (reader.end() if delta.reason is not None else [])

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt is counted once, however many texts continue it."""
        return sum({id(text.prompt): len(text.prompt) + len(text.sampling.script) for text in self.texts}.values())

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of its prompts that the KV cache held already, as the first text of each prompt found them."""
        return sum({id(text.prompt): text.num_cached for text in reversed(self.texts)}.values())

    @property
    def num_tokens(self) -> int:
        """Written so far."""
        return sum(max(0, len(text.tokens) - len(text.sampling.script)) for text in self.texts)

    async def __aiter__(self):  # type: ignore[no-untyped-def]
        """The deltas of all texts, as they come. Raises what ended the request."""
        while (delta := await self.deltas.get()) is not None:
            if isinstance(delta, BaseException):
                raise delta
            yield delta
