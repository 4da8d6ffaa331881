"""Which products a model gets: the machine's, the environment's choice, or torch's, and what is told of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from expertly.core.errors import ConfigError
from expertly.native import kernels as kernels_module
from expertly.native.kernels import ACCEPTED, VARIABLE, Kernels, choose_kernels, libraries
from tests.engine.observe import run_python

AVAILABLE = libraries()


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_the_fastest_is_taken() -> None:
    chosen = choose_kernels()
    assert chosen.name == f"native {AVAILABLE[0].name}" and chosen.most_tokens(torch.bfloat16)
    counts = dict.fromkeys(("native", "torch", "early", "attention", "graphs", "programs"), 0)
    assert chosen.facts() == {"name": chosen.name, "why": "the fastest of this processor", "stopped": ""} | counts


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (library.name for library in AVAILABLE):
        monkeypatch.setenv(VARIABLE, name)
        assert choose_kernels().name == f"native {name}"
    monkeypatch.setenv(VARIABLE, "torch")
    chosen = choose_kernels()
    assert chosen.name == "torch" and chosen.most_tokens(torch.bfloat16) == 0
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ConfigError, match=f"{VARIABLE}='fast'") as caught:
        choose_kernels()
    assert all(name in str(caught.value) for name in ACCEPTED)


def test_a_device_that_is_no_cpu_multiplies_itself() -> None:
    assert choose_kernels(runs_on_host=False).name == "torch"


def test_threads_are_torchs_and_no_more_than_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    used: list[int] = []
    call = SimpleNamespace(products_dots=lambda level, dtype, num_threads, *rest: used.append(num_threads) or 0)
    library = replace(AVAILABLE[0], call=call)
    for granted in (1, 3, 8):
        monkeypatch.setattr(kernels_module, "granted_cpus", lambda granted=granted: granted)
        Kernels(library, "for a test").dots(0, torch.ones(1, 8), torch.empty(1, 8), 32)
    assert used == [1, 3, 5]


THREADS = """
import os, sys, time, {}
spins = os.environ.get("GOMP_SPINCOUNT")
import torch
from pathlib import Path
from expertly.native.kernels import choose_kernels
torch.set_num_threads(2)
kernels, rows, x = choose_kernels(), torch.ones(4096, 256), torch.ones(1, 256)
kernels.max_threads = 2
for _ in range(20):
    kernels.dots(rows.data_ptr(), x, torch.empty(1, 4096), 1024)
end, tasks = time.monotonic() + float(sys.argv[1]), []
while "expertly-team" not in tasks and time.monotonic() < end:  # a thread has no name before it runs
    tasks = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
print(spins, "expertly-team" in tasks)
"""


@pytest.mark.parametrize(
    ("imports", "policy", "expected"),
    [("expertly", None, "10000 True"), ("torch, expertly", None, "None False"), ("expertly", "PASSIVE", "None True")],
)
def test_threads_that_would_fight_are_shared(
    imports: str, policy: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's spin for long, unless it is imported later than expertly or the user says how they wait."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    result = run_python(THREADS.format(imports), "30" if expected.endswith("True") else "1")
    assert result.stdout.strip() == expected, result.stderr
