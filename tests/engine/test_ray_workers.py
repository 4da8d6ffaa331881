"""Workers that are Ray actors: processes of their own, which are killed and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

import expertly
from expertly.api import handle
from expertly.core.errors import TransferError
from expertly.engine import pair, ray_workers
from expertly.engine.wire import Kind
from tests.engine.conftest import Case, Cases
from tests.engine.failing import raising
from tests.engine.observe import loaded
from tests.families import generate, make_checkpoint, make_tokenizer, reference_generate
from tests.tables import IS_FULL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def own_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    paths = [str(Path(expertly.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    yield
    ray.shutdown()


def workers_of(model: Any) -> list[dict[str, Any]]:
    return [one["worker"] for one in expertly.stats(model).as_dict()["devices"] if one["worker"] is not None]


def until_all_are_back(model: Any, case: Case) -> None:
    deadline = time.monotonic() + 120
    while not all(one["alive"] for one in workers_of(model)):
        assert time.monotonic() < deadline
        assert generate(model, case.prompts) == case.tokens
        time.sleep(0.2)


def test_killed_and_stopped_processes(
    cases: Cases,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked, plain = set[int](), ray_workers.RayPeer.ask
    monkeypatch.setattr(
        ray_workers.RayPeer, "ask", lambda peer, message: (asked.add(message[0]), plain(peer, message))[1]
    )
    case = cases["gpt_oss"]
    settings = {"workers": 2, "memory": "25%", "worker_memory": "25%", "worker_deadline": 1.0}
    with loaded(case.store, **settings) as model:
        assert generate(model, case.prompts) == case.tokens
        pids = [one["pid"] for one in workers_of(model)]
        assert len({*pids, os.getpid()}) == 3 and all(one["bytes_received"] for one in workers_of(model))

        os.kill(pids[0], signal.SIGKILL)
        begin = time.monotonic()
        assert generate(model, case.prompts) == case.tokens
        assert time.monotonic() - begin < 10, "a closed connection is death at once"
        assert [one.levelname for one in caplog.records if "worker local-1 was lost" in one.message] == ["WARNING"]
        assert [one["drops"] for one in workers_of(model)] == [1, 0]
        until_all_are_back(model, case)
        assert workers_of(model)[0]["pid"] not in pids, "a new process"
        assert "raylet" not in "".join(capfd.readouterr()), "Ray's own message would be the second"

        os.kill(pids[1], signal.SIGSTOP)
        assert generate(model, case.prompts) == case.tokens
        assert workers_of(model)[1]["problem"] == "no answer within its deadline"
        os.kill(pids[1], signal.SIGCONT)
        until_all_are_back(model, case)
        assert workers_of(model)[1]["pid"] == pids[1], "the same process"
        assert Kind.OPEN in asked and Kind.LAYER not in asked, "layers go over gloo, also to a worker that is back"


def listening(tag: str) -> list[str]:
    """Addresses on which the processes of a cluster that was started here listen for others."""
    inodes = set()
    for pid in processes_of(tag):
        with contextlib.suppress(OSError):
            inodes |= {os.readlink(fd) for fd in Path("/proc", str(pid), "fd").iterdir()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.append(words[1].partition(":")[0])
    return found


def processes_of(tag: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and f"EXPERTLY_CLUSTER={tag}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def test_local_workers_are_for_this_machine_alone_and_end_with_it(cases: Cases, tmp_path: Path) -> None:
    code = (
        "import expertly, sys\n"
        f"model, _ = expertly.load({str(cases['qwen3_moe'].store)!r}, workers=1, memory='25%', worker_memory='25%')\n"
        "pid = [one['worker']['pid'] for one in expertly.stats(model).as_dict()['devices'] if one['worker']][0]\n"
        "print(pid, flush=True); sys.stdin.read()"
    )
    running = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        pid = int(running.stdout.readline())
        environ = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        (tag,) = (one.decode().partition("=")[2] for one in environ if one.startswith(b"EXPERTLY_CLUSTER="))
        addresses = listening(tag)
        assert len(processes_of(tag)) >= 4 and addresses, "gcs, raylet, agents, a worker"
        loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
        assert set(addresses) <= loopback
    finally:
        running.kill()
        running.wait()
    deadline = time.monotonic() + 20
    while left := processes_of(tag):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_the_cluster_ends_with_the_last_model_that_uses_it(cases: Cases) -> None:
    case, settings = cases["qwen3_moe"], {"workers": 1, "memory": "25%", "worker_memory": "25%"}
    with loaded(case.store, **settings) as first:
        with loaded(case.store, **settings) as second:
            assert generate(second, case.prompts) == case.tokens
        assert generate(first, case.prompts) == case.tokens
        assert [one["drops"] for one in workers_of(first)] == [0]
        (pid,) = (one["pid"] for one in workers_of(first))
    assert not ray.is_initialized()
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(pid, 0)
            time.sleep(0.1)

    ray.init(address="local", include_dashboard=False)
    with loaded(case.store, **settings) as model:
        assert generate(model, case.prompts) == case.tokens
    assert ray.is_initialized(), "it was there before, for others"


def test_answers_that_nobody_took_do_not_answer_the_next_layer(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store, workers=2, memory="25%", worker_memory="25%") as model:
        shard = handle(model).engine.executor.shards[0]
        for _ in range(3):
            with monkeypatch.context() as patched:
                patched.setattr(shard, "run_layer", raising(TransferError("read error")))
                with pytest.raises(TransferError, match="cpu: read error"):
                    generate(model, case.prompts)
            assert generate(model, case.prompts) == case.tokens
        assert [one["drops"] for one in workers_of(model)] == [0, 0]


def test_workers_that_cannot_be_connected_are_called_through_ray(
    cases: Cases, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a firewall that lets only Ray's ports through."""
    case = cases["qwen3_moe"]
    monkeypatch.setattr(pair.Pair, "accept", raising(ConnectionError("refused")))
    with loaded(case.store, workers=1, memory="25%", worker_memory="25%", system="fmoe") as model:
        assert "worker local-1: no connection over gloo (refused)" in caplog.text
        assert generate(model, case.prompts) == case.tokens
        assert workers_of(model)[0]["bytes_received"] > 0 and workers_of(model)[0]["drops"] == 0


