"""What a model would need and how fast it would be, from config and headers; the range holds what was simulated."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.data import demo_folder
from expertly.engine import fitting
from expertly.formats import expert_format
from expertly.hardware import forecast as module
from expertly.hardware.forecast import ModelForecast, Speed, forecast
from expertly.model.needs import ModelNeeds, needs_of
from expertly.model.packing import pack
from tests.hardware.test_profile import PROFILE

GIB = 1 << 30
FREE = 16 * GIB
BARE = replace(PROFILE, devices=())
LAPTOP = Speed(3e10, 3e10, 200_000, 3e9, 100_000, None, None)


@pytest.fixture(scope="module")
def needs() -> ModelNeeds:
    return needs_of(None)


def of(needs: ModelNeeds, free: int = FREE) -> ModelForecast:
    return forecast(needs, BARE, LAPTOP, free)


def test_what_a_step_takes_beside_its_weights_is_measured(needs: ModelNeeds, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short that is: nothing is assumed of calls and steps."""
    demo, tokens, beside_ns = needs, module._CALIBRATION_TOKENS, 500_000
    nbytes = demo.dense_nbytes + sum(layer.top_k * layer.expert_nbytes for layer in demo.layers)
    taken_ns = round(nbytes / BARE.weights_nbytes_per_s * 1e9) + beside_ns
    moments = iter([moment for num in (0, 1, 1 + tokens, 1, 1 + tokens) for moment in (0, num * taken_ns)])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter_ns=lambda: next(moments)))
    measured = module.measured_speed(BARE, demo)
    assert measured.layer_ns * len(demo.layers) == pytest.approx(beside_ns, rel=1e-3)
    assert (measured.link_nbytes_per_s, measured.disk_nbytes_per_s) == (BARE.storage.nbytes_per_s, None)


def test_sizes_are_those_of_the_store_that_packing_makes(needs: ModelNeeds, tmp_path: Path) -> None:
    store = pack(demo_folder(), tmp_path / "store")
    assert (needs.dense_nbytes, needs.experts_nbytes) == (store.dense_nbytes, store.experts_nbytes)
    of_store = needs_of(str(tmp_path / "store"))
    assert (of_store.layers, of_store.dense, of_store.dense_nbytes) == (needs.layers, needs.dense, needs.dense_nbytes)
    assert of_store.is_packed and of(of_store).disk_nbytes == 0
    assert list(of(needs).cache_nbytes) == [1024], "contexts that the model has"


def test_a_config_alone_says_as_much(needs: ModelNeeds, tmp_path: Path) -> None:
    shutil.copy(demo_folder() / "config.json", tmp_path)
    for model in (tmp_path, tmp_path / "config.json"):
        alone = needs_of(str(model))
        assert (alone.layers, alone.dense, alone.stored) == (needs.layers, needs.dense, None)
        assert alone.dense_nbytes == needs.dense_nbytes


@pytest.mark.parametrize(
    ("config", "kept", "failure", "said"),
    [
        ({"num_hidden_layers": 10**9}, "config.json", CheckpointError, "=1000000000: accepted without weights"),
        ({"quantization_config": {"quant_method": "hqq"}}, "*", UnsupportedModelError, "'hqq': .*cannot undo it"),
        ({}, "nothing", CheckpointError, "no such folder"),
    ],
)
def test_what_is_no_model_for_us_is_refused(
    config: dict[str, Any], kept: str, failure: type[Exception], said: str, tmp_path: Path
) -> None:
    for file in demo_folder().glob(kept):
        (tmp_path / "model").mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / "model")
    if (path := tmp_path / "model" / "config.json").exists():
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(failure, match=said):
        needs_of(str(tmp_path / "model"))


