"""Messages between two processes over gloo; here both ends are in one, which changes nothing of it."""

from __future__ import annotations

import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from expertly.engine import pair
from expertly.engine.pair import Meeting, Pair

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(not pair.IS_AVAILABLE, reason="this PyTorch has no gloo")]

HOST = "127.0.0.1"
MOST = (64 << 10) - 8
"""The longest message that is sent in one part."""


def connected() -> tuple[Pair, Pair]:
    meeting = Meeting(HOST)
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(Pair.join, HOST, meeting.port, HOST)
        return Pair.accept(meeting), joined.result()


def test_messages_of_any_length_arrive_in_order_both_ways() -> None:
    here, there = connected()
    dice = random.Random(3)
    messages = [dice.randbytes(length) for length in (0, 1, 4096, MOST - 1, MOST, MOST + 1, 3 << 20, 2, 100_000)]
    on_way = [here.send(message) for message in messages]
    back = [there.send(message[::-1]) for message in messages]
    assert [there.receive(10) for _ in messages] == messages
    assert [here.receive(10) for _ in messages] == [message[::-1] for message in messages]
    for sent in (*on_way, *back):
        sent.wait()


def test_who_waits_too_long_breaks_the_connection_for_both() -> None:
    here, there = connected()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(there.receive)
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            here.receive(0.2)
        assert time.monotonic() - begin >= 0.2
        with pytest.raises(ConnectionError):
            waiting.result(10)
    with pytest.raises(ConnectionError):
        here.receive(1)
    with pytest.raises(ConnectionError):
        here.send(b"more")


def test_no_time_left_is_no_wait_forever() -> None:
    here, _there = connected()
    with pytest.raises(TimeoutError):
        here.receive(0.0)


def test_an_end_that_is_gone_is_noticed_at_once() -> None:
    here, there = connected()
    ends = [there]
    del there
    threading.Timer(0.2, ends.clear).start()
    with pytest.raises(ConnectionError, match="closed"):  # not TimeoutError, which is what waiting ends in
        here.receive(60)


def test_who_waits_uses_no_processor() -> None:
    here, there = connected()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(there.receive)
        used_s = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - used_s < 0.2
        here.send(b"end").wait()
        assert waiting.result(10) == b"end"


def test_where_nobody_waits_joining_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "_CONNECTING", pair.timedelta(seconds=0.5))
    meeting = Meeting(HOST)
    with pytest.raises(ConnectionError):
        Pair.accept(meeting)
    port = meeting.port
    del meeting
    with pytest.raises(ConnectionError):
        Pair.join(HOST, port, HOST)


def test_nobody_else_can_reach_where_the_other_end_is_awaited() -> None:
    meeting = Meeting(HOST)
    socket.create_connection((HOST, meeting.port), 1).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", meeting.port), 1)
