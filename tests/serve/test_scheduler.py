"""Who runs and who waits, without a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from expertly.core.errors import EngineClosedError
from expertly.model.batching import Entry
from expertly.serve.errors import ApiError
from expertly.serve.request import ServedRequest
from expertly.serve.sampling import SampledToken, Sampling
from expertly.serve.scheduler import RequestScheduler, Room

END = 0


class Steps:
    """A Stepper whose forward passes the test makes."""

    def __init__(self) -> None:
        self.running: dict[str, Entry] = {}
        self.lives = True

    def submit(self, entry: Entry) -> None:
        self.running[entry.name] = entry

    def cancel(self, name: str) -> None:
        self.running.pop(name, None)

    def is_alive(self) -> bool:
        return self.lives

    def close(self) -> None:
        pass


class Heard:
    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def first_token(self, request: ServedRequest) -> None: ...

    def token(self, request: ServedRequest, seconds: float | None) -> None: ...

    def ended(self, request: ServedRequest, outcome: str) -> None:
        self.outcomes.append(outcome)


class Story:
    """A scheduler, and what is done to it."""

    def __init__(self, **room: Any) -> None:
        self.steps, self.heard = Steps(), Heard()
        told = {"context": 64, "page_tokens": 8, "num_pages": 100, "max_running": 2, "max_queue": 2} | room
        self.scheduler = RequestScheduler(Room(**told), self.heard)
        self.scheduler.start(lambda sampler, failed: self.steps)

    def ask(self, prompt: int = 4, max_tokens: int = 4, texts: int = 1, stops: Sequence[str] = ()) -> ServedRequest:
        request = ServedRequest(lambda tokens: "".join(map(chr, tokens)), lambda: 0.0)
        for _ in range(texts):
            request.add([1] * prompt, max_tokens, [END], Sampling(temperature=0), stops)
        self.scheduler.check_size(prompt, max_tokens, texts, "prompt")
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


def run(story: Any) -> None:
    asyncio.run(story())


def test_first_come_first_served_and_places_are_given_again() -> None:
    async def story() -> None:
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
        assert one.heard.outcomes == ["length"] * 4
        deltas = [delta async for delta in requests[3]]
        assert "".join(delta.text for delta in deltas) == "xxxx" and deltas[-1].reason == "length"

    run(story)


def test_a_large_one_is_not_overtaken() -> None:
    async def story() -> None:
        one = Story(num_pages=8, max_running=8)
        one.ask(prompt=20, max_tokens=20)  # 6 pages
        large, small = one.ask(prompt=20, max_tokens=20), one.ask(prompt=2, max_tokens=2)
        assert list(one.scheduler.waiting) == [large, small], "or it would wait as long as small ones come"
        one.scheduler.cancel(large)
        assert not one.scheduler.waiting and one.names()[-1] == small.number

    run(story)


def test_what_can_never_fit_is_refused() -> None:
    async def story() -> None:
        one = Story(num_pages=8, max_running=4)
        for asked in ({"prompt": 60, "max_tokens": 5}, {"texts": 5}, {"prompt": 20, "max_tokens": 20, "texts": 2}):
            with pytest.raises(ApiError) as raised:
                one.ask(**asked)
            assert raised.value.status == 400
        assert one.names() == []

    run(story)


def test_a_stop_string_frees_the_place_and_tells_the_model() -> None:
    async def story() -> None:
        one = Story(max_running=1)
        request = one.ask(max_tokens=40, stops=["xx"])
        await one.step()
        await one.step()
        assert one.steps.running == {} and one.names() == []
        deltas = [delta async for delta in request]
        assert "".join(delta.text for delta in deltas) == "" and deltas[-1].reason == "stop"
        assert request.num_tokens == 2

    run(story)


def test_leaving_while_running_or_waiting() -> None:
    async def story() -> None:
        one = Story(max_running=1)
        first, second, third = one.ask(), one.ask(), one.ask()
        one.scheduler.cancel(second)
        one.scheduler.cancel(first)
        assert one.names() == [third.number] and len(one.steps.running) == 1
        one.scheduler.cancel(first)
        await one.step(END)
        one.scheduler.cancel(third)
        assert one.heard.outcomes == ["cancelled", "cancelled", "stop"]
        assert one.scheduler.free_pages == 100

    run(story)


def test_a_failed_pass() -> None:
    """Who was in it fails with its cause; who was not goes on where it was."""

    async def story() -> None:
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

    run(story)


def test_a_token_that_is_no_text_fails_its_request_alone() -> None:
    """As a tokenizer says of the numbers with which a vocabulary was filled up."""

    async def story() -> None:
        one = Story()
        first, second = one.ask(), one.ask()
        await one.step(0x110000)
        for request in (first, second):
            with pytest.raises(ApiError, match="token 1114112 cannot be made text"):
                _ = [delta async for delta in request]
        assert one.names() == [] and one.steps.running == {} and one.scheduler.free_pages == 100

    run(story)


def test_a_model_that_is_gone_ends_everything() -> None:
    async def story() -> None:
        one = Story(max_running=1)
        running, waiting = one.ask(), one.ask()
        one.steps.running.clear()
        one.scheduler.failed([], [], EngineClosedError("unloaded"))
        await asyncio.sleep(0)
        for request in (running, waiting):
            with pytest.raises(ApiError):
                _ = [delta async for delta in request]
        assert one.scheduler.problem == "unloaded"
        with pytest.raises(ApiError) as raised:
            one.ask()
        assert raised.value.status == 503

    run(story)


def test_draining() -> None:
    async def story() -> None:
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
        assert one.heard.outcomes == ["length", "length"], "who waited was served, too"

    run(story)


def test_one_at_a_time() -> None:
    async def story() -> None:
        one = Story(is_one_at_a_time=True, max_running=16)
        first, second = one.ask(texts=3), one.ask()
        assert set(one.names()) == {first.number}
        for _ in range(4):
            await one.step()
        assert one.names() == [second.number]

    run(story)


def in_a_thread(work: Callable[[], object]) -> list[BaseException]:
    """What it raises, as a model's thread would, which prints it and ends."""
    raised: list[BaseException] = []

    def run_it() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run_it)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    return raised


