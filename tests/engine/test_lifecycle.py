"""Models come, share a process, and go without a trace: threads, files, memory."""

from __future__ import annotations

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
from expertly.core.errors import BudgetError, ConfigError, EngineClosedError, ModelUseError, StoreError
from expertly.engine.transfer import Readers
from expertly.store.packed import PackedStore
from tests.engine.conftest import Case, Cases
from tests.engine.disk import Preads
from tests.engine.observe import assert_streamed, loaded, open_files, reader_threads, run_python
from tests.families import generate, logits_of

pytestmark = pytest.mark.timeout(120)

# -- several at once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("families", [("qwen3_moe", "gpt_oss"), ("jamba", "granitemoe")])
def test_two_models_with_interleaved_passes(families: tuple[str, str], cases: Cases) -> None:
    first, second = (cases[family] for family in families)
    with loaded(first.store, system="fmoe") as each, loaded(second.store, segments=4, memory="40%") as two:
        torch.testing.assert_close(logits_of(each, first.prompts), first.logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits_of(two, second.prompts), second.logits, rtol=1e-4, atol=1e-5)
        assert generate(each, first.prompts) == first.tokens
        assert generate(two, second.prompts) == second.tokens
        assert_streamed(each)
        assert_streamed(two)
        within = each.get_input_embeddings().register_forward_hook(lambda *_: (logits_of(two, second.prompts), None)[1])
        assert generate(each, first.prompts) == first.tokens, "the other runs in the middle of its passes"
        within.remove()
        expertly.unload(each)
        assert generate(two, second.prompts) == second.tokens, "the other is not touched"
        assert len(reader_threads()) == 4


def test_threads_that_share_a_model_get_the_right_tokens(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    expected = [generate(case.reference, [prompt]) for prompt in case.prompts]
    actual: dict[int, list[Any]] = {0: [], 1: []}
    with loaded(case.store, segments=4) as model:

        def work(i: int) -> None:
            for _ in range(2):
                actual[i].append(generate(model, [case.prompts[i]]))

        threads = [threading.Thread(target=work, args=(i,)) for i in actual]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_streamed(model)
    assert actual == {i: [expected[i]] * 2 for i in actual}


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["lru", "fmoe"])
def test_unload_frees_threads_and_files_and_is_idempotent(system: str, cases: Cases) -> None:
    case = cases["qwen3_moe"]
    assert not reader_threads() and not open_files(case.store)
    model, _ = expertly.load(str(case.store), memory="60%", device="cpu", system=system)
    assert Counter(reader_threads()) == {"expertly-reader": 4}
    assert len(open_files(case.store)) >= 3
    generate(model, case.prompts)
    before = expertly.stats(model).as_dict()["phases"]
    expertly.unload(model)
    closed = expertly.stats(model).as_dict()
    for _ in range(2):
        assert not reader_threads() and not open_files(case.store)
        expertly.unload(model)
    with pytest.raises(EngineClosedError, match=r"expertly\.load"):
        generate(model, case.prompts)
    with pytest.raises(EngineClosedError):
        model(torch.tensor(case.prompts[:1]))
    assert before == closed["phases"] and expertly.stats(model).as_dict() == closed, "the counters stay to be read"


