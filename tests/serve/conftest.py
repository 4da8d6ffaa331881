"""Servers on free ports, in threads of the tests' own process: the demo model, and a scripted one."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
import uvicorn.server
from transformers import AutoModelForCausalLM
from transformers.generation.continuous_batching import continuous_api

import expertly
from expertly.data import demo_folder
from expertly.serve.memory import PAGE_TOKENS
from expertly.serve.scheduler import Room
from expertly.serve.server import ApiServer, Assembled, assemble, bind
from expertly.serve.settings import ServeOptions

KEY = "a-key-that-nobody-guesses"


@dataclass
class Serving:
    """A server that runs, and clients of it."""

    url: str
    assembled: Assembled
    server: ApiServer

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def complete(self, prompt: Any, max_tokens: int = 8, **more: Any) -> Any:
        """Greedy, unless something else is said."""
        asked = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return self.client.completions.create(**(asked | more))

    def chat(self, said: str, max_tokens: int = 24, **more: Any) -> Any:
        """The same, of one message."""
        asked = {"model": "demo", "messages": [{"role": "user", "content": said}], "max_tokens": max_tokens}
        return self.client.chat.completions.create(**({"temperature": 0} | asked | more))

    def http(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **more)

    def metrics(self) -> dict[str, float]:
        """What /metrics says, by name and labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    @property
    def scheduler(self) -> Any:
        return self.assembled.service.scheduler


def room_for(context: int = 512, max_running: int = 16, max_queue: int = 64, num_pages: int | None = None) -> Room:
    pages = max_running * (context // PAGE_TOKENS + 1) if num_pages is None else num_pages
    return Room(context, pages, max_running, max_queue)


@contextmanager
def running(assembled: Assembled, **options: Any) -> Iterator[Serving]:
    """Served until the block ends; see ApiServer."""
    listener: socket.socket = bind("127.0.0.1", 0)
    is_up = threading.Event()
    server = ApiServer(assembled, announce=is_up.set, **options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert is_up.wait(60), "the server did not start"
        yield Serving(f"http://127.0.0.1:{listener.getsockname()[1]}", assembled, server)
    finally:
        server.end()
        thread.join(60)
        listener.close()
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def served(*model: Any, **more: Any) -> Iterator[Serving]:
    """A model as `expertly serve` serves it; see `assembled_for`."""
    with running(assembled_for(*model, **more)) as serving:
        yield serving


def assembled_for(
    model: Any,
    tokenizer: Any,
    room: Room | None = None,
    template: str | None = None,
    keys: Sequence[str] = (),
    **options: Any,
) -> Assembled:
    told = ServeOptions(**({"served_model_name": "demo"} | options))
    return assemble(model, tokenizer, told, keys, room or room_for(), template)


@pytest.fixture(scope="session", autouse=True)
def do_not_collect() -> Iterator[None]:
    """Upstream's continuous batching collects garbage when it ends, twice: here, most of what a server takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuous_api, "gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture(scope="session", autouse=True)
def end_soon() -> Iterator[None]:
    """uvicorn looks ten times a second whether it is to end, and then waits as long for connections to close."""
    quick = SimpleNamespace(**(vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / 10)}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", quick)
        yield


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[Any, Any]]:
    """The demo model in float32, half of its experts in memory."""
    model, tokenizer = expertly.load(memory="50%", dtype="float32", device="cpu", system="lru")
    yield model, tokenizer
    expertly.unload(model)


@pytest.fixture(scope="module")
def serving(demo: tuple[Any, Any]) -> Iterator[Serving]:
    with served(*demo) as found:
        yield found


@cache
def plain_demo() -> Any:
    """The demo model as transformers has it: what is served must not differ from it, and may not be called itself."""
    return AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()


def greedy(model: Any, tokenizer: Any, prompt: str, max_tokens: int) -> str:
    """What `generate` of the unmodified model writes behind the prompt, alone."""
    return greedy_end(model, tokenizer, prompt, max_tokens)[0]


@cache
def greedy_end(model: Any, tokenizer: Any, prompt: str, max_tokens: int) -> tuple[str, str]:
    """The same, and why it ends."""
    plain = plain_demo() if hasattr(model, "_expertly_handle") else model
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = plain.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    written = output[0, inputs["input_ids"].shape[1] :]
    reason = "stop" if int(written[-1]) == tokenizer.eos_token_id else "length"
    return tokenizer.decode(written, skip_special_tokens=True), reason
