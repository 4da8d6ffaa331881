"""Models come, share a process, and go without a trace: threads, files, memory."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.errors import (
    BudgetError,
    ConfigError,
    EngineClosedError,
    ExpertlyError,
    ModelUseError,
    StoreError,
)
from expertly.engine.reading import make_source
from expertly.scheduler.decisions import replay_file
from expertly.store.packed import PackedStore
from expertly.store.reader import ExpertFile
from tests.engine.conftest import Case, Cases
from tests.engine.failing import replace_reads
from tests.engine.observe import assert_streamed, loaded, open_files, reader_threads
from tests.families import generate, logits_of

pytestmark = pytest.mark.timeout(120)

TWO, WAITING = "cpu:0,cpu:1", "lru:prediction=lookahead:transfer=synchronous"

# -- several at once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("families", [("qwen3_moe", "gpt_oss"), ("jamba", "switch_transformers")])
def test_two_models_with_interleaved_passes(families: tuple[str, str], cases: Cases) -> None:
    first, second = (cases[family] for family in families)
    with loaded(first.store, system="fmoe") as one, loaded(second.store, segments=4, memory="40%") as two:
        torch.testing.assert_close(logits_of(one, first.prompts), first.logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits_of(two, second.prompts), second.logits, rtol=1e-4, atol=1e-5)
        assert generate(one, first.prompts) == first.tokens
        assert generate(two, second.prompts) == second.tokens
        assert_streamed(one)
        assert_streamed(two)
        expertly.unload(one)
        assert generate(two, second.prompts) == second.tokens, "the other is not touched"
        assert len(reader_threads()) == 4


def test_one_model_within_anothers_pass(cases: Cases) -> None:
    """A hook of one that runs the other in the middle of a layer."""
    case, other = cases["qwen3_moe"], cases["gpt_oss"]
    with loaded(case.store) as outer, loaded(other.store) as inner:
        hook = outer.model.layers[1].register_forward_hook(lambda *args: (logits_of(inner, other.prompts), None)[1])
        assert generate(outer, case.prompts, 4) == [tokens[:4] for tokens in case.tokens]
        hook.remove()
        assert generate(inner, other.prompts) == other.tokens


def test_threads_that_share_a_model_get_the_right_tokens(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    expected = [generate(case.reference, [prompt]) for prompt in case.prompts]
    found: dict[int, list[Any]] = {0: [], 1: []}
    with loaded(case.store, segments=4) as model:

        def work(i: int) -> None:
            for _ in range(2):
                found[i].append(generate(model, [case.prompts[i]]))

        threads = [threading.Thread(target=work, args=(i,)) for i in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_streamed(model)
    assert found == {i: [expected[i]] * 2 for i in found}


def test_a_deepcopy_shares_slots_and_statistics(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store) as model:
        twin = copy.deepcopy(model)
        assert handle(twin) is handle(model)
        assert len(reader_threads()) == 4
        assert generate(twin, case.prompts) == case.tokens
        assert expertly.stats(twin).as_dict() == expertly.stats(model).as_dict()
        expertly.unload(twin)
        with pytest.raises(EngineClosedError):
            generate(model, case.prompts)


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "system", "threads"),
    [
        ("cpu", "lru", {"reader": 4}),
        ("cpu:0,cpu:1", "fmoe", {"reader": 8, "device": 2, "predictor": 1}),
    ],
)
def test_unload_frees_threads_and_files_and_is_idempotent(
    devices: str, system: str, threads: dict[str, int], cases: Cases
) -> None:
    case = cases["qwen3_moe"]
    assert not reader_threads() and not open_files(case.store)
    model, _ = expertly.load(str(case.store), memory="60%", devices=devices, system=system, learned="off")
    assert Counter(thread.name.split("-")[1] for thread in reader_threads()) == threads
    assert len(open_files(case.store)) >= 3
    generate(model, case.prompts)
    before = expertly.stats(model).as_dict()["phases"]
    expertly.unload(model)
    closed = expertly.stats(model).as_dict()  # the predictor thread has read what still waited
    for _ in range(2):
        assert not reader_threads() and not open_files(case.store)
        expertly.unload(model)
    with pytest.raises(EngineClosedError, match=r"expertly\.load"):
        generate(model, case.prompts)
    with pytest.raises(EngineClosedError):
        model(torch.tensor(case.prompts[:1]))
    assert before == closed["phases"] and expertly.stats(model).as_dict() == closed, "the counters stay to be read"


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1"])
def test_unload_while_another_thread_generates(devices: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that runs is told; neither thread waits for ever."""
    case = cases["qwen3_moe"]
    read_into = ExpertFile.read_into
    reads, raised = threading.Semaphore(0), []

    def slow(*args: Any) -> bool:
        reads.release()
        time.sleep(0.001)
        return read_into(*args)

    for number in range(3):
        model, _ = expertly.load(str(case.store), memory="25%", devices=devices, segments=16)
        with monkeypatch.context() as patch:
            replace_reads(patch, slow)

            def work(model: Any = model) -> None:
                try:
                    generate(model, case.prompts, 200)
                except BaseException as error:
                    raised.append(error)

            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            for _ in range(7 * number + 1):
                reads.acquire()
            expertly.unload(model)
            thread.join(10)
            assert not thread.is_alive()
        assert isinstance(raised.pop(), EngineClosedError)
        assert not reader_threads() and not open_files(case.store)


