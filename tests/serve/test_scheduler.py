"""Who runs and who waits, without a model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from expertly.model.batching import Entry
from expertly.serve.errors import ApiError
from expertly.serve.request import ServedRequest, StopStrings
from expertly.serve.sampling import SampledToken, Sampling
from expertly.serve.scheduler import RequestScheduler, Room
from tests.serve.scripted import Uncached

pytestmark = pytest.mark.anyio

END = 0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Steps(Uncached):
    """A Stepper whose forward passes the test makes."""

    def __init__(self) -> None:
        self.running: dict[str, Entry] = {}

    def submit(self, entry: Entry) -> None:
        self.running[entry.name] = entry

    def cancel(self, name: str) -> None:
        self.running.pop(name, None)

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Story:
    """A scheduler, and what is done to it."""

    def __init__(self, **room: Any) -> None:
        self.steps = Steps()
        told = {"context": 64, "num_pages": 100, "max_running": 2, "max_queue": 2} | room
        self.scheduler = RequestScheduler(Room(**told))
        self.scheduler.start(lambda sampler, failed: self.steps)

    def ask(self, prompt: int = 4, max_tokens: int = 4, texts: int = 1, stops: Sequence[str] = ()) -> ServedRequest:
        request = ServedRequest(lambda tokens: "".join(map(chr, tokens)))
        for _ in range(texts):
            request.add([1] * prompt, max_tokens, [END], Sampling(temperature=0), stops)
        self.scheduler.submit(request)
        return request

    async def step(self, times: int = 1, token: int = ord("x")) -> None:
        """Each that runs writes a token; the model forgets those that it knows to have ended."""
        for _ in range(times):
            names = list(self.steps.running)
            for name in names:
                text = self.scheduler.running[name]
                if token in text.ends or len(text.tokens) + 1 >= text.max_tokens:
                    del self.steps.running[name]
            self.scheduler.sampled([(name, SampledToken(token)) for name in names])
            await asyncio.sleep(0)

    def names(self) -> list[int]:
        """Numbers of the requests that run."""
        return [text.request.number for text in self.scheduler.running.values()]

    def num_ended(self, outcome: str) -> float | None:
        return self.scheduler.metrics.registry.get_sample_value("expertly_requests_total", {"outcome": outcome})


async def test_first_come_first_served_and_places_are_given_again() -> None:
    story = Story()
    requests = [story.ask() for _ in range(4)]
    assert story.names() == [request.number for request in requests[:2]]
    with pytest.raises(ApiError) as raised:
        story.ask()
    assert raised.value.status == 429 and int(raised.value.headers["Retry-After"]) >= 1
    await story.step(4)
    assert story.names() == [request.number for request in requests[2:]]
    await story.step(4)
    assert story.names() == [] and story.num_ended("length") == 4
    deltas = [delta async for delta in requests[3]]
    assert "".join(delta.text for delta in deltas) == "xxxx" and deltas[-1].reason == "length"


async def test_many_texts_are_not_overtaken_by_one() -> None:
    story = Story(max_running=3)
    story.ask(texts=2)
    several, single = story.ask(texts=2), story.ask()
    assert list(story.scheduler.waiting) == [several, single], "or it would wait as long as single ones come"
    story.scheduler.cancel(several)
    assert not story.scheduler.waiting and story.names()[-1] == single.number


async def test_a_failed_pass() -> None:
    """Who was in it fails with its cause; who was not goes on where it was."""
    story = Story()
    first, second = story.ask(max_tokens=8), story.ask(max_tokens=8)
    await story.step()
    names = list(story.steps.running)
    story.steps.running.clear()
    story.scheduler.failed(names[:1], names[1:], RuntimeError("torn"))
    await asyncio.sleep(0)
    assert story.names() == [second.number]
    again = story.steps.running[names[1]]
    assert (list(again.prompt), again.max_new_tokens) == ([1, 1, 1, 1, ord("x")], 7)
    with pytest.raises(ApiError, match="torn"):
        _ = [delta async for delta in first]
    await story.step(7)
    assert "".join([delta.text async for delta in second]) == "x" * 8
    assert story.scheduler.problem is None


async def test_a_token_that_is_no_text_fails_its_request_alone() -> None:
    """As a tokenizer says of the numbers with which a vocabulary was filled up."""
    story = Story()
    first, second = story.ask(), story.ask()
    await story.step(token=0x110000)
    for request in (first, second):
        with pytest.raises(ApiError, match="token 1114112 cannot be made text"):
            _ = [delta async for delta in request]
    assert story.names() == [] and story.steps.running == {}


async def test_draining() -> None:
    story = Story(max_running=1)
    story.ask()
    story.ask()
    assert not story.scheduler.drain()
    with pytest.raises(ApiError) as raised:
        story.ask()
    assert raised.value.status == 503
    await story.step(7)
    assert not story.scheduler.drain()
    await story.step()
    assert story.scheduler.drain() and story.num_ended("length") == 2, "who waited was served, too"


def test_a_loop_that_was_closed_troubles_nobody() -> None:
    """The model's thread goes on until it is closed, too."""
    loop = asyncio.new_event_loop()

    async def begin() -> Story:
        story = Story()
        story.ask()
        return story

    story = loop.run_until_complete(begin())
    loop.close()
    names = list(story.steps.running)
    story.scheduler.sampled([(name, SampledToken(ord("x"))) for name in names])
    story.scheduler.failed(names, [], RuntimeError("torn"))
    story.scheduler.close()


async def test_closing_ends_what_is_under_way() -> None:
    story = Story(max_running=1)
    requests = [story.ask(), story.ask()]
    reading = [asyncio.ensure_future(anext(aiter(request))) for request in requests]
    await asyncio.sleep(0)
    await asyncio.to_thread(story.scheduler.close)
    for read in reading:
        with pytest.raises(ApiError, match="shutting down"):
            await asyncio.wait_for(read, 5)
    story.scheduler.close()
    await asyncio.sleep(0)
    assert story.num_ended("failed") == 2, "once"
    with pytest.raises(ApiError, match="shutting down"):
        story.ask()
    RequestScheduler(Room(64, 100, 2, 2)).close()  # that never began


# -- text as tokens come: nothing of a stop string ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_stop_strings_in_any_spans(seed: int) -> None:
    """Of several, the first by place ends it; a longer one that begins earlier may not have ended yet."""
    draw = random.Random(seed)
    for _ in range(400):
        text = "".join(draw.choices("ab", k=draw.randint(0, 12)))
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(0, 2))]
        stopper, shown, left = StopStrings(stops), "", text
        while left and not stopper.matched:
            size = draw.randint(1, 3)
            shown += stopper.add(left[:size])
            left = left[size:]
        shown += "" if stopper.matched else stopper.end()
        places = [text.find(stop) for stop in stops if stop in text]
        expected = text[: min(places)] if places else text
        assert bool(stopper.matched) == bool(places)
        assert shown == expected if len(stops) < 2 else (expected.startswith(shown) or shown.startswith(expected))
