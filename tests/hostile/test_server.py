"""Requests that are to stop a server: each is refused in one sentence and soon, and others are answered meanwhile."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from expertly.serve import server
from expertly.serve.reading import count_values
from expertly.serve.server import Assembled
from expertly.serve.settings import host_of, is_loopback
from tests.hostile.cases import MAX_CPU_S
from tests.serve.conftest import Serving, assembled_for, demo, do_not_collect, end_soon, room_for, running

__all__ = ["demo", "do_not_collect", "end_soon"]

MIB = 1 << 20
HEALTH_S = 1.0
"""In which a small request is to be answered whatever others there are; on a busy machine, at one of three attempts."""

TEMPLATE = (
    "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}"
    "{% endfor %}{% endfor %}{% endif %}{% if messages[0].content == 'grow' %}{{ 'a' * 9999999999 }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
    "{% endfor %}{{ (tools or [])[:0] }}{{ surrogate or '' }}"
)

Json = dict[str, Any]


def chat(content: Any = "Hi", **more: Any) -> tuple[str, Json]:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return "/v1/chat/completions", {"model": "demo", "messages": messages, "max_tokens": 4, **more}


def text(prompt: Any = "Hi", **more: Any) -> tuple[str, Json]:
    return "/v1/completions", {"model": "demo", "prompt": prompt, "max_tokens": 4, **more}


def call(arguments: str) -> Json:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def items(content: Any = "Hi", **more: Any) -> tuple[str, Json]:
    return "/v1/responses", {"model": "demo", "input": content, "max_output_tokens": 4, **more}


def schema(value: Any) -> tuple[str, Json]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": value}})


def tool(value: Any) -> tuple[str, Json]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": value}}]
    return chat(tools=tools, tool_choice="required")


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = wrap(value)
    return value


def properties(num: int, value: Any = None) -> Json:
    return {"type": "object", "properties": {f"p{number}": value or {"type": "integer"} for number in range(num)}}


def references(num: int, wrap: Callable[[Any], Any] = lambda value: value) -> Json:
    definitions = {str(number): wrap({"$ref": f"#/$defs/{number + 1}"}) for number in range(num)}
    return {"$ref": "#/$defs/0", "$defs": {**definitions, str(num): {"type": "string"}}}


SCHEMAS: dict[str, tuple[Any, str]] = {
    "1 000 references through objects": (references(1000, lambda value: {"properties": {"a": value}}), "ended its"),
    "2 500 objects in each other": (nested(60, lambda value: {"properties": {"a": value}}), "48 levels"),
    "1 000 properties": (properties(1000), "cannot be kept"),
    "10 000 required names": ({"type": "object", "required": [f"r{number}" for number in range(10000)]}, "1024"),
    "a long constant": ({"const": "x" * 200_000}, "characters; accepted: 16384"),
    "many multiples": (
        {"type": "object", "properties": {f"p{n}": {"type": "integer", "multipleOf": n} for n in range(7919, 8319)}},
        "compiling it",
    ),
    "a product of choices": (
        {"allOf": [{"anyOf": [properties(1), {"required": [f"m{number}"]}]} for number in range(20)]},
        "cannot be kept",
    ),
    "a regex of groups": ({"type": "string", "pattern": "(" * 2000 + "a" + ")" * 2000}, "cannot be kept"),
    "a reference to elsewhere": ({"$ref": "http://127.0.0.1/schema"}, "cannot be kept"),
}

CASES: dict[str, tuple[tuple[str, Any], str]] = {
    "a prompt of 3 MB": (text("a" * 3 * MIB), "accepted: 512 together"),
    "300 000 tokens": (text([1] * 300_000), "JSON values"),
    "a message of 3 MB": (chat("a" * 3 * MIB), "accepted: 512 together"),
    "arguments of 3 MB": (chat([{"role": "assistant", "tool_calls": [call("[" * 3 * MIB)]}]), "512 together"),
    "400 messages of 250 parts": (
        chat([{"role": "user", "content": [{"type": "text", "text": "a"}] * 250}] * 400),
        "JSON values",
    ),
    "3 000 messages": (chat([{"role": "user", "content": "a"}] * 3000), "at most 2048"),
    "500 000 names": (chat(extra={str(number): 0 for number in range(200_000)}), "JSON values"),
    "300 parts of a message": (
        chat([{"role": "user", "content": [{"type": "text", "text": "a"}] * 300}]),
        "at most 256",
    ),
    "many tools": (chat(tools=[{"type": "function", "function": {"name": "f"}}] * 2000), "at most 1024"),
    "many stop strings": (text(stop=["a"] * 20_000), "stop"),
    "a template that loops": (chat("loop"), "did not end in"),
    "a template that grows": (chat("grow"), "takes more than"),
    "half a pair in a message": (chat("\ud800"), "hex escape"),
    "a name of the renderer": (chat(chat_template_kwargs={"conversations": 1}), "chat template"),
    **{f"schema: {name}": (schema(value), sentence) for name, (value, sentence) in SCHEMAS.items()},
    **{f"tool: {name}": (tool(SCHEMAS[name][0]), SCHEMAS[name][1]) for name in ("many multiples", "a long constant")},
}
"""Of each case its request, and what is said of it."""

SERVED = {
    "plain": chat(),
    "a schema": schema({"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}),
    "a tool": tool({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}),
    "a schema that is recursive": schema(
        {"$ref": "#/$defs/a", "$defs": {"a": properties(3, {"type": "array", "items": {"$ref": "#/$defs/a"}})}}
    ),
    "properties that are named as notes": schema(
        properties(2) | {"properties": {"title": {"description": "d" * 9000}}}
    ),
    "400 properties": schema(properties(400)),
    "1 000 references in a chain": schema(references(1000)),
    "a pattern of patterns": schema({"type": "string", "pattern": "(a{1000}){1000}"}),
}


@pytest.fixture(scope="module")
def hostile(demo: tuple[Any, Any]) -> Iterator[Serving]:
    """The model says what it is told to; the template has loops."""
    with running(assembled(demo)) as serving:
        yield serving


def assembled(demo: tuple[Any, Any]) -> Assembled:
    return assembled_for(*demo, room_for(context=512), TEMPLATE)


class Probe:
    """Asks for /health all the time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.longest_s = 0.0
        self.num_asked = 0

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._is_over.wait(0.02):
                begin = time.perf_counter()
                assert client.get("/health").status_code == 200
                self.longest_s = max(self.longest_s, time.perf_counter() - begin)
                self.num_asked += 1

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def refusal(response: httpx.Response, statuses: tuple[int, ...] = (400,)) -> str:
    assert response.status_code in statuses, response.text[:500]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return str(error["message"])


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_soon_and_others_are_answered(name: str, hostile: Serving) -> None:
    (path, body), sentence = CASES[name]
    content = json.dumps(body).encode()
    for _ in range(3):
        with hostile.http() as client, Probe(hostile.url) as probe:
            begin = sum(os.times()[:4])
            response = client.post(path, content=content, headers={"content-type": "application/json"})
            spent = sum(os.times()[:4]) - begin
        assert sentence in refusal(response), response.text
        assert spent < MAX_CPU_S
        if probe.longest_s < HEALTH_S:
            return
    raise AssertionError(f"another request took {probe.longest_s} s")


