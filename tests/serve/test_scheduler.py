"""Who runs and who waits, without a model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from expertly.model.batching import Entry
from expertly.serve.errors import ApiError
from expertly.serve.metrics import RequestMetrics
from expertly.serve.request import ServedRequest, StopStrings
from expertly.serve.sampling import SampledToken, Sampling
from expertly.serve.scheduler import RequestScheduler, Room

pytestmark = pytest.mark.anyio

END = 0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Steps:
    """A Stepper whose forward passes the test makes."""

    def __init__(self) -> None:
        self.running: dict[str, Entry] = {}

    def submit(self, entry: Entry) -> None:
        self.running[entry.name] = entry

    def cancel(self, name: str) -> None:
        self.running.pop(name, None)

    def num_cached(self, name: str) -> int:
        return 0

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Story:
    """A scheduler, and what is done to it."""

    def __init__(self, **room: Any) -> None:
        self.steps, self.metrics = Steps(), RequestMetrics()
        told = {"context": 64, "page_tokens": 8, "num_pages": 100, "max_running": 2, "max_queue": 2} | room
        self.scheduler = RequestScheduler(Room(**told), self.metrics)
        self.scheduler.start(lambda sampler, failed: self.steps)

    def ask(self, prompt: int = 4, max_tokens: int = 4, texts: int = 1, stops: Sequence[str] = ()) -> ServedRequest:
        request = ServedRequest(lambda tokens: "".join(map(chr, tokens)), lambda: 0.0)
        for _ in range(texts):
            request.add([1] * prompt, max_tokens, [END], Sampling(temperature=0), stops)
        self.scheduler.check_size([prompt], max_tokens, texts, "prompt")
        self.scheduler.submit(request)
        return request

    async def step(self, token: int = ord("x")) -> None:
        """Each that runs writes a token; the model forgets those that it knows to have ended."""
        names = list(self.steps.running)
        for name in names:
            text = self.scheduler.running[name]
            if token in text.ends or len(text.tokens) + 1 >= text.max_tokens:
                del self.steps.running[name]
        self.scheduler.told([(name, SampledToken(token)) for name in names])
        await asyncio.sleep(0)

    def names(self) -> list[int]:
        """Numbers of the requests that run."""
        return [text.request.number for text in self.scheduler.running.values()]

    def num_ended(self, outcome: str) -> float | None:
        return self.metrics.registry.get_sample_value("expertly_requests_total", {"outcome": outcome})


async def test_first_come_first_served_and_places_are_given_again() -> None:
    one = Story()
    requests = [one.ask() for _ in range(4)]
    assert one.names() == [request.number for request in requests[:2]]
    with pytest.raises(ApiError) as raised:
        one.ask()
    assert raised.value.status == 429 and int(raised.value.headers["Retry-After"]) >= 1
    for _ in range(4):
        await one.step()
    assert one.names() == [request.number for request in requests[2:]]
    for _ in range(4):
        await one.step()
    assert one.names() == [] and one.scheduler.free_pages == 100
    assert one.num_ended("length") == 4
    deltas = [delta async for delta in requests[3]]
    assert "".join(delta.text for delta in deltas) == "xxxx" and deltas[-1].reason == "length"


async def test_a_large_one_is_not_overtaken() -> None:
    one = Story(num_pages=8, max_running=8)
    one.ask(prompt=20, max_tokens=20)  # 6 pages
    large, small = one.ask(prompt=20, max_tokens=20), one.ask(prompt=2, max_tokens=2)
    assert list(one.scheduler.waiting) == [large, small], "or it would wait as long as small ones come"
    one.scheduler.cancel(large)
    assert not one.scheduler.waiting and one.names()[-1] == small.number


async def test_what_can_never_fit_is_refused() -> None:
    one = Story(num_pages=8, max_running=4)
    for asked in ({"prompt": 60, "max_tokens": 5}, {"texts": 5}, {"prompt": 20, "max_tokens": 20, "texts": 2}):
        with pytest.raises(ApiError) as raised:
            one.ask(**asked)
        assert raised.value.status == 400
    assert one.names() == []
    one.scheduler.check_size([20, 2, 2], 2, 1, "prompt")  # 4, 2 and 2 pages
    with pytest.raises(ApiError):
        one.scheduler.check_size([30, 2, 2], 2, 1, "prompt")  # 5, 2 and 2


async def test_a_failed_pass() -> None:
    """Who was in it fails with its cause; who was not goes on where it was."""
    one = Story()
    first, second = one.ask(max_tokens=8), one.ask(max_tokens=8)
    await one.step()
    names = list(one.steps.running)
    one.steps.running.clear()
    one.scheduler.failed(names[:1], names[1:], RuntimeError("torn"))
    await asyncio.sleep(0)
    assert one.names() == [second.number]
    again = one.steps.running[names[1]]
    assert (list(again.prompt), again.max_new_tokens) == ([1, 1, 1, 1, ord("x")], 7)
    with pytest.raises(ApiError, match="torn"):
        _ = [delta async for delta in first]
    for _ in range(7):
        await one.step()
    assert "".join([delta.text async for delta in second]) == "x" * 8
    assert one.scheduler.problem is None


async def test_a_token_that_is_no_text_fails_its_request_alone() -> None:
    """As a tokenizer says of the numbers with which a vocabulary was filled up."""
    one = Story()
    first, second = one.ask(), one.ask()
    await one.step(0x110000)
    for request in (first, second):
        with pytest.raises(ApiError, match="token 1114112 cannot be made text"):
            _ = [delta async for delta in request]
    assert one.names() == [] and one.steps.running == {} and one.scheduler.free_pages == 100


async def test_draining() -> None:
    one = Story(max_running=1)
    one.ask()
    one.ask()
    drained = asyncio.ensure_future(one.scheduler.drained())
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as raised:
        one.ask()
    assert raised.value.status == 503
    for _ in range(7):
        await one.step()
        assert not drained.done()
    await one.step()
    await asyncio.wait_for(drained, 1)
    assert one.num_ended("length") == 2, "who waited was served, too"


def test_a_loop_that_was_closed_troubles_nobody() -> None:
    """The model's thread goes on until it is closed, too."""
    loop = asyncio.new_event_loop()

    async def begin() -> Story:
        one = Story()
        one.ask()
        return one

    one = loop.run_until_complete(begin())
    loop.close()
    names = list(one.steps.running)
    one.scheduler.told([(name, SampledToken(ord("x"))) for name in names])
    one.scheduler.failed(names, [], RuntimeError("torn"))
    one.scheduler.close()


