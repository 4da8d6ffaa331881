"""Answers that must follow a JSON schema: llguidance says after each token which ones may come next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from expertly.model.answers import CALL_MARKS
from expertly.serve.errors import ApiError, invalid
from expertly.serve.schema import Tool

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_SCHEMA = 256 << 10
"""Characters of a schema as JSON."""


class Grammars:
    """Makes grammars for one tokenizer, in any thread. Making the first one takes a moment."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = list(ends)
        self._of_library: Any = None

    def of_schema(self, schema: dict[str, Any]) -> LLMatcher:
        """A grammar of JSON that follows `schema`. Raises ApiError naming what the schema asks for that is not
        supported.
        """
        param = "response_format"
        return self._made(lambda library: library.grammar_from_json_schema(_text(schema, param)), param)

    def of_call(self, tools: Sequence[Tool]) -> LLMatcher:
        """A grammar of one call of one of `tools`, as JSON between marks. Raises ApiError."""
        calls = []
        for tool in tools:
            arguments = tool.function.parameters or {"type": "object"}
            properties = {"name": {"const": tool.function.name}, "arguments": arguments}
            calls.append(
                {"type": "object", "properties": properties, "required": ["name", "arguments"]}
                | {"additionalProperties": False}
            )
        opening, closing = (json.dumps(mark) for mark in CALL_MARKS)
        lark = f"start: {opening} call {closing}\ncall: %json {_text({'anyOf': calls}, 'tools')}"
        return self._made(lambda library: library.grammar_from_lark(lark), "tools")

    def _made(self, make: Any, param: str) -> LLMatcher:
        library, tokenizer = self._library(param)
        try:
            grammar = make(library.LLMatcher)
        except (ValueError, RuntimeError) as error:
            raise invalid(f"{param}: {error}", param) from None
        problem = library.LLMatcher.validate_grammar(grammar, tokenizer)
        if problem:
            raise invalid(f"{param}: cannot be kept: {' '.join(problem.split())}", param)
        matcher: LLMatcher = library.LLMatcher(tokenizer, grammar)
        return matcher

    def _library(self, param: str) -> tuple[Any, Any]:
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            raise _cannot(param, "the server has no llguidance; `pip install 'expertly[serve]'` brings it") from None
        if not self._ends:
            raise _cannot(param, "the model has no token that ends a text")
        if self._of_library is None:
            try:
                self._of_library = llguidance.hf.from_tokenizer(
                    self._tokenizer, n_vocab=self._vocabulary, eos_token=self._ends
                )
            except ValueError as error:
                raise _cannot(param, f"the model's tokenizer cannot be constrained: {error}") from None
        return llguidance, self._of_library


def _text(schema: dict[str, Any], param: str) -> str:
    """JSON in one line: a model that may write white space between values may write it for ever."""
    text = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})
    if len(text) > MAX_SCHEMA:
        raise invalid(f"{param}: {len(text)} characters; accepted: {MAX_SCHEMA}", param)
    return text


def _cannot(param: str, why: str) -> ApiError:
    return invalid(f"{param}: cannot be had: {why}", param, "unsupported_value")
