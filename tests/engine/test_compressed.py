"""Models whose experts are stored compressed, and stay so in a part of the memory: tokens, counts, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly import api
from expertly.api import handle
from expertly.core.codecs import CodecChoice
from expertly.core.costs import CodecCosts
from expertly.core.errors import BudgetError, ConfigError, TransferError
from expertly.core.placement import Placement
from expertly.engine import division
from expertly.engine.backend_tiered import TieredBackend
from expertly.engine.division import Division, Request, divide
from expertly.model.packing import pack
from expertly.scheduler.presets import get_system
from expertly.store.frames import planes_name
from expertly.store.packed import PackedStore
from expertly.store.reader import ExpertFile
from tests.engine.conftest import Case, Cases
from tests.engine.failing import FailOnce, interrupt_at_lines
from tests.engine.observe import loaded, prediction
from tests.engine.test_tiered import LateStreams
from tests.families import HIDDEN_SIZE, generate
from tests.weights import put_beside

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="session")
def planes(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return compressed_case(cases["qwen3_moe"], tmp_path_factory.mktemp("planes") / "store")


@pytest.fixture
def own_planes(cases: Cases, tmp_path: Path) -> Case:
    """One that may be damaged."""
    return compressed_case(cases["qwen3_moe"], tmp_path / "store")


def compressed_case(case: Case, store: Path) -> Case:
    pack(case.folder, store, codec="planes")
    put_beside(store, HIDDEN_SIZE)
    found = object.__new__(Case)
    found.__dict__.update(case.__dict__ | {"store": store})
    return found


def stats_of(model: Any) -> dict[str, Any]:
    return expertly.stats(model).as_dict()


# -- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [0, "50%"])
@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("system", ["lru", "fmoe", "moepic", "promoe", "moe-infinity"])
def test_tokens_are_the_reference(system: str, segments: int, compressed: str | int, planes: Case) -> None:
    with loaded(planes.store, system=system, segments=segments, compressed=compressed, memory="50%") as model:
        for _ in range(2):
            assert generate(model, planes.prompts) == planes.tokens
        stats = stats_of(model)
        assert stats["codec"]["name"] == "planes" and stats["codec"]["ratio"] < 1
        assert stats["bytes_decoded"] > 0 and stats["decode_s"] > 0
        if system == "lru":  # others may be loading ahead still
            assert stats["bytes_decoded"] >= stats["bytes_loaded"] > 0
        assert (stats["bytes_compressed_hit"] > 0) == (stats["compressed_bytes"] > 0) == bool(compressed)
        if system == "fmoe":
            assert prediction(model)["failed"] is None


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_the_same_bits(family: str, dtype: str, cases: Cases, tmp_path: Path) -> None:
    """Whatever the model: logits are those of the store that is not compressed, to the bit."""
    case, logits = cases[family], []
    for codec in ("none", "planes"):
        pack(case.folder, tmp_path / codec, dtype, codec=codec)
        share = "40%" if codec == "planes" else 0
        with loaded(tmp_path / codec, memory="60%", compressed=share) as model, torch.no_grad():
            logits.append(model(torch.tensor(case.prompts[:1])).logits)
    assert torch.equal(*logits)


def test_several_devices_have_each_its_share(planes: Case) -> None:
    devices = "cpu:0,cpu:1"
    with loaded(planes.store, devices=devices, memory="75%", compressed="40%") as model:
        for _ in range(2):
            assert generate(model, planes.prompts) == planes.tokens
        stats = stats_of(model)
        shares = [one["compressed_bytes"] for one in stats["devices"]]
        assert min(shares) > 0 and sum(shares) == stats["compressed_bytes"]
        assert all(one["bytes_compressed_hit"] > 0 for one in stats["devices"])
        assert stats["memory_bytes"] <= 0.75 * stats["expert_bytes"]


@pytest.mark.parametrize("segments", [1, 4])
def test_behind_an_accelerator_host_memory_is_divided(
    segments: int, planes: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[TieredBackend] = []

    def make_backend(device: Any, store: Any, geometry: Any, slots: Any, dtype: Any, *host: Any) -> TieredBackend:
        half = geometry.nbytes // 2
        made.append(TieredBackend(device, LateStreams(), store, geometry, slots, dtype, half, compressed_nbytes=half))
        return made[0]

    monkeypatch.setattr(api, "make_backend", make_backend)
    with loaded(planes.store, memory="50%", segments=segments) as model:
        for _ in range(2):
            assert generate(model, planes.prompts) == planes.tokens
        moved = made[0].stats()
        assert moved["compressed_hit_nbytes"] > 0 and moved["host_hit_nbytes"] > 0
        assert moved["decoded_nbytes"] + moved["host_hit_nbytes"] >= moved["copied_nbytes"]
        made[0].tier.check()


# -- memory ----------------------------------------------------------------------------------------------------------


def test_both_parts_are_the_memory_and_a_tier_for_everything_reads_it_once(planes: Case) -> None:
    """Experts as tiny as these take whole pages in memory."""
    with loaded(planes.store, memory="300%", compressed="90%") as model:
        for _ in range(2):
            assert generate(model, planes.prompts) == planes.tokens
        before = stats_of(model)
        assert generate(model, planes.prompts) == planes.tokens
        after = stats_of(model)
        assert after["bytes_loaded"] > before["bytes_loaded"], "slots hold a few experts only"
        assert after["bytes_disk"] == before["bytes_disk"]
        hits = after["bytes_compressed_hit"] - before["bytes_compressed_hit"]
        assert hits == after["bytes_loaded"] - before["bytes_loaded"]
        assert after["memory_bytes"] == sum(after[f"{part}_bytes"] for part in ("kept", "ring", "compressed"))
        assert after["memory_bytes"] <= 3 * after["expert_bytes"]
        assert after["compressed"]["share"] == 0.9


def test_behind_an_accelerator_it_is_a_share_of_host_memory(planes: Case) -> None:
    store, cuda = PackedStore.open(planes.store), torch.device("cuda")
    geometry = store.geometry()

    def of(compressed: str | float, targets: int = 1) -> Division:
        request = Request(memory="50%", host_memory="80%", compressed=compressed)
        geometries = [geometry] if targets == 1 else [share.geometry for share in Placement(geometry, targets).shares]
        return divide(store, geometries, get_system("lru"), request, [cuda] * targets)

    total = geometry.nbytes * 8 // 10
    for targets in (1, 2):
        found = of("25%", targets)
        assert found.budgets == of(0, targets).budgets, "slots on the device are as many"
        assert sum(found.compressed_nbytes) == pytest.approx(total // 4, abs=2)
        assert found.host_memory == pytest.approx(total - total // 4, abs=2)
    assert of(0).host_memory == "80%" and of(0).compressed_nbytes == [0]


@pytest.mark.parametrize("value", ["much", "-5%", "100%", 1.0, "nan", ""])
def test_a_share_that_is_none(value: str | float, planes: Case) -> None:
    with pytest.raises(ConfigError, match=r"compressed=.*accepted are a share of the memory"):
        expertly.load(str(planes.store), device="cpu", compressed=value)


def test_where_nothing_can_stay_compressed(cases: Cases, planes: Case) -> None:
    with pytest.raises(ConfigError, match="compressed='30%': the packed store is in codec none"):
        expertly.load(str(cases["qwen3_moe"].store), memory="50%", device="cpu", compressed="30%")
    with pytest.raises(ConfigError, match="compressed='30%': system 'resident' keeps all experts"):
        expertly.load(str(planes.store), system="resident", device="cpu", compressed="30%")
    with pytest.raises(BudgetError, match=r"below the ring.*\d+ bytes are for compressed experts"):
        expertly.load(str(planes.store), memory="20%", device="cpu", compressed="90%")
    with pytest.raises(BudgetError, match="hold no segment"):
        expertly.load(str(planes.store), memory="50%", device="cpu", compressed=0.001)


def test_resident_keeps_compressed_experts_as_they_are_computed_with(planes: Case) -> None:
    with loaded(planes.store, system="resident", memory="100%") as model:
        assert generate(model, planes.prompts) == planes.tokens
        stats = stats_of(model)
        assert stats["bytes_decoded"] == stats["expert_bytes"] and stats["compressed"]["share"] == 0


class Machine:
    """A disk and a decoder of stated speed."""

    def __init__(self, disk: float, decoding: float, monkeypatch: pytest.MonkeyPatch) -> None:
        costs = CodecCosts(0.7, decoding, 2)
        monkeypatch.setattr(division, "best_costs", lambda store: (disk, costs))
        monkeypatch.setattr(division, "too_small", lambda nbytes: None)


def test_auto_keeps_copies_where_the_disk_is_slow(planes: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(1e7, 1e9, monkeypatch)
    with loaded(planes.store, memory="75%") as model:
        assert generate(model, planes.prompts) == planes.tokens
        stats = stats_of(model)
        assert (
            0 < stats["compressed"]["share"] < 1
            and "copies in memory are expected to save" in stats["compressed"]["why"]
        )
        assert 0 < stats["compressed_bytes"] <= stats["compressed"]["share"] * 0.75 * stats["expert_bytes"]


@pytest.mark.parametrize("memory", ["75%", "100%"])
def test_auto_keeps_none_where_it_would_not_pay(memory: str, planes: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(1e10, 1e8, monkeypatch)
    with loaded(planes.store, memory=memory) as model:
        stats = stats_of(model)
        assert stats["compressed"]["share"] == stats["compressed_bytes"] == 0 and stats["compressed"]["why"]


def test_auto_measures_the_store(planes: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "too_small", lambda nbytes: None)
    with loaded(planes.store, memory="50%") as model:
        assert "reading brings" in stats_of(model)["compressed"]["why"]


# -- the codec -------------------------------------------------------------------------------------------------------


def test_load_packs_as_it_is_told(cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["mixtral"]
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path))
    for codec in ("planes", "none", "planes"):
        with loaded(case.folder, codec=codec) as model:
            stats = stats_of(model)
            assert stats["codec"]["name"] == codec and stats["codec"]["why"] == "it was asked for"
            assert (stats["bytes_decoded"] > 0) == (stats["bytes_loaded"] > 0 and codec == "planes")
            assert handle(model).store.folder.name.endswith("-planes") == (codec == "planes")
    monkeypatch.setattr("expertly.model.packing._choose", lambda *args: CodecChoice("planes", "it is the faster one"))
    with loaded(case.folder) as model:
        assert stats_of(model)["codec"] | {"ratio": 0} == {"name": "planes", "why": "it is the faster one", "ratio": 0}


def test_a_codec_that_is_none_and_one_that_the_store_is_not_in(planes: Case) -> None:
    with pytest.raises(ConfigError, match="codec='zip': unknown; accepted: none, planes, auto"):
        expertly.load(str(planes.store), device="cpu", codec="zip")
    with pytest.raises(ConfigError, match=r"codec='none': the packed store .* is in planes"):
        expertly.load(str(planes.store), device="cpu", codec="none")


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [0, "60%"])
def test_damage_fails_the_request_and_the_next_one_works(compressed: str | int, own_planes: Case) -> None:
    case = own_planes
    path = case.store / planes_name(1)
    whole = path.read_bytes()
    with loaded(case.store, memory="75%", compressed=compressed, system="on-demand") as model:
        path.write_bytes(bytes(byte ^ 255 for byte in whole))
        for _ in range(2):
            with pytest.raises(TransferError, match=rf"{path.name}: frame 0 of expert \d: checksum"):
                generate(model, case.prompts)
            handle(model).engine.scheduler.check()
        path.write_bytes(whole)
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens


@pytest.mark.parametrize("at", [1, 7, 20])
def test_a_read_that_fails_once(at: int, planes: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(planes.store, memory="75%", compressed="60%", segments=4) as model:
        fail = FailOnce(at)
        monkeypatch.setattr(ExpertFile, "read_into", lambda *args: fail(*args))
        with pytest.raises(TransferError):
            generate(model, planes.prompts)
        for _ in range(2):
            assert generate(model, planes.prompts) == planes.tokens


def test_an_interrupt_at_any_line_leaves_a_model_that_works_or_says_that_it_cannot(planes: Case) -> None:
    def check(model: Any) -> None:
        assert stats_of(model)["bytes_compressed_hit"] > 0

    interrupt_at_lines(planes, range(5, 6000, 409), check, memory="75%", compressed="50%", segments=4)