async def test_closing_ends_what_is_under_way() -> None:
    one = Story(max_running=1)
    requests = [one.ask(), one.ask()]
    reading = [asyncio.ensure_future(anext(aiter(request))) for request in requests]
    await asyncio.sleep(0)
    await asyncio.to_thread(one.scheduler.close)
    for read in reading:
        with pytest.raises(ApiError, match="shutting down"):
            await asyncio.wait_for(read, 5)
    one.scheduler.close()
    await asyncio.sleep(0)
    assert one.num_ended("failed") == 2, "once"
    with pytest.raises(ApiError, match="shutting down"):
        one.ask()
    RequestScheduler(Room(64, 8, 100, 2, 2), RequestMetrics()).close()  # that never began


# -- text as tokens come: nothing of a stop string ---------------------------------------------------------------------


def whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """The first of them by place ends it."""
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return (text[: min(places)], True) if places else (text, False)


def test_stop_strings_in_any_spans() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        text = "".join(draw.choices("ab", k=draw.randint(0, 12)))
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(0, 2))]
        filter_, shown, left = StopStrings(stops), "", text
        while left and not filter_.is_stopped:
            size = draw.randint(1, 3)
            shown += filter_.add(left[:size])
            left = left[size:]
        if not filter_.is_stopped:
            shown += filter_.end()
        expected, is_stopped = whole(text, stops)
        assert filter_.is_stopped == is_stopped
        if len(stops) < 2:
            assert shown == expected
        else:  # a longer one that begins earlier may not have ended yet
            assert expected.startswith(shown) or shown.startswith(expected)