def test_more_memory_hits_more_and_is_faster(needs: ModelNeeds) -> None:
    result = of(needs)
    assert [speed.share for speed in result.speeds] == [0.05, 0.1, 0.25, 0.5, 0.75, 1.0]
    for less, more in zip(result.speeds, result.speeds[1:], strict=False):
        assert all(a < b for a, b in zip(less.tokens_per_s, more.tokens_per_s, strict=True))
        assert all(a < b for a, b in zip(less.hit_rate, more.hit_rate, strict=True))
    quarter = result.speeds[2]
    assert quarter.hit_rate == (0.476, 0.617), "of a family that was not recorded: from the worst to the best of all"
    assert result.fitting_share == 1.0 and all(speed.fits for speed in result.speeds)
    assert result.command == "expertly run demo"


def test_experts_in_a_format_are_as_fast_as_it_is_decoded(needs: ModelNeeds, monkeypatch: pytest.MonkeyPatch) -> None:
    q8_0 = expert_format("q8_0")
    quantised = replace(needs, dtype="float32", layers=tuple(map(q8_0.geometry, needs.layers)))
    monkeypatch.setattr(module, "measure_experts_rate", lambda layer, *_: 1e8 if layer == quantised.layers[0] else None)
    monkeypatch.setattr(module, "_CALIBRATION_TOKENS", 2)
    assert module.measured_speed(BARE, needs).experts_nbytes_per_s == BARE.weights_nbytes_per_s
    rate = module.measured_speed(BARE, quantised).experts_nbytes_per_s
    assert rate == 1e8
    usual, decoded = (
        forecast(quantised, BARE, replace(LAPTOP, experts_nbytes_per_s=some), FREE) for some in (3e10, rate)
    )
    assert decoded.speeds[-1].tokens_per_s[1] < usual.speeds[-1].tokens_per_s[0]


def test_a_token_takes_what_the_roofline_says(needs: ModelNeeds) -> None:
    """Computed by hand: weights at their rate, layers, and the experts that a recorded cache lacks from the disk."""
    speed = Speed(1e10, 5e9, 1_000_000, 1e9, 100_000, None, None)
    speeds = forecast(replace(needs, model_type="gpt_oss"), BARE, speed, FREE).speeds
    (half,) = (expected for expected in speeds if expected.share == 0.5)
    layer, num = needs.layers[0], len(needs.layers)
    experts = num * layer.top_k * layer.expert_nbytes
    dense = num * needs.dense.layer_nbytes + needs.dense.head_nbytes
    missing = 1 - half.hit_rate[0]
    seconds = dense / 1e10 + experts / 5e9 + num * 1e-3 + missing * experts / 1e9
    seconds += num * min(1.0, layer.top_k * missing) * 1e-4
    assert half.tokens_per_s == pytest.approx((1 / seconds / 1.25, 1.25 / seconds))
    assert half.hit_rate[0] == half.hit_rate[1] == 0.887, "one curve of that family"


def test_behind_an_accelerator_what_the_host_lacks_comes_from_the_disk(needs: ModelNeeds) -> None:
    speed = Speed(1e12, 1e12, 100_000, 2e10, 20_000, 1e9, needs.experts_nbytes)
    all_in_host, half = (forecast(needs, PROFILE, each, FREE) for each in (speed, replace(speed, host_nbytes=1 << 24)))
    for fast, slow in list(zip(all_in_host.speeds, half.speeds, strict=True))[:3]:
        assert slow.tokens_per_s < fast.tokens_per_s and slow.hit_rate == fast.hit_rate
    assert half.speeds[-1].tokens_per_s == all_in_host.speeds[-1].tokens_per_s


def test_what_does_not_fit_is_said(needs: ModelNeeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "rss_nbytes", lambda: 300 << 20)
    everything = 300 << 20
    tight = of(needs, everything + (143 << 20))
    assert 0.3 < tight.fitting_share < 0.9
    assert {speed.share for speed in tight.speeds if speed.fits} >= {0.05, tight.fitting_share}
    assert not tight.speeds[-1].fits and len(tight.speeds) == 7
    nothing = of(needs, everything)
    assert nothing.fitting_share == 0 and nothing.command.startswith("none here")
