"""What a system learns outlives the model that learned it: read when one is loaded, written when it goes. Maps of fmoe,
matrices of moe-infinity and what expertly learns of reuse are kept the same way.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import expertly
from expertly.api import handle
from expertly.policies.fmoe import MapStore
from expertly.policies.learned import LearnedState, read_learned, save_learned
from expertly.policies.moe_infinity import Matrices
from expertly.policies.reuse import ReuseModel
from tests.engine.conftest import Case, Cases
from tests.engine.observe import loaded, run_python
from tests.families import NUM_NEW_TOKENS, generate

pytestmark = pytest.mark.timeout(120)

KINDS: dict[str, type[LearnedState]] = {"fmoe": MapStore, "moe-infinity": Matrices, "expertly": ReuseModel}
"""What is kept, by system."""

NUM_TOKENS = 14 + 11 + 2 * (NUM_NEW_TOKENS - 1)
"""Of a case's two prompts and their answers, the last token of which the model does not see."""

BOTH = "expertly:prediction=fmoe:distance=1"


def kept(model: Any) -> tuple[int, str, str | None, str | None]:
    """What a loaded model says of its file: how much was read, "warm" or "cold", its path, and a problem."""
    stats = expertly.stats(model).as_dict()
    if (facts := stats["prediction"]) is not None:
        return facts["maps_read"], facts["history"], facts["maps_file"], facts["maps_problem"]
    facts = stats["reuse"]
    return facts["tokens_read"], facts["history"], facts["file"], facts["problem"]


def of_reuse(model: Any) -> dict[str, Any]:
    facts: dict[str, Any] = expertly.stats(model).as_dict()["reuse"]
    return facts


def beside(store: Path, system: str) -> Path:
    return store.with_name(f"store.{KINDS[system].kind}")


def num_in(path: Path, system: str = "expertly") -> int:
    arrays = load_file(path)
    if system == "expertly":
        return int(arrays["tokens"].max())
    return len(arrays["maps"][0]) if system == "fmoe" else len(arrays["prefill"]) + len(arrays["decode"])


def learn(store: Path, case: Case, system: str, **kwargs: Any) -> int:
    """Load, generate, unload; what was read at the start."""
    with loaded(store, **({"system": system, "learned": "auto"} | kwargs)) as model:
        assert generate(model, case.prompts) == case.tokens
        return kept(model)[0]


# -- read and written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", KINDS)
def test_auto_is_beside_the_store_and_is_found_again(system: str, copied: tuple[Case, Path]) -> None:
    case, store = copied
    path = beside(store, system)
    with loaded(store, system=system, learned="auto") as model:
        assert kept(model) == (0, "cold", str(path), None)
        generate(model, case.prompts)
        engine = handle(model).engine
        policy = engine.prefetching.predictor if engine.prefetching else engine.scheduler.cache.partitions[0].policy
        identity = handle(model).store.manifest.identity
    state, arrays = policy.learned.state(), load_file(path)
    assert arrays.keys() == state.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, state[name], err_msg=name)
    with safe_open(path, "np") as file:
        header = file.metadata()
    assert header["identity"] == identity and json.loads(header["about"])["source"] == str(case.folder)
    num = 2 * len(case.prompts) if system == "moe-infinity" else NUM_TOKENS
    assert num_in(path, system) == num
    generation = path.stat().st_mtime_ns
    with loaded(store, system=system, learned="auto") as model:
        assert kept(model) == (num, "warm", str(path), None)
    assert path.stat().st_mtime_ns == generation, "nothing was learned: nothing is written"
    assert learn(store, case, system, learned="off") == 0
    assert path.stat().st_mtime_ns == generation
    assert learn(store, case, system) == num < learn(store, case, system, segments=2, memory="40%"), "in any memory"
    assert sorted(os.listdir(store.parent)) == ["store", path.name]


