"""Models whose experts are stored compressed: tokens, counts, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.errors import TransferError
from expertly.model.packing import pack
from expertly.store.codec_choice import CodecChoice
from expertly.store.frames import planes_name
from tests.engine.conftest import Case, Cases
from tests.engine.observe import loaded, prediction
from tests.engine.streams import put_in_place
from tests.families import generate

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def own_planes(cases: Cases, tmp_path: Path) -> Case:
    """One that may be damaged."""
    return cases["qwen3_moe"].compressed(tmp_path / "store")


def stats_of(model: Any) -> dict[str, Any]:
    return expertly.stats(model).as_dict()


# -- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "segments", "where"),
    [
        *((system, segments, {"memory": "50%"}) for system, segments in (("lru", 1), ("fmoe", 4), ("moepic", 4))),
        ("resident", 1, {"memory": "100%"}),
        ("lru", 1, {"memory": "75%", "devices": "cpu:0,cpu:1"}),
    ],
    ids=str,
)
def test_tokens_are_the_reference(system: str, segments: int, where: dict[str, str], planes: Case) -> None:
    with loaded(planes.store, system=system, segments=segments, **where) as model:
        for _ in range(2):
            assert generate(model, planes.prompts) == planes.tokens
        stats = stats_of(model)
        assert stats["codec"]["name"] == "planes" and stats["codec"]["ratio"] < 1
        assert stats["bytes_decoded"] > 0 and stats["decode_s"] > 0
        assert all(one["bytes_decoded"] > 0 for one in stats["devices"])
        assert system != "resident" or stats["bytes_decoded"] == stats["expert_bytes"], "once"
        if system == "lru":  # others may still be prefetching
            assert stats["bytes_decoded"] >= stats["bytes_loaded"] > 0
        if system == "fmoe":
            assert prediction(model)["failed"] is None


@pytest.mark.parametrize(
    ("family", "dtype"), [("mixtral", "float32"), ("gpt_oss", "bfloat16"), ("deepseek_v3", "float16")]
)
def test_weights_are_the_same_bits(family: str, dtype: str, cases: Cases, tmp_path: Path) -> None:
    """Whatever the model: logits are those of the store that is not compressed, to the bit."""
    case, logits = cases[family], []
    for codec in ("none", "planes"):
        pack(case.folder, tmp_path / codec, dtype, codec=codec)
        with loaded(tmp_path / codec, memory="60%") as model, torch.no_grad():
            logits.append(model(torch.tensor(case.prompts[:1])).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("segments", [1, 4])
def test_behind_an_accelerator_the_host_decodes(segments: int, planes: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made = put_in_place(monkeypatch, 50)
    with loaded(planes.store, memory="50%", segments=segments) as model:
        for _ in range(2):
            assert generate(model, planes.prompts) == planes.tokens
        moved = made[0].stats()
        assert moved["decoded_nbytes"] > 0 and moved["host_hit_nbytes"] > 0
        assert moved["decoded_nbytes"] + moved["host_hit_nbytes"] >= moved["copied_nbytes"]
        made[0].tier.check()


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


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_damage_fails_the_request_and_the_next_one_works(own_planes: Case) -> None:
    case = own_planes
    path = case.store / planes_name(1)
    whole = path.read_bytes()
    with loaded(case.store, memory="75%", system="on-demand") as model:
        path.write_bytes(bytes(byte ^ 255 for byte in whole))
        for _ in range(2):
            with pytest.raises(TransferError, match=rf"{path.name}: frame 0 of expert \d: checksum"):
                generate(model, case.prompts)
            handle(model).engine.scheduler.check()
        path.write_bytes(whole)
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
