"""The command as its users run it: what it refuses, how it starts, how it ends."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import expertly
from expertly.cli.main import main
from expertly.core.errors import ConfigError
from expertly.serve.memory import PAGE_TOKENS
from expertly.serve.server import bind, open_server
from expertly.serve.settings import ServeOptions
from tests.commands import RunningCommand
from tests.serve.conftest import assembled_for, served

Start = Callable[..., RunningCommand]


def serving(start: Start, *arguments: str) -> tuple[RunningCommand, dict[str, Any]]:
    """`expertly serve` on a free port; what it says when it takes requests."""
    running = start("serve", "--port", "0", "--json", *arguments)
    running.wait_until(lambda: "\n" in running.out)
    return running, json.loads(running.out.splitlines()[0])


def client_of(about: dict[str, Any]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{about['url']}/v1", api_key="none", max_retries=0, timeout=60)


def test_a_conversation_goes_on_after_a_restart_without_being_read_again(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--kv-disk`; `pack --remove` deletes what was kept."""
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path))
    start_of_text, seen = "The captain looked at the sea. " * 30, []
    for end in ("He", "She"):
        running, about = serving(start, "--kv-disk", "64MiB", "--context", "512")
        usage = client_of(about).completions.create(model="demo", prompt=start_of_text + end, max_tokens=2).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        seen.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
        running.send_signal(signal.SIGTERM)
        assert running.exit_code(60) == 0
    assert seen[0][1] == 0 and seen[1][1] >= seen[1][0] - PAGE_TOKENS - 5
    (kept,) = (tmp_path / "stores").glob("*.kv")
    assert kept.stat().st_mode & 0o777 == 0o700 and list(kept.iterdir())
    assert main(["pack", "--remove", kept.name.removesuffix(".kv")]) == 0
    assert not kept.exists()


@pytest.mark.parametrize("size", ["auto", "much", "0", "-1GiB"])
def test_a_size_of_the_disk_is_checked(demo: tuple[Any, Any], size: str) -> None:
    accepted = r'accepted: an amount \("20GiB"\), or a share \("25%"\) of what is free there'
    with pytest.raises(ConfigError, match=f"kv_disk='{size}': {accepted}"):
        assembled_for(*demo, kv_disk=size)


@pytest.mark.slow
def test_sigterm_lets_what_runs_end_and_refuses_new_requests(start: Start) -> None:
    body: Any = {"model": "demo", "prompt": "The sea", "max_tokens": 150, "logit_bias": {"0": -100}}
    running, about = serving(start, "--total-memory", "2GiB", "--dtype", "float32", "--context", "256")
    assert 0 < sum(about["memory"].values()) <= 2 << 30
    client, http = client_of(about), httpx.Client(base_url=about["url"], timeout=60)
    assert http.get("/ready").status_code == 200
    chunks = client.completions.create(**body, stream=True)
    next(chunks)
    running.send_signal(signal.SIGTERM)
    running.wait_until(lambda: http.get("/ready").status_code == 503)
    with pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(**body)
    assert (refused.value.status_code, refused.value.code) == (503, "draining")
    assert http.get("/health").status_code == 200
    assert [*chunks][-1].choices[0].finish_reason == "length", "the stream that ran was not cut"
    assert running.exit_code(60) == 0


@pytest.mark.slow
def test_a_second_signal_does_not_wait_and_says_only_that_it_ends(start: Start) -> None:
    body: Any = {"model": "demo", "prompt": "The sea", "max_tokens": 900, "logit_bias": {"0": -100}}
    running, about = serving(start, "--memory", "100%", "--context", "1024")
    with ThreadPoolExecutor() as pool, httpx.Client(base_url=about["url"], timeout=60) as http:
        streams = [client_of(about).completions.create(**body, stream=True) for _ in range(2)]
        asked = [pool.submit(list, stream) for stream in streams]
        asked.append(pool.submit(client_of(about).completions.create, **body))
        running.wait_until(lambda: http.get("/v1/state").json()["tokens_written"] > 3)
        running.send_signal(signal.SIGINT)
        running.wait_until(lambda: http.get("/ready").status_code == 503)
        running.send_signal(signal.SIGINT)
        assert running.exit_code(60) == 0
        for answer in asked:
            error = answer.exception(60)
            assert isinstance(error, openai.APIConnectionError | httpx.TransportError) or "shutting down" in str(error)
    assert "Traceback" not in running.err and "Exception" not in running.err


def test_of_two_servers_that_start_at_once_the_second_is_refused_before_it_loads(demo: tuple[Any, Any]) -> None:
    with closing(bind("127.0.0.1", 0)) as loading:
        port = loading.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port={port}: cannot listen there: .*in use; port 0 takes"):
            bind("127.0.0.1", port)
    with served(*demo) as first:
        client = first.http()
        assert client.get("/health").status_code == 200  # a connection that the server closes, and the client not yet
        port = int(first.url.rpartition(":")[2])
    bind("127.0.0.1", port).close()
    client.close()


def test_packing_is_told_and_memory_is_divided_as_load_divides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path))
    told: list[tuple[str, int, int]] = []
    options = ServeOptions(total_memory="100GiB", device="cpu", system="lru", context=128)
    assembled = open_server(options, progress=lambda *seen: told.append(seen))
    try:
        assert told[-1][0] == "packing" and told[-1][1] == told[-1][2] > 0
        reason = expertly.stats(assembled.model).memory_reason
        assert reason.startswith("total memory 100GiB") and "this process takes" in reason
        assert assembled.service.scheduler.room.num_pages == 16 * (128 // 32)
    finally:
        assembled.service.close()
        expertly.unload(assembled.model)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["serve", *arguments]) == 2
    return capsys.readouterr().err


def test_others_need_a_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.4", "example.org"):
        assert "--api-key-file FILE" in refusal(capsys, "--host", host)
    short = tmp_path / "keys"
    short.write_text("short\n")
    assert "16 or more" in refusal(capsys, "--host", "0.0.0.0", "--api-key-file", str(short))
    short.write_text("# nothing\n")
    assert "holds no key" in refusal(capsys, "--host", "0.0.0.0", "--api-key-file", str(short))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--memory", "50%", "--total-memory", "1GiB"), "one of the two"),
        (("--kv-tokens", "999999999999"), "are free"),
        (("--api-key-file", "/nowhere"), "cannot be read"),
        (("--chat-template", "/nowhere"), "cannot be read"),
        (("--port", "70000"), "0 to 65535"),
    ],
)
def test_what_cannot_work_is_named(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal(capsys, "--port", "0", *arguments)


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("expertly.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "pip install 'expertly[serve]'" in refusal(capsys)