@pytest.mark.parametrize("name", SERVED)
def test_what_is_no_attack_is_served(name: str, hostile: Serving) -> None:
    path, body = SERVED[name]
    with hostile.http() as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text


# -- the tokenizer -----------------------------------------------------------------------------------------------------


class PanicException(BaseException):
    """As `tokenizers` raises one."""


@pytest.mark.parametrize("error", [PanicException("index out of bounds"), Exception("no\nmerge"), OverflowError()])
def test_a_tokenizer_that_fails_is_told_and_logged(
    error: BaseException, hostile: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def encode(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(hostile.assembled.service.prompts._writer, "encode", encode)
    for path, body in (chat(), text(), items()):
        caplog.clear()
        with hostile.http() as client:
            assert "the model's tokenizer cannot read it: " in refusal(client.post(path, json=body))
        (record,) = [record for record in caplog.records if record.name == "expertly.serve"]
        assert "the tokenizer failed" in record.getMessage() and record.exc_info is None


def test_a_tokenizer_that_cannot_write_fails_its_request_alone(
    hostile: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: Any, **__: Any) -> Any:
        raise PanicException("no such token")

    prompts = hostile.assembled.service.prompts
    with hostile.http() as client:
        monkeypatch.setattr(prompts.tokenizer, "decode", decode)
        for path, body in (text(), text(logprobs=2), text(echo=True), chat()):
            assert "no such token" in refusal(client.post(path, json=body), (500,))
        monkeypatch.undo()
        assert client.post(*text()[:1], json=text()[1]).status_code == 200


# -- HTTP --------------------------------------------------------------------------------------------------------------

OWN = (
    *("localhost", "LOCALHOST", "LocalHost:8000", "localhost.", "127.0.0.1", "127.0.0.1:8000", "127.1.2.3:80"),
    *("[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]:8000"),
)
FOREIGN = (
    *("[::1].evil.com", "[::1]evil.com", "127.0.0.1:80@evil.com", "localhost@evil.com", "user@localhost"),
    *("localhost:", "localhost:80:80", "localhost:99999", "localhost:-1", "localhost:8a", "localhost:٣"),
    *("localhost,evil.com", "localhost/evil.com", "localhost#evil.com", "localhost..", "localhost.evil.com"),
    *("evil.localhost", "notlocalhost", "::1", "[::1", "::1]", "[[::1]]", "[::1%25eth0]", "[127.0.0.1]evil"),
    *("127.0.0.1.evil.com", "127.0.0.1.", "127.0.0.01", "127.1", "0x7f.0.0.1", "2130706433", "0.0.0.0", "[::]"),
    *("128.0.0.1", "ｌocalhost", "localhost%00", "", "localhost evil.com", "localhost\tevil.com", "localhost\n"),
    *("localhost\\evil.com",),
)


@pytest.mark.parametrize("header", OWN + FOREIGN)
def test_which_hosts_are_this_machine(header: str) -> None:
    host = host_of(header)
    assert (host is not None and is_loopback(host)) == (header in OWN)


def connected(serving: Serving) -> socket.socket:
    host, _, port = serving.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def spoken(serving: Serving, *parts: bytes, wait_s: float = 0.0) -> bytes:
    """What a server says to these bytes until it closes the connection, or has answered and says nothing more for half
    a second.
    """
    with connected(serving) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(wait_s)
        said = b""
        try:
            while part := connection.recv(1 << 16):
                said = (said + part).removeprefix(CONTINUE)
                connection.settimeout(0.5 if said else 20)
        except (TimeoutError, ConnectionResetError):
            pass
        return said


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps(text()[1]).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)

SPOKEN: dict[str, tuple[tuple[bytes, ...], bytes]] = {
    "no Host": ((b"GET /v1/models HTTP/1.0\r\n\r\n",), b" 403 "),
    "a Host that is not ASCII": ((b"GET /v1/models HTTP/1.1\r\nHost: localhost\xff\r\n\r\n",), b" 40"),
    "an absolute URL of another": ((b"GET http://evil.com/v1/models HTTP/1.1\r\nHost: evil.com\r\n\r\n",), b" 403 "),
    "a long URL": ((b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",), b" 4"),
    "a web socket": (
        (
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        ),
        b" ",
    ),
    "no HTTP": ((b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",), b""),
    "it waits for a word": ((POST + b"Expect: 100-continue\r\n" + LENGTH + b"\r\n", BODY), b" 200 "),
    "the body by and by": ((POST + LENGTH + b"\r\n", BODY[:10], BODY[10:]), b" 200 "),
    "in chunks": (
        (POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",),
        b" 200 ",
    ),
    "a length that is none": ((POST + b"Content-Length: -5\r\n\r\n",), b" 400 "),
    "a length above the limit": ((POST + b"Content-Length: 99999999\r\n\r\n",), b" 413 "),
    "a length and chunks": ((POST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",), b" 4"),
    "two requests at once": ((POST + LENGTH + b"\r\n" + BODY + POST + LENGTH + b"\r\n" + BODY,), b" 200 "),
}


@pytest.mark.parametrize("name", SPOKEN)
def test_what_is_spoken_to_it(name: str, hostile: Serving) -> None:
    parts, status = SPOKEN[name]
    said = spoken(hostile, *parts, wait_s=0.05)
    assert status in said.partition(b"\r\n")[0], said[:300]
    assert b"Traceback" not in said
    with hostile.http() as client:
        assert client.get("/health").status_code == 200


def test_a_body_that_does_not_come_frees_its_place(hostile: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones take all room for large ones: small ones are served beside them, and large ones afterwards."""
    bodies = hostile.assembled.bodies
    monkeypatch.setattr(bodies, "_read_s", 2.0)
    nbytes = 4 * MIB
    large = POST + b"Content-Length: %d\r\n\r\n" % nbytes + b" " * (nbytes - 10)
    slow = []
    for _ in range(2):
        slow.append(connected(hostile))
        slow[-1].sendall(large)
    while bodies._nbytes < 7 * MIB:
        time.sleep(0.01)
    path, body = text()
    with hostile.http() as client:
        assert client.post(path, json=body).status_code == 200
        with pytest.raises(ConnectionError), connected(hostile) as third:
            third.sendall(large * 4)
            raise ConnectionError(third.recv(1000))
        assert [connection.recv(1000).split()[1] for connection in slow] == [b"408"] * 2
        assert "512 together" in refusal(client.post(path, json=text("a" * 3 * MIB)[1]))
    for connection in slow:
        connection.close()
    assert bodies._nbytes == 0


def test_a_connection_that_brings_no_request_is_closed(demo: tuple[Any, Any]) -> None:
    """One that says nothing, and one whose headers do not end; one with a request that runs stays open."""
    made = assembled(demo)
    with running(made, silent_s=0.4) as serving:
        silent, slow, busy = (connected(serving) for _ in range(3))
        content = json.dumps(text(max_tokens=100, temperature=0, logit_bias={"0": -100})[1]).encode()
        busy.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        assert silent.recv(100) == slow.recv(100) == b""
        assert busy.recv(100).startswith(b"HTTP/1.1 200")
        for connection in (silent, slow, busy):
            connection.close()


def test_too_many_connections_do_not_keep_others_out(hostile: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has been waited for longest goes, whether it is silent or its headers or its body do not end."""
    monkeypatch.setattr(server, "MAX_WAITED_FOR", 12)
    begun = []
    for number in range(30):
        begun.append(connected(hostile))
        begun[-1].sendall((b"", b"GET / HTTP/1.1\r\nHost: ", POST + LENGTH + b"\r\n{")[number % 3])
    with hostile.http() as client:
        for path, body in (text(), chat()):
            assert client.post(path, json=body).status_code == 200
    with suppress(ConnectionResetError):
        assert begun[0].recv(1) == b"", "it is closed"
    for each in begun:
        each.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",
        POST + LENGTH + b"\r\n" + BODY + b"GET /health HTTP/1.1\r\nX: ",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n GET /health HTTP/1.1\r\nX: ",
    ],
)
def test_headers_without_an_end_are_not_read(head: bytes, hostile: Serving) -> None:
    with connected(hostile) as sender, pytest.raises(OSError, match=r"reset|pipe"):
        sender.sendall(head)
        for _ in range(500):
            sender.sendall(b"a" * (1 << 16))


def test_values_are_counted_before_they_are_made() -> None:
    for value in ([], {}, [1, 2, [3]], {"a": "[,{:", 'b"': '\\"[,', "c\\": [""]}, "a\\\\", [[]] * 1000, ["\\"] * 50):
        raw = json.dumps(value).encode()

        def count(value: Any) -> int:
            inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
            return 1 + sum(map(count, inner))

        assert count(value) <= count_values(raw, 10**6) <= 3 * count(value) + 2
    assert count_values(b'"' * 10**6, 1000) > 1000
