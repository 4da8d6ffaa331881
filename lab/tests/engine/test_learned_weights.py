"""The weights of a learned predictor: found beside the store or named, checked, and worth their training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.core.errors import ConfigError, StoreError
from expertly.data import demo_predictor
from expertly.policies.learned import read_learned, save_learned
from expertly.policies.promoe import LearnedWeights
from expertly.store.cache import learned_beside
from expertly.store.manifest import Manifest
from expertly_lab.recording import record
from expertly_lab.trace.reader import Trace
from expertly_lab.train import TrainOptions, study
from tests.engine.conftest import Case
from tests.engine.observe import loaded
from tests.families import HIDDEN_SIZE, VOCAB_SIZE, generate
from tests.weights import put_beside, random_weights

SYSTEM = "promoe:distance=1"


def decode_of(model: Any) -> dict[str, Any]:
    result: dict[str, Any] = expertly.stats(model).as_dict()["phases"]["decode"]
    return result


def feed(model: Any, seed: int) -> None:
    """A prompt of 8 random tokens, then 16 random tokens one by one."""
    generator = torch.Generator().manual_seed(seed)
    cache = None
    with torch.no_grad():
        for step in range(17):
            ids = torch.randint(4, VOCAB_SIZE, (1, 1 if step else 8), generator=generator)
            cache = model(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values


@pytest.mark.parametrize("predictor", ["auto", "off", None])
def test_without_weights_it_says_what_makes_them(predictor: str | None, copied: tuple[Case, Path]) -> None:
    with pytest.raises(ConfigError, match=r"no weights.*expertly lab train TRACE --out FILE.*--predictor FILE"):
        expertly.load(str(copied[1]), system=SYSTEM, memory="50%", predictor=predictor, device="cpu")


def test_auto_is_beside_the_store_and_off_is_not(copied: tuple[Case, Path]) -> None:
    case, store = copied
    put_beside(store, HIDDEN_SIZE)
    with loaded(store, system=SYSTEM) as model:
        assert generate(model, case.prompts) == case.tokens
        assert decode_of(model)["predicted"] > 0
    with pytest.raises(ConfigError, match="no weights"):
        expertly.load(str(store), system=SYSTEM, memory="50%", predictor="off", device="cpu")
    expertly.unload(expertly.load(str(store), system="lru", memory="50%", device="cpu")[0])


def test_a_file_of_another_model_or_none_is_named(copied: tuple[Case, Path], tmp_path: Path) -> None:
    _, store = copied
    path = tmp_path / "other"
    save_learned(path, random_weights(Manifest.read(store).layers, HIDDEN_SIZE), "b" * 64, {})
    wrong: list[tuple[str, type[Exception], str]] = [
        (str(path), StoreError, "identity='bbb.*of another model"),
        (str(tmp_path / "missing"), ConfigError, "no such file.*lab train"),
        (str(tmp_path), ConfigError, "no such file"),
        (3, ConfigError, "no such file"),  # type: ignore[list-item]
    ]
    for predictor, kind, named in wrong:
        with pytest.raises(kind, match=named):
            expertly.load(str(store), system=SYSTEM, memory="50%", predictor=predictor, device="cpu")
    shutil.copy(path, learned_beside(store, "predictor"))
    with pytest.raises(StoreError, match=r"store\.predictor: identity"):
        expertly.load(str(store), system=SYSTEM, memory="50%", device="cpu")


def test_a_system_that_takes_none_refuses_a_file(copied: tuple[Case, Path]) -> None:
    path = put_beside(copied[1], HIDDEN_SIZE)
    with pytest.raises(ConfigError, match=r"predictor=.*system 'lru' takes no trained weights; accepted: auto, off"):
        expertly.load(str(copied[1]), system="lru", memory="50%", predictor=path, device="cpu")


def test_weights_for_other_router_inputs_or_distances_are_refused(copied: tuple[Case, Path], tmp_path: Path) -> None:
    _, store = copied
    manifest = Manifest.read(store)
    path = tmp_path / "weights"
    save_learned(path, random_weights(manifest.layers, HIDDEN_SIZE + 1), manifest.identity, {})
    named = f"router inputs of {HIDDEN_SIZE + 1} numbers; this model's have {HIDDEN_SIZE}"
    with pytest.raises(ConfigError, match=named):
        expertly.load(str(store), system=SYSTEM, memory="50%", predictor=path, device="cpu")
    weights = random_weights(manifest.layers, HIDDEN_SIZE)
    mlps = {pair: mlp for pair, mlp in weights.mlps.items() if pair[1] - pair[0] == 1}
    few = type(weights)(weights.shape, weights.starts, (1,), mlps)
    save_learned(path, few, manifest.identity, {})
    with pytest.raises(ConfigError, match="distance=2: its weights are not of that; accepted with them: 1"):
        expertly.load(str(store), system="promoe:distance=2", memory="50%", predictor=path, device="cpu")


def test_what_a_model_was_trained_on_predicts_it_better_than_counts(copied: tuple[Case, Path], tmp_path: Path) -> None:
    """Recorded, trained and run: not a token changes, and more of what is named is needed than of what a request has
    asked for most.
    """
    case, store = copied
    with loaded(store, system="lru", memory="100%") as model, record(model, tmp_path / "trace", full=True) as recorder:
        for request in range(24):
            recorder.begin_request(num_prompt_tokens=8)
            feed(model, request)
    options = TrainOptions((1,), hidden=32, epochs=14, batch=32, learning_rate=5e-3)
    result = study(Trace.open(tmp_path / "trace"), (7, 3), options)
    path = tmp_path / "weights"
    save_learned(path, result.trained.weights, Manifest.read(store).identity, {})
    rates = {}
    for system, more in ((SYSTEM, {"predictor": path}), ("lru:prediction=counts:distance=1", {})):
        with loaded(store, system=system, memory="50%", **more) as model:
            assert generate(model, case.prompts) == case.tokens
            feed(model, 99)
            feed(model, 98)
            rates[system] = decode_of(model)["prediction_accuracy"]
    assert rates[SYSTEM] > 0.6 and rates[SYSTEM] > rates["lru:prediction=counts:distance=1"] + 0.05, rates


def test_the_demo_models_weights_ship_with_it() -> None:
    file = read_learned(demo_predictor(), LearnedWeights)
    assert file.learned.distances == (1, 2, 4, 8) and demo_predictor().stat().st_size < 3_000_000
    for distance, row in file.about["mean"].items():
        assert row["layers"] == 11 and row["learned"] > max(row["lookahead"], row["token_id"]) + 0.05, distance
    model, tokenizer = expertly.load(system="promoe", memory="25%", device="cpu")
    try:
        ids = tokenizer("Once upon a time there was", return_tensors="pt")["input_ids"]
        model.generate(ids, max_new_tokens=12, do_sample=False)
        assert decode_of(model)["prediction_accuracy"] > 0.7
    finally:
        expertly.unload(model)
