"""What the server does apart from HTTP: checks requests and runs them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from expertly.model.answers import AnswerReader
from expertly.serve.answers import ChatAnswer, CompletionAnswer, Json
from expertly.serve.errors import ApiError, invalid, renamed
from expertly.serve.grammar import Grammars
from expertly.serve.messages import CountRequest, MessagesAnswer, MessagesRequest
from expertly.serve.prompts import Prompts, as_told
from expertly.serve.reading import check
from expertly.serve.request import ServedRequest
from expertly.serve.responses import ResponsesAnswer, ResponsesRequest
from expertly.serve.sampling import Sampling
from expertly.serve.scheduler import RequestScheduler
from expertly.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, Generation, TokenizeRequest, Tuning

MAX_IGNORED_NAMED = 100  # how many fields without effect the log names

log = logging.getLogger("expertly.serve")


class Service:
    """One model and who may use it, in the server's event loop. `about`: the model as /v1/models tells of it."""

    def __init__(
        self, about: Json, prompts: Prompts, scheduler: RequestScheduler, ends: Sequence[int], stops: Sequence[str]
    ) -> None:
        self.about = about
        self.names: list[str] = about["expertly"]["names"]
        self.prompts = prompts
        self.scheduler = scheduler
        self._ends = tuple(ends)
        self._stops = tuple(stops)
        marks = (prompts.special_tokens.get(mark) for mark in prompts.answers.calls.ends)
        grammar_ends = [*self._ends, *(token for token in marks if token is not None)]
        self._grammars = Grammars(prompts.tokenizer, prompts.vocabulary, grammar_ends)
        self._ignored: set[str] = set()

    async def chat(self, asked: ChatRequest) -> ChatAnswer:
        self._check(asked)
        return ChatAnswer(asked, self.prompts, await self._conversation(asked))

    async def respond(self, asked: ResponsesRequest) -> ResponsesAnswer:
        with renamed(asked.of_chat):
            return ResponsesAnswer(asked, await self._conversation(self._as_chat(asked)))

    async def message(self, asked: MessagesRequest) -> MessagesAnswer:
        with renamed(asked.of_chat):
            return MessagesAnswer(asked, self.prompts, await self._conversation(self._as_chat(asked)))

    async def count(self, asked: CountRequest) -> Json:
        chat = self._as_chat(asked)
        prompt, _ = await self.prompts.of_messages(chat.messages, chat.offered, chat.variables)
        return {"input_tokens": len(prompt)}

    async def complete(self, asked: CompletionRequest) -> CompletionAnswer:
        self._check(asked)
        if asked.best_of not in (None, asked.n or 1):
            raise invalid("best_of: none is chosen among several; accepted: the value of n", "best_of")
        prompts = [await self.prompts.of_text(prompt) for prompt in asked.prompts]
        limit = self._limit(asked, asked.max_tokens, prompts, "prompt")
        sampling = asked.sampling(asked.logprobs)
        if asked.constraint is not None:
            sampling = replace(sampling, grammar=await self._grammars.of_answer(asked.constraint))
        scores_prompt = bool(asked.echo) and asked.logprobs is not None
        request = self._request(asked, prompts, limit, sampling, scores_prompt=scores_prompt)
        return CompletionAnswer(asked, self.prompts, request)

    async def tokenize(self, asked: TokenizeRequest) -> Json:
        """As vLLM answers."""
        self.check_model(asked.model)
        if asked.prompt is not None:
            tokens = await self.prompts.of_text(asked.prompt, asked.add_special_tokens)
        else:
            if "messages" not in (asked.model_extra or {}):
                raise invalid("prompt: required, or messages", "prompt", "missing_required_parameter")
            chat = check(ChatRequest, asked.model_extra)
            tokens, _ = await self.prompts.of_messages(chat.messages, chat.offered, chat.variables)
        names = self.prompts.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
        length = self.scheduler.room.context
        return {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": names}

    async def detokenize(self, asked: DetokenizeRequest) -> Json:
        self.check_model(asked.model)
        return {"prompt": await self.prompts.text_of(asked.tokens)}

    def start(self, request: ServedRequest) -> None:
        """Run the request, or queue it. Raises ApiError."""
        self.scheduler.submit(request)
        text = "request %d: %d prompt tokens, %d texts of at most %d tokens"
        log.info(text, request.number, request.num_prompt_tokens, len(request.texts), request.texts[0].max_tokens)

    def close(self) -> None:
        """End the model's threads, processes and other threads. Any thread may call. Idempotent."""
        self.scheduler.close()
        self.prompts.close()
        self._grammars.close()

    def check_model(self, name: str | None) -> None:
        """Raises ApiError where the name is another model's; none is this one's."""
        if name is not None and name not in self.names:
            sentence = f"the model {name!r} is not here; accepted: {', '.join(map(repr, self.names))}"
            raise ApiError(404, sentence, param="model", code="model_not_found")

    def _limit(self, asked: Generation, most: int | None, prompts: Sequence[Sequence[int]], param: str) -> int:
        """How many tokens each text may have. Raises ApiError where none, or the texts could never run together."""
        room, length = self.scheduler.room, max(map(len, prompts))
        if length >= room.context:
            sentence = f"{param}: {length} tokens; accepted: {room.context} together with those to write (--context)"
            raise invalid(sentence, param, "context_length_exceeded")
        if not all(prompts):
            raise invalid(f"{param}: gives no token; accepted: at least one word", param)
        if (num_texts := len(prompts) * (asked.n or 1)) > room.max_running:
            raise invalid(f"n: {num_texts} texts at a time; accepted: {room.max_running} (--max-running)", "n")
        return min(most or room.context, room.context - length)

    def _check(self, asked: Tuning) -> None:
        """Check its model, and name fields and tools that nothing reads in the log, each once."""
        self.check_model(asked.model)
        asked.model = asked.model or self.names[0]
        for name in asked.unknown_fields():
            if name not in self._ignored and len(self._ignored) < MAX_IGNORED_NAMED:
                self._ignored.add(name)
                log.info("field %r: has no effect here", name[:100])

    def _as_chat(self, asked: ResponsesRequest | CountRequest) -> ChatRequest:
        self._check(asked)
        return check(ChatRequest, asked.as_chat())

    async def _conversation(self, asked: ChatRequest) -> ServedRequest:
        prompt, begun = await self.prompts.of_messages(asked.messages, asked.offered, asked.variables)
        limit = self._limit(asked, asked.limit, [prompt], "messages")
        sampling = asked.sampling((asked.top_logprobs or 0) if asked.logprobs else None)
        answers, constraint = self.prompts.answers, None if asked.forced else asked.constraint
        stage = answers.stage(begun, asked.messages[-1].text if asked.continue_final_message else "")
        if constraint is not None or asked.forced:
            if answers.calls.kind == "gemma":  # no library has a schema in Gemma's own way: its arguments are JSON then
                answers = replace(answers, calls=replace(answers.calls, kind="json", parameter=""))
            making = self._grammars.of_answer(constraint, answers, stage, asked.forced or asked.offered)
            sampling = replace(sampling, grammar=await making)
        how: Json = {"stage": stage, "is_single": asked.parallel_tool_calls is False, "is_whole": not asked.stream}
        how["is_constrained"] = sampling.grammar is not None
        texts, tools = range(asked.n or 1), as_told(asked.offered)
        readers = {index: reader for index in texts if (reader := answers.reader(begun, tools, **how)) is not None}
        return self._request(asked, [prompt], limit, sampling, readers)

    def _request(
        self,
        asked: Generation,
        prompts: Sequence[Sequence[int]],
        limit: int,
        sampling: Sampling,
        readers: Mapping[int, AnswerReader] | None = None,
        scores_prompt: bool = False,
    ) -> ServedRequest:
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            if tokens := [int(token) for token in getattr(asked, name) or ()]:
                self.prompts.check_tokens(tokens, name)
        # a stop string that is a special token is no text, and found by its number
        special, is_endless = self.prompts.special_tokens, asked.ignore_eos and sampling.grammar is None
        marks = () if readers is None or is_endless else self.prompts.answers.calls.ends
        named = [special[stop] for stop in (*self._stops, *asked.stops, *marks) if stop in special]
        ends = [*(() if is_endless else self._ends), *(asked.stop_token_ids or ()), *named]
        request = ServedRequest(self.prompts.decoder(readers[0].marks if readers else ""), readers or {})
        for prompt in prompts:
            begun, script = (prompt[:1], tuple(prompt[1:])) if scores_prompt else (prompt, ())
            if not set(ends).isdisjoint(script):
                raise invalid("prompt: holds a token that ends a text, behind which echo has no logprobs", "prompt")
            for number in range(asked.n or 1):
                # the first text has the request's seed, the others seeds derived from it
                seed = None if sampling.seed is None else (sampling.seed + number * 0x9E3779B97F4A7C15) % 2**64
                of_text = replace(sampling, seed=seed, script=script, ends=ends)
                request.add(begun, limit + len(script), ends, of_text, (*self._stops, *asked.stops))
        return request
