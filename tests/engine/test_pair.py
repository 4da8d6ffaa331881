"""Messages between two processes; here both ends are in one, which changes nothing of it."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from expertly.engine.pair import Meeting, Pair

pytestmark = pytest.mark.timeout(60)

HOST = "127.0.0.1"


def connected() -> tuple[Pair, Pair]:
    meeting = Meeting(HOST)
    joined = Pair.join(meeting.address)
    return meeting.accept(1), joined


def test_messages_of_any_length_arrive_in_order_both_ways() -> None:
    here, there = connected()
    dice = random.Random(3)
    messages = [dice.randbytes(length) for length in (0, 1, 4096, 3 << 20, 2, 100_000)]

    def send_back() -> None:
        for _ in messages:
            there.send(there.receive(10)[::-1])

    with ThreadPoolExecutor() as pool:
        ended = pool.submit(send_back)
        for message in messages:
            here.send(message)
            assert here.receive(10) == message[::-1]
        ended.result()


def test_who_waits_too_long_may_wait_again_but_not_within_a_message() -> None:
    here, there = connected()
    for timeout_s in (0.0, 0.2):
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            here.receive(timeout_s)
        assert timeout_s <= time.monotonic() - begin < 10, "no time left is no wait forever"
    there.send(b"late")
    assert here.receive(10) == b"late"
    there._socket.sendall(bytes([9]))
    with pytest.raises(TimeoutError):
        here.receive(0.1)
    for end in (here, there):
        with pytest.raises(ConnectionError):
            end.receive(10)
    with pytest.raises(ConnectionError):
        here.send(b"more")


def test_who_does_not_read_is_not_waited_for_forever() -> None:
    here, _there = connected()
    with pytest.raises(TimeoutError):
        here.send(bytes(64 << 20), 0.2)


def test_an_end_that_is_gone_is_noticed_at_once() -> None:
    here, there = connected()
    threading.Timer(0.2, there.close).start()
    with pytest.raises(ConnectionError, match="closed"):  # not TimeoutError, which is what waiting ends in
        here.receive(60)


def test_who_waits_uses_no_processor() -> None:
    here, there = connected()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(there.receive)
        used_s = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - used_s < 0.2
        here.send(b"end")
        assert waiting.result(10) == b"end"


def test_strangers_do_not_keep_who_waits_beyond_its_time() -> None:
    """Each of them may take a second to say the key; all of them together have no more time than there is."""
    meeting = Meeting(HOST)
    strangers = [socket.create_connection(meeting.address[:2], 1) for _ in range(8)]
    begin_s = time.monotonic()
    with pytest.raises(TimeoutError):
        meeting.accept(0.5)
    assert time.monotonic() - begin_s < 4
    for stranger in strangers:
        stranger.close()


def test_an_interrupt_within_a_message_ends_the_connection() -> None:
    """Else the rest of the message would be read as the next one's length."""
    here, there = connected()
    there._socket.sendall((1000).to_bytes(8, "little") + b"x" * 500)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            here.receive(20)
    finally:
        signal.signal(signal.SIGUSR1, before)
    for end in (here, there):
        with pytest.raises(ConnectionError):
            end.receive(5)


def test_only_who_has_the_key_is_met_and_only_at_that_address() -> None:
    meeting = Meeting(HOST)
    host, port, _ = address = meeting.address
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 1)
    strangers = [socket.create_connection((host, port), 1) for _ in range(2)]
    strangers[0].sendall(b"x" * 64)
    Pair.join(address).send(b"it is me")
    assert meeting.accept(10).receive(10) == b"it is me"
    with pytest.raises(ConnectionRefusedError):
        Pair.join(address)
    with pytest.raises(TimeoutError):
        Meeting(HOST).accept(0.1)
    for stranger in strangers:
        stranger.close()