def test_unload_while_another_thread_generates(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that runs is told; neither thread waits for ever."""
    case = cases["qwen3_moe"]
    reads, raised = threading.Semaphore(0), []

    def slow(file: int, buffer: memoryview, offset: int) -> int:
        reads.release()
        time.sleep(0.001)
        return os.preadv(file, [buffer], offset)

    for number in range(3):
        with monkeypatch.context() as patch:
            preads = Preads(patch)
            model, _ = expertly.load(str(case.store), memory="25%", device="cpu", system="lru:segments=16")
            preads.call = slow

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
            thread.join(60)
            assert not thread.is_alive()
        assert isinstance(raised.pop(), EngineClosedError)
        assert not reader_threads() and not open_files(case.store)


def test_del_does_the_same(cases: Cases) -> None:
    case = cases["gpt_oss"]
    model, _ = expertly.load(str(case.store), system="fmoe", memory="50%", device="cpu")
    generate(model, case.prompts)
    engine = weakref.ref(handle(model).engine)
    del model
    gc.collect()
    assert engine() is None and not reader_threads() and not open_files(case.store)


# -- a load that fails -----------------------------------------------------------------------------------------------

REFUSED: list[tuple[type[ConfigError], dict[str, Any], str]] = [
    (BudgetError, {"memory": 0}, r"memory=0"),
    (BudgetError, {"memory": 100}, r"memory=100 bytes.*the least that works is \d+ bytes"),
    (BudgetError, {"context": 1 << 40, "memory": "50%"}, r"memory 50%: takes .* are free.* KV cache of \d+ tokens"),
    (ConfigError, {"dtype": "bfloat16"}, r"dtype|bfloat16"),
    (ConfigError, {"memory": "-5%"}, r"memory='-5%'"),
    (ConfigError, {"system": "resident"}, r"resident.*needs \d+ bytes"),
    (ConfigError, {"system": "mixtral-offloading"}, r"loop=synchronous is for simulation.*; accepted: .*lru"),
    (ConfigError, {"device": "meta"}, r"device='meta'.*accepted: cpu"),
    (ConfigError, {"host_memory": "1GiB"}, r"host_memory='1GiB': there is no host tier"),
    (ConfigError, {"system": "lru:host=lfu"}, r"host=lfu: there is no host tier behind cpu; accepted: no host"),
    *([] if torch.cuda.is_available() else [(ConfigError, {"device": "cuda"}, r"device='cuda'.*no CUDA device")]),
]
"""Beside those of cli/test_refusals.py."""


@pytest.mark.parametrize(("error", "arguments", "message"), REFUSED, ids=str)
def test_a_load_that_cannot_work_says_what_is_accepted_and_leaves_nothing(
    error: type[ConfigError], arguments: dict[str, Any], message: str, cases: Cases
) -> None:
    store, before = cases["qwen3_moe"].store, set(threading.enumerate())
    with pytest.raises(error, match=message):
        expertly.load(str(store), **({"memory": "25%", "device": "cpu"} | arguments))
    assert set(threading.enumerate()) <= before and not open_files(store)


def test_a_file_that_is_gone_leaves_no_other_open(copied: tuple[Case, Path]) -> None:
    _, folder = copied
    store = PackedStore.open(folder)
    geometry = store.geometry()
    store.extents[geometry.num_layers - 1][0].unlink()
    with pytest.raises(StoreError, match="no such file"):
        Readers(store.layer_file, geometry, lambda layer: memoryview(b""))
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


EXIT = """
import sys, time, expertly, torch
models = [expertly.load(sys.argv[1], system=system, memory="50%", device="cpu")[0] for system in ("fmoe", "lru")]
models[0].generate(torch.tensor([[5, 6, 7, 8]]), do_sample=False, max_new_tokens=4)
engine = expertly.api.handle(models[1]).engine
engine.device.submit(engine.scheduler.preload(0, 1))
print("end", time.time())
"""


def test_a_process_that_ends_without_unload_in_the_middle_of_a_read_ends_quickly_and_quietly(
    copied: tuple[Case, Path],
) -> None:
    done = run_python(EXIT, str(copied[1]))
    ended = time.time()
    assert done.returncode == 0, done.stderr
    assert ended - float(done.stdout.split()[1]) < 30
    assert not [line for line in done.stderr.splitlines() if "Loading weights" not in line and line.strip()]


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
def test_a_forked_child_neither_runs_nor_hangs(system: str, copied: tuple[Case, Path]) -> None:
    """Threads do not survive a fork; multiprocessing forks, and a child that exits collects what it was born with."""
    case, store = copied
    model, _ = expertly.load(str(store), system=system, memory="50%", device="cpu")
    assert generate(model, case.prompts) == case.tokens

    def run() -> None:
        with pytest.raises(EngineClosedError, match=r"before this process was forked; call expertly\.load again"):
            generate(model, case.prompts)

    assert exit_code_of_a_child(run) == 0
    assert exit_code_of_a_child(lambda: expertly.unload(model)) == 0
    assert generate(model, case.prompts) == case.tokens, "the parent goes on"
    expertly.unload(model)
