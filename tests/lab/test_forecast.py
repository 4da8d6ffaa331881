"""What a model would need and how fast it would be, from config and headers; the range holds what was simulated."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from expertly.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from expertly.core.geometry import Geometry
from expertly.data import demo_folder
from expertly.formats import expert_format
from expertly.hardware import simulated
from expertly.lab import forecast as module
from expertly.lab.forecast import ModelForecast, forecast
from expertly.lab.synth import SynthWorkload, write_workload
from expertly.model.needs import ModelNeeds, needs_of
from expertly.model.packing import pack
from expertly.sim.compute import compute_model
from expertly.sim.hardware import ClusterNetwork, Hardware
from expertly.trace.reader import Trace
from tests.hardware.test_profile import PROFILE

GIB = 1 << 30
LAPTOP = Hardware.read("laptop-nvme")


@pytest.fixture(scope="module")
def needs() -> ModelNeeds:
    return needs_of(None)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not matter how fast a model would be, few tokens are simulated."""
    monkeypatch.setattr(module, "_REQUEST_TOKENS", 4)


def of(needs: ModelNeeds, free: int = 16 * GIB) -> ModelForecast:
    return forecast(needs, replace(PROFILE, devices=()), LAPTOP, free)


@pytest.mark.parametrize("beside_ns", [500_000, 5_000_000])
def test_what_a_step_takes_beside_its_weights_is_measured(beside_ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short that is: nothing is assumed of calls and steps."""
    monkeypatch.setattr(simulated, "_EACH_S", 0.01)
    needs, bare = needs_of(None), replace(PROFILE, devices=())
    free = replace(simulated.machine_hardware(bare), launch_ns=0, layer_ns=0, iteration_ns=0)

    def step_ns(hardware: Hardware) -> int:
        geometry = Geometry(needs.layers)
        compute, layers = compute_model(hardware, geometry, needs.dense), range(geometry.num_layers)
        spans_ns = sum(geometry.layers[layer].top_k * compute.span_ns(layer, 1, 1) for layer in layers)
        return spans_ns + sum(compute.dense_ns(layer, 1) for layer in layers) + compute.head_ns(1)

    taken_ns = step_ns(free) + beside_ns
    ends = [num * taken_ns for num in (0, 1, 1 + module._CALIBRATION_TOKENS, 1, 1 + module._CALIBRATION_TOKENS)]
    moments = iter([moment for end in ends for moment in (0, end)])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter_ns=lambda: next(moments)))
    monkeypatch.setattr(simulated, "measure_flops", lambda *_: free.flops_per_s)
    assert step_ns(module.measured_hardware(bare)) == pytest.approx(taken_ns, rel=1e-3)


@pytest.mark.usefixtures("soon")
def test_sizes_are_those_of_the_store_that_packing_makes(needs: ModelNeeds, tmp_path: Path) -> None:
    store = pack(demo_folder(), tmp_path / "store", codec="none")
    assert (needs.dense_nbytes, needs.experts_nbytes) == (store.dense_nbytes, store.experts_nbytes)
    assert needs.stored is not None and needs.stored.dtypes == {"BF16": needs.stored.nbytes}
    assert needs.stored.experts_nbytes == store.experts_nbytes
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
    with pytest.raises(CheckpointError, match="no such folder"):
        needs_of(str(tmp_path / "nowhere"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(CheckpointError, match="num_hidden_layers=1000000000: accepted without weights: at most 1024"):
        needs_of(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match="not a Mixture-of-Experts model"):
        needs_of(str(tmp_path))


@pytest.mark.usefixtures("soon")
def test_a_quantisation_that_packing_cannot_undo_is_sized_and_said(tmp_path: Path) -> None:
    shutil.copytree(demo_folder(), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "hqq"}}))
    found = of(needs_of(str(tmp_path / "model")))
    assert found.needs.refused is not None and "'hqq': packing cannot undo it" in found.command
    assert found.own_nbytes == 46_086_144 and found.experts_nbytes == 37_748_736


def test_more_memory_hits_more_and_is_faster(needs: ModelNeeds) -> None:
    found = of(needs)
    assert [one.share for one in found.speeds] == [0.05, 0.1, 0.25, 0.5, 0.75, 1.0]
    for less, more in zip(found.speeds, found.speeds[1:], strict=False):
        assert all(a < b for a, b in zip(less.tokens_per_s, more.tokens_per_s, strict=True))
        assert all(a < b for a, b in zip(less.hit_rate, more.hit_rate, strict=True))
    quarter = found.speeds[2]
    assert 0.40 < quarter.hit_rate[0] < 0.50 < 0.60 < quarter.hit_rate[1] < 0.68, "as real models do"
    assert found.fitting_share == 1.0 and all(one.fits for one in found.speeds)
    assert found.command == "expertly run demo"


@pytest.mark.usefixtures("soon")
def test_experts_in_a_format_are_as_fast_as_it_is_decoded(needs: ModelNeeds, monkeypatch: pytest.MonkeyPatch) -> None:
    q8_0 = expert_format("q8_0")
    quantised = replace(needs, dtype="float32", layers=tuple(map(q8_0.geometry, needs.layers)))
    monkeypatch.setattr(module, "measure_experts_rate", lambda layer, *_: 1e9 if layer == quantised.layers[0] else None)
    monkeypatch.setattr(simulated, "_EACH_S", 0.01)
    monkeypatch.setattr(module, "_CALIBRATION_TOKENS", 2)
    bare = replace(PROFILE, devices=())
    assert module.measured_hardware(bare, None, needs).format_nbytes_per_s is None
    rate = module.measured_hardware(bare, None, quantised).format_nbytes_per_s
    for one, slower in ((needs, False), (quantised, True)):
        usual, decoded = (
            forecast(one, bare, replace(LAPTOP, format_nbytes_per_s=some), 16 * GIB) for some in (None, rate)
        )
        assert (decoded.speeds[-1].tokens_per_s[1] < usual.speeds[-1].tokens_per_s[0]) == slower
        assert "experts in their format 1.00 GB/s, measured" in decoded.decided_by


@pytest.mark.usefixtures("soon")
def test_what_does_not_fit_is_said(needs: ModelNeeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "rss_nbytes", lambda: 300 << 20)
    everything = 300 << 20
    tight = of(needs, everything + (143 << 20))
    assert 0.3 < tight.fitting_share < 0.9
    assert {one.share for one in tight.speeds if one.fits} >= {0.05, tight.fitting_share}
    assert not tight.speeds[-1].fits and len(tight.speeds) == 7
    nothing = of(needs, everything)
    assert nothing.fitting_share == 0 and nothing.command.startswith("none here")
    assert nothing.decided_by.startswith("nothing fits")


@pytest.mark.usefixtures("soon")
def test_workers_hold_what_does_not_fit(needs: ModelNeeds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has as much memory as this machine, and neither the dense part nor a KV cache."""
    monkeypatch.setattr(module, "rss_nbytes", lambda: 300 << 20)
    networks = [
        ClusterNetwork("infinite", float("inf"), 0, 0),
        ClusterNetwork.read("10GbE"),
        ClusterNetwork.read("1GbE"),
    ]
    free, asked = (300 + 143) << 20, [(num, network) for num in (1, 3) for network in networks]
    found = forecast(needs, replace(PROFILE, devices=()), LAPTOP, free, workers=asked)
    alone = next(one for one in reversed(found.speeds) if one.fits)
    assert alone.share < 0.9 and alone.network_time == (0, 0) and alone.num_workers == 0
    assert [(one.num_workers, one.network) for one in found.with_workers] == [(num, one.name) for num, one in asked]
    for infinite, *others in (found.with_workers[:3], found.with_workers[3:]):
        assert infinite.memory_nbytes <= alone.memory_nbytes and infinite.memory_nbytes <= infinite.worker_nbytes
        assert infinite.tokens_per_s > alone.tokens_per_s and infinite.hit_rate > alone.hit_rate
        assert infinite.share > alone.share and infinite.network_time == (0, 0)
        for faster, slower in zip((infinite, *others), others, strict=False):
            assert faster.tokens_per_s > slower.tokens_per_s and faster.network_time < slower.network_time
            assert slower.hit_rate == infinite.hit_rate, "the network decides nothing"
    assert found.with_workers[3].share == 1.0 and found.with_workers[3].hit_rate == (1, 1)
    little = forecast(needs, replace(PROFILE, devices=()), LAPTOP, free - (8 << 20), workers=asked[:1])
    (one,) = little.with_workers
    assert one.memory_nbytes < needs.experts_nbytes / 3
    assert one.share > 0.99, "the worker has more, and gets more, to about an expert"
    with pytest.raises(ConfigError, match="they compute on CPUs, and this machine on cuda:0"):
        forecast(needs, PROFILE, LAPTOP, free, workers=asked)


@pytest.mark.parametrize(
    ("free_nbytes", "command"),
    [(400, "expertly run big"), (250, "expertly pack big --stream"), (100, "make room on the disk")],
)
def test_the_next_command_looks_at_the_disk(needs: ModelNeeds, free_nbytes: int, command: str) -> None:
    assert needs.stored is not None
    size = needs.dense_nbytes + needs.experts_nbytes
    stored = replace(needs.stored, nbytes=size * 2, largest_file_nbytes=size // 4, is_here=False)
    big = replace(needs, name="big", stored=stored)
    found = module._command(big, size, stored.nbytes, size * free_nbytes // 100, True)
    assert found.startswith(command)


@pytest.mark.usefixtures("soon")
def test_recorded_routing_in_place_of_made_up(needs: ModelNeeds, tmp_path: Path) -> None:
    """Experts 0 to K - 1 are always chosen together, or K to 2 K - 1, and so on. There is memory for all of them on
    each machine: the hash puts some of them on one machine, and the trace apart.
    """
    layers, top_k = needs.layers, needs.layers[0].top_k
    tokens = np.arange(240)[:, None] % (layers[0].num_experts // top_k) * top_k + np.arange(top_k)
    chosen = np.repeat(tokens[:, None], len(layers), axis=1).astype(np.uint16)
    made = SynthWorkload(len(layers), layers[0].num_experts, top_k, len(tokens), lambda: iter([chosen]))
    write_workload(tmp_path / "trace", made, model=needs.name, num_requests=8)
    trace, workers = Trace.open(tmp_path / "trace"), [(3, ClusterNetwork("infinite", float("inf"), 0, 0))]
    found = forecast(needs, replace(PROFILE, devices=()), LAPTOP, 16 * GIB, workers=workers, trace=trace)
    by_hash, by_trace = found.with_workers
    assert [one.is_measured for one in found.with_workers] == [False, True]
    assert by_trace.tokens_per_s > by_hash.tokens_per_s and by_trace.hit_rate == by_hash.hit_rate == (1, 1)
    assert by_trace.tokens_per_s[1] == pytest.approx(by_trace.tokens_per_s[0] * module.MACHINE_ERROR**2), "one routing"
