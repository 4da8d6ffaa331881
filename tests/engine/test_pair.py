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
    accepted = meeting.accept(1)
    assert accepted is not None
    return accepted, joined


def test_messages_of_any_length_arrive_in_order_both_ways() -> None:
    near, far = connected()
    dice = random.Random(3)
    messages = [dice.randbytes(length) for length in (0, 1, 4096, 3 << 20, 2, 100_000)]

    def send_back() -> None:
        for _ in messages:
            far.send(far.receive(10)[::-1])

    with ThreadPoolExecutor() as pool:
        ended = pool.submit(send_back)
        for message in messages:
            near.send(message)
            assert near.receive(10) == message[::-1]
        ended.result()
        waiting, used_s = pool.submit(far.receive), time.process_time()
        time.sleep(0.5)
        assert time.process_time() - used_s < 0.2, "who waits uses no processor"
        near.send(b"end")
        assert waiting.result(10) == b"end"


@pytest.mark.parametrize("case", ["no message", "half a message", "nobody reads", "closed", "interrupted"])
def test_whatever_stops_a_message_ends_the_connection(case: str) -> None:
    """Else the rest of a message would be read as the next one's length."""
    near, far = connected()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if case in ("half a message", "interrupted"):
        far._socket.sendall((1000).to_bytes(8, "little") + b"x" * 500)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        if case == "interrupted":
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        elif case == "closed":
            threading.Timer(0.2, far.close).start()
        expected = {"interrupted": KeyboardInterrupt, "closed": ConnectionError}.get(case, TimeoutError)
        with pytest.raises(expected):
            if case == "nobody reads":
                near.send(bytes(64 << 20), 0.2)
            else:
                near.receive(20 if case in ("closed", "interrupted") else 0.1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    for end in (near, far):
        with pytest.raises(ConnectionError):
            end.send(b"more")
            end.receive(5)


def test_strangers_do_not_keep_who_waits_beyond_its_time() -> None:
    """Each of them may take a second to say the key; all of them together have no more time than there is."""
    meeting = Meeting(HOST)
    strangers = [socket.create_connection(meeting.address[:2], 1) for _ in range(8)]
    begin_s = time.monotonic()
    assert meeting.accept(0.5) is None
    assert time.monotonic() - begin_s < 4
    for stranger in strangers:
        stranger.close()


def test_only_who_has_the_key_is_met_and_only_at_that_address() -> None:
    meeting = Meeting(HOST)
    host, port, _ = address = meeting.address
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 1)
    strangers = [socket.create_connection((host, port), 1) for _ in range(2)]
    strangers[0].sendall(b"x" * 64)
    Pair.join(address).send(b"it is me")
    met = meeting.accept(10)
    assert met is not None and met.receive(10) == b"it is me"
    with pytest.raises(ConnectionRefusedError):
        Pair.join(address)
    assert Meeting(HOST).accept(0) is None
    for stranger in strangers:
        stranger.close()
