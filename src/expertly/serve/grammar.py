"""Answers that must follow a JSON schema: llguidance says after each token which ones may come next."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from expertly.core.errors import ConfigError
from expertly.core.untrusted import Bounds, check_value
from expertly.model.answers import CALL_MARKS
from expertly.model.sandbox import Sandbox
from expertly.serve.errors import invalid
from expertly.serve.schema import Tool

if TYPE_CHECKING:
    from llguidance import LLMatcher

BOUNDS = Bounds(256 << 10, depth=48, items=1024, text=16 << 10)
"""What a schema may have at most: of a constant of 20 000 characters each token takes 0.02 s."""

_NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""Else the library makes tokens of all that must come next, anew for each: 0.5 s for names of 200 000 characters.
The sandbox does: so it sees what comes behind the beginning.
"""

COMPILE_CPU_S, COMPILE_S = 1.0, 4.0
"""Processor time and time to compile a grammar. It is done in a sandbox: the library ends for no limit. A multiple of
999 983 takes it 7 s, 1 000 properties 0.1 s.
"""

COMPILE_NBYTES = 32 << 20
"""Memory of a compiled grammar."""

STACK_NBYTES = 256 << 20
"""Address space for the stack of the thread that compiles: a schema of MAX_REFERENCES needs a hundredth of it."""


class Grammars:
    """Makes grammars for one tokenizer, in a thread of its own. Making the first one takes a moment."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = list(ends)
        self._of_library: Any = None
        self._sandbox = Sandbox("grammars", ("llguidance",), COMPILE_CPU_S, COMPILE_S, COMPILE_NBYTES)
        self._thread = ThreadPoolExecutor(1, "expertly-serve-grammars")
        before = threading.stack_size(STACK_NBYTES)
        try:
            self._thread.submit(lambda: None)  # starts it
        finally:
            threading.stack_size(before)

    async def of_schema(self, schema: dict[str, Any]) -> LLMatcher:
        """A grammar of JSON that follows `schema`. Raises ApiError naming what of it is not supported."""
        return await self._made("response_format", lambda: f"start: %json {_schema_text(schema, 'response_format')}")

    async def of_call(self, tools: Sequence[Tool]) -> LLMatcher:
        """A grammar of one call of one of `tools`, as JSON between marks. Raises ApiError."""

        def make() -> str:
            calls = []
            for number, tool in enumerate(tools):
                # a document of its own: its references are to its own definitions
                arguments = {"$id": f"urn:tool:{number}"} | (tool.function.parameters or {"type": "object"})
                properties = {"name": {"const": tool.function.name}, "arguments": arguments}
                required = {"required": list(properties), "additionalProperties": False}
                calls.append({"type": "object", "properties": properties, **required})
            opening, closing = (json.dumps(mark) for mark in CALL_MARKS)
            schema = _schema_text({"anyOf": calls}, "tools")
            return f"start: {opening} call {closing}\ncall: %json {schema}"

        return await self._made("tools", make)

    def close(self) -> None:
        self._sandbox.close()
        self._thread.shutdown(cancel_futures=True)

    async def _made(self, param: str, make: Callable[[], str]) -> LLMatcher:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._compiled, param, make)

    def _compiled(self, param: str, make: Callable[[], str]) -> LLMatcher:
        """Compiles `make()` in the sandbox, and then here. Raises ApiError."""
        library, tokenizer = self._library(param)
        text = make()
        try:
            letter, problem = self._sandbox.ask(json.dumps({"text": text}).encode())
        except ConfigError as error:
            raise invalid(f"{param}: cannot be kept: compiling it {error}", param) from None
        if letter == b"T":
            grammar = library.LLMatcher.grammar_from_lark(_NO_FORCING + text)
            limits = library.LLParserLimits(verbose_errors=False)
            matcher: LLMatcher = library.LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
            if not matcher.is_error():
                return matcher
            problem = matcher.get_error()
        # without the library's state, which it puts between marks behind, and without the grammar
        problem = problem.partition("\n<")[0].partition("\n   1 |")[0]
        reason = " ".join(problem.rpartition("failed to compile JSON schema: ")[2].split())
        raise invalid(f"{param}: cannot be kept: {reason}", param)

    def _library(self, param: str) -> tuple[Any, Any]:
        try:
            import llguidance
            import llguidance.hf

            if not self._ends:
                raise ValueError("the model has no token that ends a text")
            if self._of_library is None:
                make = llguidance.hf.from_tokenizer
                self._of_library = make(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._ends)
        except ImportError:
            problem = "the server has no llguidance; `pip install 'expertly[serve]'` brings it"
        except ValueError as error:
            problem = f"the model's tokenizer cannot be constrained: {error}"
        else:
            return llguidance, self._of_library
        raise invalid(f"{param}: cannot be had: {problem}", param, "unsupported_value")


def _schema_text(schema: dict[str, Any], param: str) -> str:
    """A schema as the library is given it. Raises ApiError where it is beyond BOUNDS. It asks for JSON in one line: a
    model that may write white space between values may write it for ever.
    """
    text = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})
    if len(text) > BOUNDS.nbytes:
        raise invalid(f"{param}: {len(text)} characters; accepted: {BOUNDS.nbytes}", param)
    try:
        check_value(schema, param, BOUNDS, ConfigError)
    except ConfigError as error:
        raise invalid(str(error), param) from None
    return text
