"""Many requests at once: all right, none lost, and told at once where there is no room."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import openai
import pytest

import expertly
from expertly.model.batching import Batch
from tests.serve.conftest import Serving, greedy, greedy_end, room_for, served

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
        assert scheduler.free_pages == scheduler.room.num_pages
    assert got == [expected[prompt] for prompt in asked]
    assert max(seen) == 32, "as many as may run did run together"


ALIKE = [f"{f'{word} ' * 70} {end}" for word in WORDS[:3] for end in ("and", "or")]
"""Upstream keeps pages of prompts that have been read for others that begin alike: no text lacks any for it."""


@pytest.mark.parametrize(("prompts", "context", "num_pages"), [(PROMPTS[:5], 64, 5), (ALIKE, 256, 14)])
def test_a_cache_that_holds_two_texts_serves_many(
    demo: tuple[Any, Any], prompts: list[str], context: int, num_pages: int
) -> None:
    """Pages are the limit, not places: what does not fit waits."""
    expected = [greedy_end(*demo, prompt, NUM_TOKENS) for prompt in prompts]
    with served(*demo, room_for(context=context, max_running=16, num_pages=num_pages)) as serving:
        assert streams(serving, prompts) == expected
        assert serving.scheduler.num_failed_steps == 0


def test_beyond_the_queue_is_told_at_once_when_to_come_again(demo: tuple[Any, Any]) -> None:
    with served(*demo, room_for(context=512, max_running=1, max_queue=2)) as serving, ThreadPoolExecutor() as pool:
        release = hold(serving)
        busy = [pool.submit(complete, serving, 8) for _ in range(3)]
        wait_for(lambda: len(serving.scheduler.waiting) == 2)
        with pytest.raises(openai.RateLimitError) as raised:
            complete(serving, 8)
        assert not any(one.done() for one in busy), "nothing had to end for it"
        assert int(raised.value.response.headers["retry-after"]) >= 1
        assert raised.value.code == "queue_full"
        release.set()
        assert all(one.result(60) for one in busy)
        assert complete(serving, 4), "there is room again"


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
                wait_for(lambda: not serving.scheduler.waiting)
                assert len(serving.scheduler.running) == 1
                release.set()
            wait_for(lambda: not serving.scheduler.running)
            assert serving.scheduler.free_pages == serving.scheduler.room.num_pages
        leave(
            serving, body | {"stream": False}, lambda: any(one.tokens for one in [*serving.scheduler.running.values()])
        )
        wait_for(lambda: not serving.scheduler.running)
        assert serving.metrics()['expertly_requests_total{outcome="cancelled"}'] == 5
        written = expertly.stats(demo[0]).as_dict()["phases"]["decode"]["iterations"]
        time.sleep(0.5)
        passes = expertly.stats(demo[0]).as_dict()["phases"]["decode"]["iterations"] - written
        assert passes <= 1, "the pass that ran ended, and no other began"
        assert complete(serving, 4)


def leave(serving: Serving, body: dict[str, Any], is_time: Callable[[], object]) -> None:
    """Ask, and go as soon as it is time, which is before the answer."""
    connection = HTTPConnection(serving.url.removeprefix("http://"))
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    wait_for(is_time)
    connection.close()


def test_a_long_prompt_does_not_keep_others_from_writing(demo: tuple[Any, Any]) -> None:
    """It is read in parts."""
    expected = greedy(*demo, "The sea", 30)
    long = "word " * 600
    with served(*demo, room_for(context=1024, max_running=4)) as serving, ThreadPoolExecutor() as pool:
        short, read = (pool.submit(complete, serving, *one) for one in ((30, "The sea"), (4, long)))
        assert (short.result(90), read.result(90)) == (expected, greedy(*demo, long, 4))


# -- when a forward pass fails ---------------------------------------------------------------------------------------


def test_a_stream_that_fails_says_so_and_who_waits_is_served(demo: tuple[Any, Any]) -> None:
    with served(*demo, room_for(max_running=1)) as serving:
        expected = complete(serving, 8)
        body = {"model": "demo", "prompt": "The old sea", "max_tokens": 200, "temperature": 0, "stream": True}
        results: list[str] = []
        with serving.http() as client, client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            waiting = threading.Thread(target=lambda: results.append(complete(serving, 8)))
            waiting.start()
            wait_for(lambda: len(serving.scheduler.waiting) == 1)
            break_next_pass(demo[0], RuntimeError("broken"))
            last = [line for line in lines if line][-1]
        assert "broken" in json.loads(last.removeprefix("data: "))["error"]["message"]
        waiting.join(60)
        assert results == [expected]


def test_who_was_not_in_the_failed_pass_is_served(demo: tuple[Any, Any]) -> None:
    """It came while the pass ran, and had been given to the model."""
    model = demo[0]
    expected = greedy(*demo, "The old sea", 8)
    results: list[str] = []
    with served(*demo, room_for(max_running=4)) as serving:
        other = threading.Thread(target=lambda: results.append(complete(serving, 8)))

        def come() -> None:
            other.start()
            wait_for(lambda: len(serving.scheduler.running) == 2)

        break_next_pass(model, RuntimeError("a page of the disk could not be read"), come)
        with pytest.raises(openai.InternalServerError, match="a page of the disk could not be read") as raised:
            complete(serving, 8, "A small ship")
        assert raised.value.type == "server_error"
        other.join(60)
        assert serving.scheduler.num_failed_steps == 1
        assert serving.scheduler.free_pages == serving.scheduler.room.num_pages
        assert serving.http().get("/health").status_code == 200
    assert results == [expected]


def test_a_model_that_cannot_begin_again_is_told_to_everybody(
    demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(*demo, room_for(max_running=1)) as serving:

        def cannot(self: Any) -> Any:
            raise MemoryError("no room for a cache")

        monkeypatch.setattr(Batch, "_make", cannot)
        break_next_pass(demo[0], RuntimeError("broken"), lambda: wait_for(lambda: serving.scheduler.waiting))
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
    released, told = threading.Event(), serving.scheduler.sampler._told

    def late(choices: Any) -> None:
        released.wait(60)
        told(choices)

    serving.scheduler.sampler._told = late
    return released


def complete(serving: Serving, num_tokens: int, prompt: str = "The old sea") -> str:
    return str(serving.complete(prompt, num_tokens).choices[0].text)


def wait_for(is_so: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)