def test_del_does_the_same(cases: Cases) -> None:
    case = cases["gpt_oss"]
    model, _ = expertly.load(str(case.store), system="fmoe", memory="50%", device="cpu", learned="off")
    generate(model, case.prompts)
    engine = weakref.ref(handle(model).engine)
    del model
    gc.collect()
    assert engine() is None
    assert not reader_threads() and not open_files(case.store)


# -- a load that fails -----------------------------------------------------------------------------------------------

OF_BUDGET: list[tuple[dict[str, Any], str]] = [
    ({"memory": 0}, r"memory=0"),
    ({"memory": 100}, r"memory=100 bytes.*the least that works is \d+ bytes"),
    ({"staging_slots": 0}, r"staging_slots=0: must be at least 1"),
    ({"staging_slots": 20}, r"the least that works"),
    ({"context": 1 << 40, "memory": "50%"}, r"memory 50%: takes .* are free.* KV cache of \d+ tokens"),
]
OF_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "int7"}, r"dtype='int7'.*bfloat16"),
    ({"dtype": "bfloat16"}, r"dtype|bfloat16"),
    ({"memory": "lots"}, r"memory='lots': accepted"),
    ({"memory": "-5%"}, r"memory='-5%'"),
    ({"system": "magic"}, r"system='magic'.*accepted: .*lru"),
    ({"system": "resident"}, r"resident.*needs \d+ bytes"),
    ({"order": "random"}, r"order='random'.*accepted: resident, id"),
    ({"device": "abacus"}, r"device='abacus'.*accepted: cpu"),
    ({"device": "meta"}, r"device='meta'.*accepted: cpu"),
    ({"segments": 3}, r"segments.*3.*16|3.*does not divide"),
    ({"segments": 0}, r"segments.*0"),
    ({"context": -1, "memory": "auto"}, r"context=-1"),
    ({"host_memory": "1GiB"}, r"host_memory='1GiB': there is no host tier"),
    ({"codec": "zip"}, "codec='zip': unknown; accepted: none, planes, auto"),
    ({"codec": "planes"}, "codec='planes': the packed store .* in none"),
    ({"predict": "fast"}, "predict='fast': unknown; accepted: auto, thread, inline"),
    ({"predict": "inline", "system": "lru"}, "predict='inline': system 'lru' predicts nothing"),
    ({"predict": "thread", "system": WAITING}, r"predict='thread': .*transfer=synchronous.*accepted: auto, inline"),
    ({"device": "cpu", "devices": TWO}, "device='cpu' and devices='cpu:0,cpu:1': accepted: one of the two"),
    ({"devices": []}, r"devices=\[\]: accepted: cpu:0,cpu:1"),
    ({"devices": "cpu:0,abacus"}, "devices='abacus': unknown; accepted: cpu, cuda"),
    ({"devices": "cpu:0,"}, "devices='': unknown; accepted: cpu, cuda"),
    ({"devices": "meta"}, "devices='meta': no backend for it; accepted: cpu"),
    ({"devices": "cpu,cpu:1"}, r"devices='cpu': which one\? accepted: cpu:N, as in cpu:0,cpu:1"),
    ({"devices": [f"cpu:{i}" for i in range(9)]}, "devices: 9 of them.*only 8 experts; accepted: 1 to 8"),
    ({"devices": TWO, "decisions": "x.jsonl"}, "decisions='x.jsonl': 2 devices decide apart; accepted"),
    ({"devices": TWO, "host_memory": "1GiB"}, "host_memory='1GiB': there is no"),
]


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [*((BudgetError, *one) for one in OF_BUDGET), *((ConfigError, *one) for one in OF_OPTIONS)],
    ids=str,
)
def test_a_load_that_cannot_work_says_what_is_accepted_and_leaves_nothing(
    error: type[ExpertlyError], arguments: dict[str, Any], message: str, cases: Cases
) -> None:
    store = cases["qwen3_moe"].store
    where = {} if "devices" in arguments else {"device": "cpu"}
    before = set(threading.enumerate())
    with pytest.raises(error, match=message) as caught:
        expertly.load(str(store), **({"memory": "60%" if "devices" in arguments else "25%"} | where | arguments))
    del caught
    gc.collect()
    assert set(threading.enumerate()) <= before and not open_files(store) and not os.path.exists("x.jsonl")


