"""Workers that are processes of their own, here and on another machine of a Ray cluster: killed, stopped, ended."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

import expertly
from expertly.cli.main import main
from expertly.engine import remote
from tests.commands import RunningCommand
from tests.engine.conftest import Cases
from tests.engine.observe import loaded
from tests.families import generate, make_checkpoint, make_tokenizer, reference_generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def workers_of(model: Any) -> list[dict[str, Any]]:
    return [each["worker"] for each in expertly.stats(model).as_dict()["devices"] if each["worker"] is not None]


def until_gone(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        for _ in range(3000):
            os.kill(pid, 0)
            time.sleep(0.01)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster with one other machine, as Ray has it: another raylet."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(expertly.__file__).parent.parent))  # workers find this package
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        cluster.add_node(num_cpus=1)
        yield cluster.address
        import ray

        ray.shutdown()
        cluster.shutdown()


@pytest.mark.parametrize("place", ["here", "cluster"])
def test_processes_that_are_killed(place: str, cases: Cases, request: pytest.FixtureRequest, caplog: Any) -> None:
    case, workers = cases["gpt_oss"], 1 if place == "here" else request.getfixturevalue("address")
    with loaded(case.store, workers=workers, memory="25%") as model:
        assert generate(model, case.prompts) == case.tokens
        (worker,), (_, device) = workers_of(model), expertly.stats(model).as_dict()["devices"]
        assert worker["pid"] != os.getpid() and worker["bytes_received"]

        child = os.fork()
        if not child:
            try:
                expertly.unload(model)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert generate(model, case.prompts) == case.tokens
        assert workers_of(model)[0]["alive"], "a forked process ends nothing that is not its own"

        os.kill(worker["pid"], signal.SIGKILL)
        assert generate(model, case.prompts) == case.tokens
        assert workers_of(model)[0]["problem"] != "no answer within its deadline", (
            "a closed connection is death at once"
        )
        assert [each.levelname for each in caplog.records if f"worker {device['device']} was lost" in each.message] == [
            "WARNING"
        ]
        assert not workers_of(model)[0]["alive"]
    until_gone(worker["pid"])


def test_a_process_that_is_stopped_is_computed_for_and_ended(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["gpt_oss"]
    with loaded(case.store, workers=1, memory="25%") as model:
        (worker,) = workers_of(model)
        monkeypatch.setattr(remote, "DEADLINE_S", 1.0)
        os.kill(worker["pid"], signal.SIGSTOP)
        assert generate(model, case.prompts) == case.tokens
        assert workers_of(model)[0]["problem"] == "no answer within its deadline"
        until_gone(worker["pid"])


MEMORY = ("--workers", "1", "--memory", "25%", "--dtype", "float32")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A checkpoint with a tokenizer, and what the unmodified model writes behind "Once"."""
    folder, tokenizer = tmp_path_factory.mktemp("tiny") / "model", make_tokenizer()
    make_checkpoint("qwen3_moe", folder, tokenizer=True)
    (tokens,) = reference_generate(folder, [tokenizer("Once")["input_ids"]], 8)
    return str(folder), str(tokenizer.decode(tokens, skip_special_tokens=True))


def test_run_with_a_worker(tiny: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    folder, expected = tiny
    assert main(["run", folder, "Once", "--raw", "--max-new-tokens", "8", "--stats", *MEMORY]) == 0
    out, err = capfd.readouterr()
    assert out == f"{expected}\n"
    rows = [line.split() for line in err.splitlines() if line.startswith(("cpu ", "local-1 "))]
    assert [(row[0], row[4]) for row in rows] == [*product(("cpu", "local-1"), ("prefill", "decode"))]
    (num_calls,) = re.findall(r"^\[worker local-1: (\d+) calls in .* on the way \| .*\]$", err, re.MULTILINE)
    assert int(num_calls) >= 8, "one a token, and mostly one a layer"


def test_serve_with_a_worker_that_ends_with_it(tiny: tuple[str, str], start: Callable[..., RunningCommand]) -> None:
    """However it ends: it is killed."""
    folder, expected = tiny
    running = start(
        "serve", folder, "--port", "0", "--json", "--context", "128", "--served-model-name", "tiny", *MEMORY
    )
    running.wait_until(lambda: running.out.endswith("\n"))
    url = json.loads(running.out)["url"]
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"] == expected
    said = dict(line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines() if "local-1" in line)
    assert float(said['expertly_worker_alive{worker="local-1"}']) == 1
    tasks = Path(f"/proc/{running.process.pid}/task").glob("*/children")
    children = {int(child) for file in tasks for child in file.read_text().split()}
    (worker,) = [pid for pid in children if b"expertly.engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    running.send_signal(signal.SIGKILL)
    until_gone(worker)