class ClosingMeanwhile:
    """A loop that is closed between being asked whether it is and being used."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def is_closed(self) -> bool:
        return self.loop.is_closed()

    def call_soon_threadsafe(self, *call: Any) -> object:
        self.loop.close()
        return self.loop.call_soon_threadsafe(*call)


@pytest.mark.parametrize("tells", ["token", "failure"])
@pytest.mark.parametrize("is_meanwhile", [False, True])
def test_a_loop_that_was_closed_ends_what_was_under_way(tells: str, is_meanwhile: bool) -> None:
    """The model's thread goes on, and nobody waits for what does not come any more."""
    loop = asyncio.new_event_loop()

    async def begin() -> tuple[Story, list[ServedRequest]]:
        one = Story(max_running=1)
        requests = [one.ask(), one.ask()]
        await one.step()
        return one, requests

    one, requests = loop.run_until_complete(begin())
    if is_meanwhile:
        one.scheduler._loop = ClosingMeanwhile(loop)  # type: ignore[assignment]
    else:
        loop.close()
    names = list(one.steps.running)
    tell = {
        "token": lambda: one.scheduler.told([(name, SampledToken(ord("x"))) for name in names]),
        "failure": lambda: one.scheduler.failed(names, [], RuntimeError("torn")),
    }[tells]
    assert in_a_thread(tell) == [] and in_a_thread(tell) == []

    async def read(request: ServedRequest) -> str:
        told = ""
        with pytest.raises(ApiError, match="shutting down") as raised:
            async for delta in request:
                told += delta.text
        assert raised.value.status == 503
        return told

    assert asyncio.run(asyncio.wait_for(read(requests[0]), 5)) == "x", "what came before is there"
    assert asyncio.run(asyncio.wait_for(read(requests[1]), 5)) == ""
    assert one.heard.outcomes == ["failed", "failed"] and one.names() == [] and not one.scheduler.waiting
    assert one.scheduler.free_pages == 100
    with pytest.raises(ApiError) as refused:
        one.ask()
    assert refused.value.status == 503


def test_who_waits_in_a_closed_loop_troubles_nobody() -> None:
    loop = asyncio.new_event_loop()

    async def begin() -> tuple[Story, asyncio.Task[Any]]:
        one = Story()
        reading = asyncio.ensure_future(one.ask().deltas.get())
        await asyncio.sleep(0)
        return one, reading

    one, reading = loop.run_until_complete(begin())
    loop.close()
    names = list(one.steps.running)
    assert in_a_thread(lambda: one.scheduler.told([(name, SampledToken(ord("x"))) for name in names])) == []
    assert one.heard.outcomes == ["failed"]
    reading._log_destroy_pending = False  # type: ignore[attr-defined]  # it is what is tried here


def test_closing_ends_what_is_under_way() -> None:
    async def story() -> None:
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
        assert one.heard.outcomes == ["failed", "failed"], "once"
        with pytest.raises(ApiError, match="shutting down"):
            one.ask()

    run(story)
    RequestScheduler(Room(64, 8, 100, 2, 2), Heard()).close()  # that never began