def test_no_cuda_device_is_said(cases: Cases) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=r"device='cuda'.*no CUDA device"):
        expertly.load(str(cases["qwen3_moe"].store), device="cuda")


def test_a_file_that_is_gone_leaves_no_other_open(own: tuple[Case, Path]) -> None:
    _, folder = own
    store = PackedStore.open(folder)
    geometry = store.geometry()
    store.extents[geometry.num_layers - 1][0].unlink()
    with pytest.raises(StoreError, match="cannot be opened"):
        make_source(store, geometry, 4)
    assert not open_files(folder)


# -- gradients -------------------------------------------------------------------------------------------------------


def test_gradients_are_refused_and_a_plain_call_works(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    ids = torch.tensor(case.prompts[:1])
    with loaded(case.store) as model:
        logits = model(ids).logits
        assert not logits.requires_grad
        with torch.no_grad():
            torch.testing.assert_close(logits, case.reference(ids).logits, rtol=1e-4, atol=1e-5)
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        with pytest.raises(ModelUseError, match="gradients"):
            model(inputs_embeds=embeds)
        with torch.no_grad():
            model(inputs_embeds=embeds)
        with torch.inference_mode():
            torch.testing.assert_close(model(ids).logits, logits)


def test_stats_and_unload_of_any_other_model(cases: Cases) -> None:
    reference = cases["qwen3_moe"].reference
    for call in (expertly.stats, expertly.unload):
        with pytest.raises(ModelUseError, match="was not loaded by expertly"):
            call(reference)


# -- forked processes ------------------------------------------------------------------------------------------------


def exit_code_of_a_child(run: Callable[[], None]) -> int:
    """What a forked child makes of `run`: 0, 1 where it raised, or the signal that ended it after 20 s, below 0."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("system", ["lru", "fmoe"])
def test_a_forked_child_neither_runs_nor_hangs_nor_writes(system: str, cases: Cases, tmp_path: Path) -> None:
    """Threads do not survive a fork; multiprocessing forks, and a child that exits collects what it was born with."""
    case, maps, decisions = cases["qwen3_moe"], tmp_path / "some.maps", tmp_path / "decisions.jsonl"
    settings: dict[str, Any] = {"learned": maps} if system == "fmoe" else {}
    model, _ = expertly.load(
        str(case.store), system=system, memory="50%", device="cpu", decisions=decisions, **settings
    )
    assert generate(model, case.prompts) == case.tokens

    def run() -> None:
        with pytest.raises(EngineClosedError, match=r"before this process was forked; call expertly\.load again"):
            generate(model, case.prompts)

    assert exit_code_of_a_child(run) == 0
    assert exit_code_of_a_child(lambda: expertly.unload(model)) == 0
    assert not maps.exists()
    assert generate(model, case.prompts) == case.tokens, "the parent goes on"
    expertly.unload(model)
    assert maps.exists() == (system == "fmoe")
    assert replay_file(decisions)[1].difference is None