def test_each_kind_has_a_file_of_its_own(copied: tuple[Case, Path], tmp_path: Path) -> None:
    """One system may learn two."""
    case, store = copied
    assert learn(store, case, "moe-infinity") == 0
    before = beside(store, "moe-infinity").read_bytes()
    assert learn(store, case, BOTH) == 0
    assert sorted(os.listdir(tmp_path)) == ["store", "store.maps", "store.matrices", "store.reuse"]
    assert learn(store, case, BOTH) > 0 and beside(store, "moe-infinity").read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "system"),
    [
        ("truncated", "fmoe"),
        ("another model's", "expertly"),
        ("no file of ours", "expertly"),
        ("a pipe", "moe-infinity"),
    ],
)
def test_a_file_that_is_not_what_it_should_be(
    damage: str, system: str, copied: tuple[Case, Path], cases: Cases
) -> None:
    """The model starts cold, says so, and replaces the file if it is expertly's."""
    case, store = copied
    path = beside(store, system)
    if damage == "another model's":
        learn(store, case, system)
        file = read_learned(path, MapStore, ReuseModel)
        save_learned(path, file.learned, "5" * 64)
    elif damage == "a pipe":
        os.mkfifo(path)
    else:
        learn(store, case, system)
        path.write_bytes(path.read_bytes()[:-5] if damage == "truncated" else b"hello")
    is_ours = damage not in ("no file of ours", "a pipe")
    with pytest.warns(UserWarning, match=path.name) as warned, loaded(store, system=system, learned="auto") as model:
        _, history, _, problem = kept(model)
        assert history == "cold" and path.name in (problem or "")
        assert generate(model, case.prompts) == case.tokens
    assert re.match("expertly: starting without ", str(warned[0].message))
    assert ["not saved" in str(warning.message) for warning in warned] == ([False] if is_ours else [False, True])
    if is_ours:
        assert learn(store, case, system) > 0
    elif damage == "a pipe":
        assert path.is_fifo()
    else:
        assert path.read_bytes() == b"hello"


def test_a_file_of_embeddings_of_another_width(copied: tuple[Case, Path]) -> None:
    """They cannot be compared to what this model feeds."""
    case, store = copied
    path = beside(store, "fmoe")
    learn(store, case, "fmoe")
    file = read_learned(path, MapStore)
    hidden_size = file.learned.embeddings.shape[1]
    file.learned.embeddings = np.pad(file.learned.embeddings, ((0, 0), (0, 3)))
    save_learned(path, file.learned, file.identity)
    message = rf"store\.maps: tensor 'embeddings': F32 \[\d+, {hidden_size + 3}\]; accepted: .*, {hidden_size}\]"
    with pytest.warns(UserWarning, match=message):
        assert learn(store, case, "fmoe") == 0


@pytest.mark.usefixtures("peers")
def test_with_workers_begins_with_nothing_of_reuse(copied: tuple[Case, Path]) -> None:
    case, store = copied
    learn(store, case, "expertly")
    before = beside(store, "expertly").read_bytes()
    with loaded(store, system="expertly", learned="auto", workers=1, memory="40%", worker_memory="40%") as model:
        assert generate(model, case.prompts) == case.tokens
        assert of_reuse(model)["says"] == "began with nothing learned" and of_reuse(model)["file"] is None
    assert beside(store, "expertly").read_bytes() == before


# -- when it is written -------------------------------------------------------------------------------------------


EXIT = """
import sys, time, expertly, torch
systems = ("fmoe", "expertly", "lru")
models = [expertly.load(sys.argv[1], system=system, memory="50%", device="cpu")[0] for system in systems]
for model in models[:2]:
    model.generate(torch.tensor([[5, 6, 7, 8]]), do_sample=False, max_new_tokens=4)
engine = expertly.api.handle(models[2]).engine
engine.device.submit(engine.scheduler.preload(0, 1))
print("end", time.time())
"""


def test_a_process_that_ends_without_unload_ends_quickly_and_quietly_and_all_is_written(
    copied: tuple[Case, Path],
) -> None:
    """In the middle of a read."""
    done = run_python(EXIT, str(copied[1]))
    ended = time.time()
    assert done.returncode == 0, done.stderr
    assert ended - float(done.stdout.split()[1]) < 30
    assert not [line for line in done.stderr.splitlines() if "Loading weights" not in line and line.strip()]
    for system in ("fmoe", "expertly"):
        assert num_in(beside(copied[1], system), system) == 4 + 3
