"""A conversation with a loaded model: its chat template, its KV cache kept between turns, answers as they are made."""

from __future__ import annotations

import bisect
import contextlib
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

import expertly
from expertly.cli.output import in_brackets
from expertly.core.errors import ConfigError
from expertly.core.units import format_nbytes, format_number, format_seconds, format_share
from expertly.model.generation import NUM_DRAFTED, KeptCache, generate, generation_config, max_positions
from expertly.model.hooks import CACHE
from expertly.model.loading import tokenizer_errors
from expertly.model.prompts import has_template, tokens_of
from expertly.model.templates import Renderer
from expertly.model.text import TextStreamer


@dataclass(frozen=True, slots=True)
class ChatSampling:
    """How tokens are chosen; None: as the model's generation_config says."""

    max_new_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    looks_up: bool = False  # drafts what stands earlier in the text and verifies it in one pass


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer and what it cost. Experts are counted while it was decoded, not while its prompt was read."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int  # of the prompt, which were not computed again
    ttft_s: float | None
    tpot_s: float | None  # mean of the tokens after the first
    generate_s: float
    hit_rate: float | None
    stall_share: float
    bytes_loaded: int
    was_stopped: bool
    rounded_to: str | None = None  # its experts, which are not those of the checkpoint then

    def facts(self) -> dict[str, Any]:
        return {"tokens": len(self.token_ids), **asdict(self)}

    def line(self) -> str:
        return in_brackets(
            f"{len(self.token_ids)} tokens",
            *([f"{format_number(1 / self.tpot_s)} tokens/s"] if self.tpot_s else []),
            f"TTFT {format_seconds(self.ttft_s)}",
            f"{format_share(self.hit_rate)} of experts hit, {format_nbytes(self.bytes_loaded)} loaded",
            f"stall {format_share(self.stall_share)}",
            *([f"experts rounded to {self.rounded_to}"] if self.rounded_to else []),
            *(["stopped"] if self.was_stopped else []),
        )


