"""Workers that are Ray actors: processes of their own, which are killed and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

import expertly
from expertly.api import handle
from expertly.cli.main import main
from expertly.core.errors import ConfigError, TransferError
from expertly.engine import pair, ray_workers, remote
from expertly.engine.wire import Kind
from tests.engine.conftest import Case, Cases
from tests.engine.failing import raising
from tests.engine.observe import loaded
from tests.families import generate, make_checkpoint, make_tokenizer, reference_generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True, scope="module")
def paths() -> Iterator[None]:
    """Workers find this package."""
    source = str(Path(expertly.__file__).parent.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))
        yield


@pytest.fixture(scope="module")
def there(paths: None) -> Iterator[None]:
    """A cluster that expertly did not start, for tests one after the other."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
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


def test_processes_that_are_killed_and_stopped_and_a_cluster_that_ends_with_its_last_model(
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
    settings = {"workers": 2, "memory": "25%", "worker_memory": "25%"}
    with loaded(case.store, **settings) as model:
        assert generate(model, case.prompts) == case.tokens
        pids = [one["pid"] for one in workers_of(model)]
        assert len({*pids, os.getpid()}) == 3 and all(one["bytes_received"] for one in workers_of(model))

        os.kill(pids[0], signal.SIGKILL)
        assert generate(model, case.prompts) == case.tokens
        problem = workers_of(model)[0]["problem"]
        assert problem != "no answer within its deadline", "a closed connection is death at once"
        assert [one.levelname for one in caplog.records if "worker local-1 was lost" in one.message] == ["WARNING"]
        assert [one["drops"] for one in workers_of(model)] == [1, 0]
        until_all_are_back(model, case)
        assert workers_of(model)[0]["pid"] not in pids, "a new process"
        assert "raylet" not in "".join(capfd.readouterr()), "Ray's own message would be the second"

        monkeypatch.setattr(remote, "DEADLINE_S", 1.0)
        os.kill(pids[1], signal.SIGSTOP)
        assert generate(model, case.prompts) == case.tokens
        assert workers_of(model)[1]["problem"] == "no answer within its deadline"
        os.kill(pids[1], signal.SIGCONT)
        until_all_are_back(model, case)
        assert workers_of(model)[1]["pid"] == pids[1], "the same process"
        assert Kind.OPEN in asked and Kind.LAYER not in asked, "layers go over gloo, also to a worker that is back"
        with loaded(case.store, workers=1, memory="25%", worker_memory="25%"):
            pass
        assert ray.is_initialized(), "a model still uses it"
    assert not ray.is_initialized()
    with pytest.raises(ProcessLookupError):
        for _ in range(600):
            os.kill(pids[1], 0)
            time.sleep(0.1)


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


def tag_of(pid: int) -> str | None:
    """The cluster that was started for it."""
    with contextlib.suppress(OSError):
        for variable in Path("/proc", str(pid), "environ").read_bytes().split(b"\0"):
            if variable.startswith(b"EXPERTLY_CLUSTER="):
                return variable.decode().partition("=")[2]
    return None


def children_of(pid: int) -> list[int]:
    found = [Path(f"/proc/{pid}/task", task, "children") for task in os.listdir(f"/proc/{pid}/task")]
    return [int(child) for file in found for child in file.read_text().split()]


def processes_of(tag: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and f"EXPERTLY_CLUSTER={tag}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def test_a_cluster_that_was_there_stays(cases: Cases, there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that nobody took do not answer the next layer; and a worker that cannot be connected is refused, as
    behind a firewall that lets only Ray's ports through.
    """
    case, settings = cases["qwen3_moe"], {"memory": "25%", "worker_memory": "25%"}
    with loaded(case.store, workers=1, **settings) as model:
        shard = handle(model).engine.executor.shard
        for _ in range(3):
            with monkeypatch.context() as patched:
                patched.setattr(shard, "run_layer", raising(TransferError("read error")))
                with pytest.raises(TransferError, match="read error"):
                    generate(model, case.prompts)
            assert generate(model, case.prompts) == case.tokens
        assert [one["drops"] for one in workers_of(model)] == [0]
    monkeypatch.setattr(pair.Pair, "accept", raising(ConnectionError("refused")))
    with pytest.raises(ConfigError, match="workers: local-1: ConnectionError: refused"):
        expertly.load(str(case.store), workers=1, **settings)
    assert ray.is_initialized()


MEMORY = ("--workers", "1", "--memory", "25%", "--worker-memory", "25%", "--dtype", "float32")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A checkpoint with a tokenizer, and what the unmodified model writes behind "Once"."""
    folder, tokenizer = tmp_path_factory.mktemp("tiny") / "model", make_tokenizer()
    make_checkpoint("qwen3_moe", folder, tokenizer=True)
    (tokens,) = reference_generate(folder, [tokenizer("Once")["input_ids"]], 8)
    return str(folder), str(tokenizer.decode(tokens, skip_special_tokens=True))


def test_run_with_a_worker(tiny: tuple[str, str], there: None, capfd: pytest.CaptureFixture[str]) -> None:
    folder, expected = tiny
    assert main(["run", folder, "Once", "--raw", "--max-new-tokens", "8", "--stats", *MEMORY]) == 0
    out = capfd.readouterr().out
    assert out.startswith(f"{expected}\n")
    rows = [line.split() for line in out.splitlines() if line.startswith(("cpu ", "local-1 "))]
    assert [(row[0], row[4]) for row in rows] == [*product(("cpu", "local-1"), ("prefill", "decode"))]
    (num_calls,) = re.findall(r"^\[worker local-1: (\d+) calls in .* on the way \| .* \| 0 drops\]$", out, re.MULTILINE)
    assert int(num_calls) >= 8, "one a token, and mostly one a layer"


def test_serve_with_a_worker_that_is_for_this_machine_alone_and_ends_with_it(tiny: tuple[str, str]) -> None:
    """However it ends: it is killed."""
    folder, expected = tiny
    words = ("serve", folder, "--port", "0", "--json", "--context", "128", "--name", "tiny", *MEMORY)
    running = subprocess.Popen([sys.executable, "-m", "expertly", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        url = json.loads(running.stdout.readline())["url"]
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["text"] == expected
        said = dict(line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines() if "local-1" in line)
        assert float(said['expertly_worker_alive{worker="local-1"}']) == 1
        assert float(said['expertly_worker_bytes_received_total{worker="local-1"}']) > 0

        (tag,) = {tag for pid in children_of(running.pid) if (tag := tag_of(pid)) is not None}
        addresses = listening(tag)
        assert len(processes_of(tag)) >= 4 and addresses, "gcs, raylet, agents, a worker"
        loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
        assert set(addresses) <= loopback
    finally:
        running.kill()
        running.wait()
    for _ in range(300):
        if not processes_of(tag):
            return
        time.sleep(0.2)
    raise AssertionError(f"still there: {processes_of(tag)}")
