"""When what `expertly` learns is written, by whom, and what becomes of it when that fails."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.core.errors import StoreError
from expertly.engine import learned as learned_module
from expertly.engine.learned import SavedState
from expertly.policies.eviction import EVICTIONS
from expertly.policies.eviction.reuse import LayerReuse, Reuse, ReuseModel
from expertly.policies.learned import read_learned, save_learned
from tests.engine.conftest import Case
from tests.engine.observe import loaded, reader_threads, run_python
from tests.engine.test_saved_reuse import NUM_TOKENS, learn, of_reuse
from tests.families import generate
from tests.scheduler.drive import geometry, one_token


def num_tokens_in(path: Path) -> int:
    return read_learned(path, ReuseModel).learned.num_tokens


pytestmark = pytest.mark.timeout(120)


def test_what_cannot_be_written(own: tuple[Case, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked for it: a warning. Asked for by name: an error, when all else is done."""
    case, store = own

    def fail(*args: Any) -> None:
        raise StoreError("disk full")

    monkeypatch.setattr(learned_module, "save_learned", fail)
    with pytest.warns(UserWarning, match="not saved: disk full"):
        learn(store, case)
    path = store.with_name("my.reuse")
    model, _ = expertly.load(str(store), system="expertly", maps=path, memory="50%", device="cpu")
    generate(model, case.prompts)
    with pytest.warns(UserWarning, match="not saved"), pytest.raises(StoreError, match=r"my\.reuse.*disk full"):
        expertly.unload(model)
    assert not reader_threads(), "the rest was closed"
    assert (of_reuse(model)["failed_writes"], of_reuse(model)["problem"]) == (1, "disk full")


def test_it_is_written_while_the_model_runs(own: tuple[Case, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    case, store = own
    monkeypatch.setattr(learned_module, "SAVE_EVERY_S", 0.05)
    path = store.with_name("store.reuse")
    with loaded(store, system="expertly", maps="auto") as model:
        end, seen = time.monotonic() + 60, set[int]()
        while len(seen) < 3:
            assert time.monotonic() < end
            assert generate(model, case.prompts) == case.tokens
            if path.exists():
                seen.add(num_tokens_in(path))
    assert num_tokens_in(path) >= max(seen) > 0


def on_its_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SavedState, ReuseModel]:
    """The file of a model that has seen a token, and saves whenever a pass ends."""
    monkeypatch.setattr(learned_module, "SAVE_EVERY_S", 0.0)
    shape = geometry()
    policy = EVICTIONS["reuse"].of_model(shape)(4)
    assert isinstance(policy, Reuse)
    saved = SavedState(policy, path, "4" * 64)
    policy.model.observe(one_token(0, [1, 2]))
    return saved, policy.model


def test_who_closes_it_while_it_is_written_waits_or_is_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A garbage collection may close it in any thread, in that which writes, too: all is written, whole."""
    path = tmp_path / "my.reuse"
    saved, model = on_its_own(path, monkeypatch)
    writers = []

    def closing_meanwhile(*args: Any) -> None:
        writers.append(threading.current_thread())
        if len(writers) == 1:
            model.observe(one_token(0, [1, 2]))
            saved.close()
        save_learned(*args)

    monkeypatch.setattr(learned_module, "save_learned", closing_meanwhile)
    saved.pass_ended()
    for thread in reader_threads():
        thread.join(20)
    assert num_tokens_in(path) == 2
    assert len(writers) == 2 and writers[0] is writers[1] is not threading.current_thread()
    model.observe(one_token(0, [1, 2]))
    saved.pass_ended()
    model.observe(one_token(0, [1, 2]))
    saved.close()
    assert num_tokens_in(path) == 4 and not reader_threads()


def test_what_ends_the_writer_reaches_who_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, _ = on_its_own(tmp_path / "my.reuse", monkeypatch)

    def fail(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(learned_module, "save_learned", fail)
        saved.pass_ended()
        for thread in reader_threads():
            thread.join(20)
    with pytest.raises(MemoryError):
        saved.close()
    assert num_tokens_in(tmp_path / "my.reuse") == 1, "and it is written at the end all the same"


def test_between_two_writes_a_pass_does_nothing(own: tuple[Case, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    case, store = own
    states = []
    state = ReuseModel.state
    monkeypatch.setattr(ReuseModel, "state", lambda model: states.append(model) or state(model))
    with loaded(store, system="expertly", maps="auto") as model:
        generate(model, case.prompts)
        assert not states and not [one for one in reader_threads() if one.name == "expertly-learned"]
    assert len(states) == 1


def test_it_is_written_when_the_process_ends(own: tuple[Case, Path]) -> None:
    code = """
import sys, expertly, torch
model, _ = expertly.load(sys.argv[1], system="expertly", memory="50%", device="cpu")
model.generate(torch.tensor([[5, 6, 7, 8]]), do_sample=False, max_new_tokens=4)
"""
    done = run_python(code, str(own[1]))
    assert done.returncode == 0, done.stderr
    assert num_tokens_in(own[1].with_name("store.reuse")) == 4 + 3


def test_what_an_interrupt_left_half_done_is_not_written(own: tuple[Case, Path]) -> None:
    """The file is what it was before; the model goes on with what it has."""
    case, store = own
    learn(store, case)
    path = store.with_name("store.reuse")
    before, step = path.read_bytes(), LayerReuse.step

    def interrupted(layer: LayerReuse, *args: Any, **kwargs: Any) -> Any:
        step(layer, *args, **kwargs)
        raise KeyboardInterrupt

    model, _ = expertly.load(str(store), system="expertly", memory="50%", device="cpu")
    generate(model, case.prompts)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LayerReuse, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(model, case.prompts)
    assert generate(model, case.prompts) == case.tokens
    with pytest.warns(UserWarning, match="interrupted while it learned: what it has learned since is not saved"):
        expertly.unload(model)
    assert path.read_bytes() == before and "interrupted" in of_reuse(model)["problem"]


def test_a_pass_that_fails_elsewhere_loses_nothing(own: tuple[Case, Path]) -> None:
    """An interrupt between two layers, as most are."""
    case, store = own
    with loaded(store, system="expertly", maps="auto") as model:
        generate(model, case.prompts)

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        hook = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(model, case.prompts)
        hook.remove()
        assert generate(model, case.prompts) == case.tokens
    assert num_tokens_in(store.with_name("store.reuse")) > 2 * NUM_TOKENS