class Chat:
    """The messages so far, and the KV cache of their tokens. With `is_raw`, and for a model without a chat template,
    the model continues the text of the messages.
    """

    def __init__(self, model: Any, tokenizer: Any, sampling: ChatSampling, *, is_raw: bool = False) -> None:
        self.messages: list[dict[str, str]] = []
        self.is_raw = is_raw or not has_template(tokenizer)
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._renderer = Renderer()
        weakref.finalize(self, self._renderer.sandbox.close)
        self._kept = KeptCache(model)
        self._said: list[int] = []  # all tokens up to the last answer's end
        self._said_before: list[list[int]] = []  # the same before each answer
        self._num_retried = 0

    @property
    def last_message(self) -> str | None:
        return self.messages[-2]["content"] if self._said_before else None

    def answer(self, text: str, write: Callable[[str], None], *, is_instead: bool = False) -> Turn:
        """The model's answer to a message; `write` gets its text as it is made. Ctrl-C stops the answer, and what was
        written stays in the conversation. Raises ConfigError, and forgets the message, where the model has no room for
        it. `is_instead`: the message and its answer replace the last ones.
        """
        before = self.messages, self._said, self._said_before
        self._num_retried += is_instead  # with a seed, too, the answer is another one
        if is_instead:
            self.messages, self._said, self._said_before = self.messages[:-2], before[2][-1], before[2][:-1]
        self.messages = [*self.messages, {"role": "user", "content": text}]
        said = self._said
        try:
            answer = self._generate(self._tokens(), write)
        except BaseException:
            self.messages, self._said, self._said_before = before
            raise
        self.messages.append({"role": "assistant", "content": answer.text})
        self._said_before = [*self._said_before, said]
        return answer

    def begin_anew(self, instruction: str | None = None) -> None:
        """With this system message, or (None) the one that there is; with none where it is empty."""
        if instruction is None:
            self.messages = [message for message in self.messages if message["role"] == "system"]
        else:
            self.messages = [{"role": "system", "content": instruction}] if instruction else []
        self._said, self._said_before = [], []

    def _tokens(self) -> list[int]:
        """The whole conversation as tokens. Where the tokens of earlier answers still give the conversation's text they
        are kept as they were made, because the KV cache holds them: tokenising their text again often gives others.
        """
        tokens = tokens_of(self._tokenizer, self.messages, is_raw=self.is_raw, renderer=self._renderer)
        before, text = self._text(self._said), self._text(tokens)
        if not before or not text.startswith(before):
            return tokens  # a template that says less of an answer than the model did
        cut = bisect.bisect_left(range(len(tokens)), len(before), key=lambda num: len(self._text(tokens[:num])))
        if self._text(tokens[:cut]) == before:
            return self._said + tokens[cut:]
        with tokenizer_errors("prompt: the tokenizer cannot read it"):
            rest: list[int] = self._tokenizer(text[len(before) :], add_special_tokens=False)["input_ids"]
        is_same = self.is_raw and self._text(self._said + rest) == text
        return self._said + rest if is_same else tokens

    def _generate(self, tokens: list[int], write: Callable[[str], None]) -> Turn:
        model, sampling = self._model, self._sampling
        positions = max_positions(model)
        room = sampling.max_new_tokens if positions is None else min(sampling.max_new_tokens, positions - len(tokens))
        if room < 1:
            accepted = f"fewer than {positions}, the model's positions (in a chat, /clear begins anew)"
            raise ConfigError(f"prompt: {len(tokens)} tokens with what was said before; accepted: {accepted}")
        # transformers reads the whole prompt again into a cache that it drafts with
        cache, num_cached = (None, 0) if sampling.looks_up else self._kept.take(tokens)
        config = generation_config(model, room, sampling.temperature, sampling.top_p)
        config.return_dict_in_generate = True
        config.prompt_lookup_num_tokens = NUM_DRAFTED if sampling.looks_up else None
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed + self._num_retried)
        streamer = TextStreamer(self._decode, write)
        before, start_ns = expertly.stats(model).as_dict(), time.perf_counter_ns()
        with _stopped_by_interrupt() as stop:
            made = generate(
                model,
                tokens,
                config,
                **{CACHE: cache},
                streamer=streamer,
                stopping_criteria=[lambda ids, scores: torch.full(ids.shape[:1], stop.is_set(), device=ids.device)],
            )
        self._kept.keep(made)
        self._said = made.sequences[0].tolist()
        seconds = (time.perf_counter_ns() - start_ns) / 1e9
        after, times = expertly.stats(model).as_dict(), streamer.times_ns
        was, now = before["phases"]["decode"], after["phases"]["decode"]
        hits, *partial = (now[key] - was[key] for key in ("hits", "partial_hits", "misses"))
        num_demands = hits + sum(partial)
        return Turn(
            text=self._decode(streamer.tokens),
            token_ids=streamer.tokens,
            prompt_tokens=len(tokens),
            cached_tokens=num_cached,
            ttft_s=(times[0] - start_ns) / 1e9 if times else None,
            tpot_s=(times[-1] - times[0]) / 1e9 / (len(times) - 1) if len(times) > 1 else None,
            generate_s=seconds,
            hit_rate=hits / num_demands if num_demands else None,
            stall_share=(after["stall_s"] - before["stall_s"]) / seconds,
            bytes_loaded=after["bytes_loaded"] - before["bytes_loaded"],
            was_stopped=stop.is_set(),
            rounded_to=None if after["rounding"] is None else after["rounding"]["to"],
        )

    def _decode(self, tokens: list[int]) -> str:
        return self._text(tokens, skip_special_tokens=True)

    def _text(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        with tokenizer_errors("the tokenizer cannot write the model's tokens as text"):
            options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
            return str(self._tokenizer.decode(tokens, **options))


@contextlib.contextmanager
def _stopped_by_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second raises KeyboardInterrupt."""
    asked = threading.Event()

    def ask(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