def test_kills_at_random_moments(cases: Cases) -> None:
    """Every request ends, with its tokens: while a worker dies, while it starts again, and after that."""
    case, dice, num_kills = cases["qwen3_moe"], random.Random(5), 20 if IS_FULL else 4
    settings = {"workers": 2, "memory": "25%", "worker_memory": "25%", "worker_deadline": 5.0, "system": "fmoe"}
    with loaded(case.store, **settings) as model:
        begin = time.monotonic()
        assert generate(model, case.prompts) == case.tokens
        usual_s = time.monotonic() - begin
        for _ in range(num_kills):
            while not (alive := [one["pid"] for one in workers_of(model) if one["alive"]]):
                assert generate(model, case.prompts) == case.tokens
            killer = threading.Timer(dice.uniform(0, usual_s), os.kill, (dice.choice(alive), signal.SIGKILL))
            begin = time.monotonic()
            killer.start()
            assert generate(model, case.prompts) == case.tokens
            killer.join()
            assert generate(model, case.prompts) == case.tokens
            assert time.monotonic() - begin < 30
        assert sum(one["drops"] for one in workers_of(model)) == num_kills
        until_all_are_back(model, case)
        assert sum(one["joins"] for one in workers_of(model)) == num_kills


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `expertly COMMAND MODEL ...` with a worker; ends it with the test."""
    model, running = make_checkpoint("qwen3_moe", tmp_path / "model", tokenizer=True), []
    memory = ("--workers", "1", "--memory", "25%", "--worker-memory", "25%", "--dtype", "float32")

    def begin(command: str, *words: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "expertly", command, str(model), *words, *memory]
        running.append(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield begin
    for one in running:
        one.kill()
        one.wait()


@pytest.fixture
def expected(tmp_path: Path, typed: Any) -> str:
    """What the unmodified model writes behind "Once"."""
    tokenizer = make_tokenizer()
    (tokens,) = reference_generate(tmp_path / "model", [tokenizer("Once")["input_ids"]], 8)
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def test_run_with_a_worker(typed: Callable[..., subprocess.Popen[str]], expected: str) -> None:
    running = typed("run", "Once", "--raw", "--max-new-tokens", "8", "--stats")
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 0 and out.startswith(f"{expected}\n")
    rows = [line.split() for line in out.splitlines() if line.startswith(("cpu ", "local-1 "))]
    assert [(row[0], row[4]) for row in rows] == [*product(("cpu", "local-1"), ("prefill", "decode"))]
    (num_calls,) = re.findall(r"^\[worker local-1: (\d+) calls in .* on the way \| .* \| 0 drops\]$", out, re.MULTILINE)
    assert int(num_calls) >= 8, "one a token, and mostly one a layer"


def test_serve_with_a_worker(typed: Callable[..., subprocess.Popen[str]], expected: str) -> None:
    running = typed("serve", "--port", "0", "--json", "--context", "128", "--name", "tiny")
    assert running.stdout is not None
    url = json.loads(running.stdout.readline())["url"]
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"] == expected
    told = dict(line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines() if "local-1" in line)
    assert float(told['expertly_worker_alive{worker="local-1"}']) == 1
    assert float(told['expertly_worker_bytes_received_total{worker="local-1"}']) > 0
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 0
