"""The machine as the simulator wants it, measured with a model of which all, hardly any or some experts stay."""

from __future__ import annotations

from pathlib import Path

import pytest

import expertly
from expertly import api
from expertly.core.costs import CodecCosts, Link
from expertly.lab.tune import measuring
from expertly.lab.tune.engine import measure_hardware
from expertly.sim.hardware import Hardware
from tests.families import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny", seed=12)


def measured(model: Path, memory: str, codec: str = "none", other: str = "50%") -> tuple[Hardware, str]:
    def load(memory: str):
        return expertly.load(str(model), memory=memory, codec=codec, device="cpu")[0]

    loaded = load(memory)
    store = api.handle(loaded).store
    try:
        return measure_hardware(loaded, lambda: load(other), {codec: store}, 0.1, lambda: Hardware.read("laptop-nvme"))
    finally:
        expertly.unload(loaded)


@pytest.mark.parametrize("memory", ["50%", "100%"])
def test_the_model_s_own_times_are_what_counts(model: Path, memory: str) -> None:
    hardware, about = measured(model, memory)
    assert hardware.compute is not None and hardware.compute.expert_ns[0] > 0
    assert 0 < hardware.link.nbytes_per_s < float("inf") and "measured here" in about


def test_a_compressed_store_has_the_rate_of_its_disk(model: Path) -> None:
    hardware, _ = measured(model, "50%", codec="planes")
    assert hardware.codec is not None and 0 < hardware.codec.ratio < 2
    assert 0 < hardware.link.nbytes_per_s < float("inf")


def test_decoding_is_as_fast_as_layers_show_and_not_as_it_is_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, alone = Link(3e9, 7, 0), CodecCosts(0.7, 1e12, 2)
    monkeypatch.setattr(measuring, "store_costs", lambda store: (disk, alone))
    hardware, _ = measured(model, "50%", codec="planes")
    assert hardware.link == disk and hardware.codec is not None
    assert 0 < hardware.codec.decode_nbytes_per_s < 0.9e12 and hardware.codec.ratio == 0.7


def test_where_they_cannot_be_measured_the_machine_is(model: Path) -> None:
    hardware, about = measured(model, "100%", other="100%")
    assert hardware.compute is None and "cannot be measured: memory=" in about
    assert hardware.link == Hardware.read("laptop-nvme").link
