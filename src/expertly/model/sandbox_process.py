"""The program of a sandbox (sandbox.py runs it by its path): renders chat templates, or compiles grammars.

Imports jinja2 and transformers' own file for chat templates, or llguidance, and nothing else of transformers and
nothing of ours: it takes 20 MB of memory and starts in a tenth of a second. A request is JSON behind its length, an
answer a letter, a comma or, where it is the last, a period, and text behind its length. A plus says that the process
is ready.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

LENGTH = struct.Struct("<Q")

MAX_MESSAGE = 1000
"""Characters of an error that are sent."""

GROWTH_NBYTES = 16 << 20
"""A process that a request has made larger by this ends; the next request gets a new one."""

FIRST_BYTES = 16
"""They lead to the first name of an object, where all its properties are possible."""

ALLOWED = 200
"""What a bias of llguidance has for a byte that may come next."""

PARENT_S = 10.0
"""How often a process that waits looks whether its parent is there."""

_STUBS = ("transformers.utils", "transformers.utils.import_utils", "numpy")
"""What transformers' file for chat templates imports."""


class TemplateService:
    """Renders conversations. An answer is T and the text, L and its length where that is above the most, or E and what
    the template raised.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._module = _templates_of(settings["file"])
        import jinja2.debug  # noqa: F401 - what an error imports

    def answer(self, request: dict[str, Any]) -> tuple[bytes, str]:
        normalized = getattr(self._module, "_normalize_chat_messages", list)
        options, variables = request["options"], request["variables"]
        texts, _ = self._module.render_jinja_template([normalized(request["messages"])], **options, **variables)
        if len(texts[0]) > request["most"]:
            return b"L", str(len(texts[0]))
        return b"T", texts[0]


def _templates_of(file: str) -> Any:
    """transformers' module for chat templates, from its file; by an import of transformers where another version needs
    more of it than the stubs have.
    """
    utils, availability, numpy = (ModuleType(name) for name in _STUBS)
    vars(utils).update(logging=SimpleNamespace(get_logger=lambda name: SimpleNamespace(warning_once=print)))
    vars(availability).update(is_jinja_available=lambda: True, is_torch_available=bool, is_vision_available=bool)
    vars(numpy).update(generic=())  # no value is one
    sys.modules.update(zip(_STUBS, (utils, availability, numpy), strict=True))
    try:
        spec = importlib.util.spec_from_file_location("transformers.utils.chat_template_utils", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.render_jinja_template([[]], chat_template="{{ messages | tojson }}")
        return module
    except Exception:  # whatever a file does that finds stubs for what it needs
        for name in _STUBS:
            del sys.modules[name]
        return importlib.import_module("transformers.utils.chat_template_utils")


class GrammarService:
    """Compiles grammars as the server does, for a vocabulary of bytes, and writes the first FIRST_BYTES by one. One
    special token stands for all of a grammar's. An answer is T, or E and what is wrong with the grammar.
    """

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>", b"<mark>")
    special_token_ids = (256, 257)

    def __init__(self, settings: dict[str, Any]) -> None:
        import llguidance

        self._library = llguidance
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), n_vocab=258, eos_token=256)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def answer(self, request: dict[str, Any]) -> tuple[bytes, str]:
        matcher_type = self._library.LLMatcher
        grammar = matcher_type.grammar_from_lark(request["text"])
        limits = self._library.LLParserLimits(verbose_errors=False)
        matcher = matcher_type(self._tokenizer, grammar, limits=limits, log_level=0)
        for _ in range(FIRST_BYTES):
            if matcher.is_error() or matcher.is_stopped():
                break
            matcher.consume_token(max(0, matcher.compute_logit_bias().find(ALLOWED)))
        return (b"E", matcher.get_error()) if matcher.is_error() else (b"T", "")


def _answer(service: Any, request: dict[str, Any]) -> tuple[bytes, bytes]:
    try:
        letter, text = service.answer(request)
    except MemoryError:
        letter, text = b"M", ""
    except Exception as error:  # a template raises anything
        letter, text = b"E", str(error) or type(error).__name__
    return letter, (text[:MAX_MESSAGE] if letter == b"E" else text).encode("utf-8", "surrogatepass")


def _read(num: int, parent: int) -> bytes:
    """So many bytes of stdin. Ends the process where there are no more or its parent is another: it ended."""
    parts = bytearray()
    while len(parts) < num:
        while not select.select([0], [], [], PARENT_S)[0]:
            if os.getppid() != parent:  # and a process that inherited the other end keeps it open
                os._exit(0)
        part = os.read(0, min(num - len(parts), 1 << 20))
        if not part:
            os._exit(0)
        parts += part
    return bytes(parts)


def _write(parts: Sequence[bytes]) -> None:
    raw = memoryview(b"".join(parts))
    while raw:
        raw = raw[os.write(0, raw) :]


def _memory() -> tuple[int, int]:
    """Bytes of address space and of memory that this process takes."""
    with open("/proc/self/statm") as file:
        pages = file.read().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def main() -> None:
    parent = os.getppid()
    settings = json.loads(sys.argv[1])
    sys.path[:0] = settings["folders"]
    service = (TemplateService if settings["service"] == "templates" else GrammarService)(settings)
    time.localtime()  # reads the time zone's file
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # where memory runs out, this process goes, not who asks
            file.write("1000")
    except OSError:
        pass  # a container may have no /proc to write to
    size, taken = _memory()
    for limit, most in (
        (resource.RLIMIT_AS, size + settings["nbytes"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    os.write(0, b"+")
    while True:
        (length,) = LENGTH.unpack(_read(LENGTH.size, parent))
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_s"])  # its signal ends the process, whatever it is doing
        letter, text = _answer(service, json.loads(_read(length, parent)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_end = letter == b"M" or _memory()[1] > taken + GROWTH_NBYTES
        _write((letter, b"." if is_end else b",", LENGTH.pack(len(text)), text))
        if is_end:
            os._exit(0)


if __name__ == "__main__":
    main()
