"""Many requests at once: all right, none lost, and told at once where there is no room."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import expertly
from expertly.model.batching import Batch
from expertly.serve.memory import PAGE_TOKENS
from expertly.serve.server import bind, open_server
from expertly.serve.settings import ServeOptions
from tests.families import FAMILIES, make_checkpoint
from tests.serve.conftest import Serving, assembled_for, greedy, greedy_end, room_for, running, served
from tests.waiting import until

WORDS = ("sea", "king", "code", "winter", "river", "doctor", "ship", "garden", "letter", "number")
PROMPTS = [f"The old {word}" for word in WORDS]
NUM_TOKENS = 12


def streams(serving: Serving, prompts: Sequence[str], max_tokens: int = NUM_TOKENS) -> list[tuple[str, str | None]]:
    """The text of each and why it ended, all at once."""

    def stream(prompt: str) -> tuple[str, str | None]:
        chunks = list(serving.complete(prompt, max_tokens, stream=True, timeout=120))
        return "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(stream, prompts))


@pytest.mark.slow
def test_a_hundred_streams_are_each_what_generate_writes(demo: tuple[Any, Any]) -> None:
    expected = {prompt: greedy_end(*demo, prompt, 4) for prompt in PROMPTS}
    asked = [PROMPTS[i % len(PROMPTS)] for i in range(100)]
    with served(*demo, room_for(context=128, max_running=32, max_queue=100)) as serving:
        scheduler, seen = serving.scheduler, []
        admit = scheduler._admit
        scheduler._admit = lambda request: (admit(request), seen.append(len(scheduler.running)))
        got = streams(serving, asked, max_tokens=4)
        assert (len(scheduler.running), len(scheduler.waiting)) == (0, 0)
        until(lambda: scheduler.free_pages == scheduler.room.num_pages)
    assert got == [expected[prompt] for prompt in asked]
    assert max(seen) == 32, "as many as may run did run together"


def test_a_cache_of_one_context_serves_many_that_may_each_fill_it(demo: tuple[Any, Any]) -> None:
    """Texts take pages as they grow; who has to give them back goes on later, and no client sees more than a pause."""
    prompts = [f"{f'{word} ' * 20}{end}" for word in WORDS[:2] for end in ("and", "or")]
    expected = [greedy_end(*demo, prompt, 44) for prompt in prompts]
    with served(*demo, room_for(context=128, max_running=16, num_pages=5)) as serving:
        asked = {"n": 2, "temperature": 1, "seed": 5, "logprobs": 1}
        drawn = [serving.complete(prompts[0], 44, **asked) for _ in range(2)]
        with ThreadPoolExecutor() as pool:
            again = pool.submit(serving.complete, prompts[0], 44, **asked)
            assert streams(serving, prompts, 44) == expected
        texts = [[choice.text for choice in answer.choices] for answer in (*drawn, again.result(60))]
        assert texts[0] == texts[1] == texts[2], "its random numbers go on where they were"
        assert serving.scheduler.num_preempted > 2 and serving.scheduler.num_failed_steps == 0


def test_four_chats_of_a_large_context_run_in_a_cache_of_one(tmp_path: Path) -> None:
    """`--context` is a limit of each, not a part of the cache that it takes: without `max_tokens`, too."""
    family = FAMILIES["qwen3_moe"]
    family = replace(family, config=family.config | {"max_position_embeddings": 40960})
    folder = make_checkpoint(family, tmp_path / "model", tokenizer=True)
    assembled = open_server(ServeOptions(model=str(folder), served_model_name="demo", memory="50%", context=32768))
    prompts = [f"{word} " * 200 for word in WORDS[:3]]
    with closing(assembled.service), running(assembled) as serving, ExitStack() as streams:
        room, writing = serving.scheduler.room, serving.scheduler.running
        assert room.num_pages * PAGE_TOKENS < 1.01 * room.context
        alone = [serving.chat(prompt, NUM_TOKENS).choices[0].message.content for prompt in prompts]
        for num_answers, prompt in zip((1, 1, 2), prompts, strict=True):
            streams.enter_context(serving.chat(prompt, max_tokens=None, n=num_answers, stream=True))
        until(lambda: len(writing) == 4 and all(len(text.tokens) >= NUM_TOKENS for text in [*writing.values()]))
        decode = assembled.service.prompts.tokenizer.decode
        together = [decode(text.tokens[:NUM_TOKENS], skip_special_tokens=True) for text in [*writing.values()]]
        assert sorted(together) == sorted([*alone, alone[2]])
    expertly.unload(assembled.model)


def test_who_goes_frees_its_place(demo: tuple[Any, Any]) -> None:
    """Streaming or not, running or waiting."""
    body = {"model": "demo", "prompt": "The sea", "max_tokens": 400, "temperature": 0}
    with served(*demo, room_for(context=512, max_running=1)) as serving:
        for is_stream in (True, False):
            with (
                serving.http() as client,
                client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response,
            ):
                lines = response.iter_lines()
                for _ in range(6):
                    next(lines)
                release = hold(serving)
                leave(serving, body | {"stream": is_stream}, lambda: serving.scheduler.waiting)
                until(lambda: not serving.scheduler.waiting)
                assert len(serving.scheduler.running) == 1
                release.set()
            until(lambda: not serving.scheduler.running)
            until(lambda: serving.scheduler.free_pages == serving.scheduler.room.num_pages)
        writes = lambda: any(text.tokens for text in [*serving.scheduler.running.values()])  # noqa: E731
        leave(serving, body | {"stream": False}, writes)
        until(lambda: not serving.scheduler.running)
        assert serving.metrics()['expertly_requests_total{outcome="cancelled"}'] == 5
        written = expertly.stats(demo[0]).as_dict()["phases"]["decode"]["iterations"]
        time.sleep(0.5)
        passes = expertly.stats(demo[0]).as_dict()["phases"]["decode"]["iterations"] - written
        assert passes <= 1, "the pass that ran ended, and no other began"
        assert complete(serving, 4)


def test_who_reads_nothing_holds_nothing(demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that keeps its connection and lets its answer pile up is closed, and its text ends."""

    def bind_small(*address: Any) -> socket.socket:
        listener = bind(*address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # else the system takes the whole answer
        return listener

    monkeypatch.setattr("tests.serve.conftest.bind", bind_small)
    asked = {"model": "demo", "prompt": "The sea", "max_tokens": 1000, "stream": True, "logprobs": 5}
    body = json.dumps(asked | {"logit_bias": {str(demo[1].eos_token_id): -100}})
    head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    made = assembled_for(*demo, room_for(context=1024, max_running=1))
    with running(made, silent_s=1) as serving, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", httpx.URL(serving.url).port))
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
        until(lambda: serving.scheduler.running)
        assert complete(serving, 4), "it waited for the only place"
        assert serving.metrics()['expertly_requests_total{outcome="cancelled"}'] == 1


def leave(serving: Serving, body: dict[str, Any], is_time: Callable[[], object]) -> None:
    """Ask, and go as soon as it is time, which is before the answer."""
    connection = HTTPConnection(serving.url.removeprefix("http://"))
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    until(is_time)
    connection.close()


# -- when a forward pass fails ---------------------------------------------------------------------------------------


def test_a_stream_that_fails_says_so_and_who_waits_is_served(demo: tuple[Any, Any]) -> None:
    expected = greedy(*demo, "The old sea", 8)
    with served(*demo, room_for(max_running=1)) as serving, ThreadPoolExecutor() as pool:
        chunks = serving.complete("The old sea", 200, stream=True)
        next(chunks)
        waiting = pool.submit(complete, serving, 8)
        until(lambda: len(serving.scheduler.waiting) == 1)
        break_next_pass(demo[0], RuntimeError("broken"))
        with pytest.raises(openai.APIError, match="broken"):
            list(chunks)
        assert waiting.result(60) == expected


def test_a_model_that_cannot_begin_again_is_told_to_everybody(
    demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(*demo, room_for(max_running=1)) as serving:

        def cannot(self: Any) -> Any:
            raise MemoryError("no room for a cache")

        monkeypatch.setattr(Batch, "_make", cannot)
        break_next_pass(demo[0], RuntimeError("broken"), lambda: until(lambda: serving.scheduler.waiting))
        with ThreadPoolExecutor() as pool:
            errors: list[Any] = [pool.submit(complete, serving, 8).exception for _ in range(2)]
            assert sorted(error(60).status_code for error in errors) == [500, 503], "who ran, and who waited"
        with serving.http() as client:
            health = client.get("/health")
            assert health.status_code == 503 and "no room for a cache" in health.json()["reason"]
            assert client.get("/ready").status_code == 503
        with pytest.raises(openai.InternalServerError) as raised:
            complete(serving, 8)
        assert raised.value.code == "model_stopped"


def break_next_pass(model: Any, error: BaseException, before: Any = lambda: None) -> None:
    """The engine fails once, after `before`."""
    engine = expertly.api.handle(model).engine  # type: ignore[attr-defined]
    begin = engine.begin_iteration

    def fail(info: Any) -> None:
        engine.begin_iteration = begin
        before()
        raise error

    engine.begin_iteration = fail


def hold(serving: Serving) -> threading.Event:
    """No token is told until the event is set."""
    released, told = threading.Event(), serving.scheduler.sampler._tell

    def late(choices: Any) -> None:
        released.wait(60)
        told(choices)

    serving.scheduler.sampler._tell = late
    return released


def complete(serving: Serving, num_tokens: int, prompt: str = "The old sea") -> str:
    return str(serving.complete(prompt, num_tokens).choices[0].text)
