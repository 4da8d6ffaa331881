"""Answers that must follow a JSON schema: llguidance says after each token which ones may come next."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from expertly.core.errors import ConfigError
from expertly.core.untrusted import Bounds, check_value
from expertly.model.answers import CALL_MARKS
from expertly.model.sandbox import PATIENT_NICE, Sandbox, SlowError
from expertly.serve.errors import ApiError, invalid
from expertly.serve.schema import Tool

if TYPE_CHECKING:
    from llguidance import LLMatcher

BOUNDS = Bounds(256 << 10, depth=48, items=1024, text=4096)
"""What a schema may have at most. What takes long, much memory or a deep stack to compile ends in the sandbox."""

MAX_CONSTANT = 8192
"""Characters of a value that is to be written as it is, as JSON: of 20 000 each token takes 0.02 s."""

_NOTES = frozenset(("title", "description", "default", "$comment"))

_NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""Else the library makes tokens of all that must come next, anew for each: 0.5 s for names of 200 000 characters.
The sandbox does: so it sees what comes behind the beginning.
"""

COMPILE_CPU_S = 1.0
"""Processor time to compile a grammar, which is done first in a sandbox: the library ends for no limit. A multiple of
999 983 takes it 7 s. A schema of 1 000 properties takes 0.1 s.
"""

FIRST_COMPILE_CPU_S = 0.2
"""The same at first. A grammar that takes longer is compiled again where such grammars wait for each other."""

COMPILE_S = 4.0
"""The same in time."""

COMPILE_NBYTES = 32 << 20
"""Memory of a compiled grammar."""

STACK_NBYTES = 256 << 20
"""Address space for the stack of the thread that compiles: a schema of MAX_REFERENCES needs a hundredth of it."""


class Grammars:
    """Makes grammars for one tokenizer, in threads of their own. Making the first one takes a moment."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = list(ends)
        self._of_library: Any = None
        self._library_lock = threading.Lock()
        self._threads = [_thread_with_stack(f"expertly-serve-grammars-{number}") for number in range(2)]
        packages = ("llguidance",)
        self._sandboxes = (
            Sandbox("grammars", packages, FIRST_COMPILE_CPU_S, COMPILE_S, COMPILE_NBYTES),
            Sandbox("grammars", packages, COMPILE_CPU_S, COMPILE_S, COMPILE_NBYTES, nice=PATIENT_NICE),
        )

    async def of_schema(self, schema: dict[str, Any]) -> LLMatcher:
        """A grammar of JSON that follows `schema`. Raises ApiError naming what the schema asks for that is not
        supported.
        """
        return await self._made("response_format", lambda: f"start: %json {schema_text(schema, 'response_format')}")

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
            schema = schema_text({"anyOf": calls}, "tools")
            return f"start: {opening} call {closing}\ncall: %json {schema}"

        return await self._made("tools", make)

    def close(self) -> None:
        for sandbox in self._sandboxes:
            sandbox.close()
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)

    async def _made(self, param: str, make: Callable[[], str]) -> LLMatcher:
        """Compiles `make()`. Raises ApiError."""
        for thread, sandbox in zip(self._threads, self._sandboxes, strict=True):
            try:
                call = partial(self._compiled, sandbox, param, make)
                return await asyncio.get_running_loop().run_in_executor(thread, call)
            except ConfigError as error:
                problem = str(error)
                if not isinstance(error, SlowError):
                    break
        raise invalid(f"{param}: cannot be kept: compiling it {problem}", param)

    def _compiled(self, sandbox: Sandbox, param: str, make: Callable[[], str]) -> LLMatcher:
        """Compiles in the sandbox, and then here. Raises ApiError, and ConfigError where the sandbox ends."""
        with self._library_lock:
            library, tokenizer = self._library(param)
        text = make()
        letter, problem = sandbox.ask(json.dumps({"text": text}).encode())
        if letter == b"T":
            grammar = library.LLMatcher.grammar_from_lark(_NO_FORCING + text)
            limits = library.LLParserLimits(verbose_errors=False)
            matcher: LLMatcher = library.LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
            if not matcher.is_error():
                return matcher
            problem = matcher.get_error()
        raise invalid(f"{param}: cannot be kept: {one_line(problem)}", param)

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


def _thread_with_stack(name: str) -> ThreadPoolExecutor:
    """A thread with a stack of STACK_NBYTES."""
    thread = ThreadPoolExecutor(1, name)
    before = threading.stack_size(STACK_NBYTES)
    try:
        thread.submit(lambda: None)  # starts it
    finally:
        threading.stack_size(before)
    return thread


def one_line(problem: str) -> str:
    """What is wrong with a grammar, without the library's state, which it puts between marks behind, and without the
    grammar.
    """
    problem = problem.partition("\n<")[0].partition("\n   1 |")[0]
    return " ".join(problem.rpartition("failed to compile JSON schema: ")[2].split())


def schema_text(schema: dict[str, Any], param: str) -> str:
    """A schema as the library is given it. Raises ApiError where it is beyond BOUNDS. It asks for JSON in one line: a
    model that may write white space between values may write it for ever.
    """
    schema = _without_notes(schema, param)
    text = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})
    if len(text) > BOUNDS.nbytes:
        raise invalid(f"{param}: {len(text)} characters; accepted: {BOUNDS.nbytes}", param)
    try:
        check_value(schema, param, BOUNDS, ConfigError)
    except ConfigError as error:
        raise invalid(str(error), param) from None
    return text


def _without_notes(schema: Any, param: str) -> Any:
    """A schema without what it says to people, which may be long. In a value that is to be written nothing is that;
    raises ApiError where such a value is longer than MAX_CONSTANT.
    """
    if isinstance(schema, list):
        return [_without_notes(value, param) for value in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, value in schema.items():
        if name in ("const", "enum"):
            choices = value if name == "enum" and isinstance(value, list) else [value]
            length = max((len(json.dumps(choice)) for choice in choices), default=0)
            if length > MAX_CONSTANT:
                raise invalid(f"{param}: {length} characters of a constant; accepted: {MAX_CONSTANT}", param)
            kept[name] = value
        elif not (name in _NOTES and isinstance(value, str)):  # else it is a property of that name
            kept[name] = _without_notes(value, param)
    return kept


def _cannot(param: str, why: str) -> ApiError:
    return invalid(f"{param}: cannot be had: {why}", param, "unsupported_value")
