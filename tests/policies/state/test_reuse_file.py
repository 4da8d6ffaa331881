"""Files of what was learned of reuse: what comes back, what is refused; tests of maps cover what all files share."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertly.core.errors import StoreError
from expertly.policies.learned import ModelShape
from expertly.policies.reuse.model import ReuseModel
from expertly.policies.state.any_file import read_any
from expertly.policies.state.file import load_maps, save_maps
from expertly.policies.state.metadata import metadata_of
from expertly.policies.state.reuse_file import KIND, MEANING, ReuseFile, save_reuse
from expertly.policies.state.sealed import NO_CHECKSUM
from tests.policies.state.builders import IDENTITY, SHAPE, forged, make_store, mutations, setting
from tests.policies.state.reuse import LAYERS, assert_same_state, learned, taught
from tests.scheduler.drive import geometry, one_token
from tests.store.mounts import tiny_disk


def saved(folder: Path, state: dict[str, Any] | None = None) -> Path:
    path = folder / "a.reuse"
    save_reuse(path, state or learned(), IDENTITY, SHAPE, {"source": "a test"})
    return path


def forged_reuse(folder: Path, tensors: dict[str, np.ndarray], **metadata: str | None) -> Path:
    sizes = {"num_experts": SHAPE.num_experts, "top_k": SHAPE.top_k}
    said = metadata_of(KIND, NO_CHECKSUM, IDENTITY, sizes, {}) | {"meaning": json.dumps(dict(MEANING))}
    return forged(folder / "a.reuse", tensors, said | metadata)


def refusal(path: Path) -> str:
    with pytest.raises(StoreError) as caught:
        ReuseFile.read(path, IDENTITY, SHAPE)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 600
    return message


@pytest.mark.parametrize("num_tokens", [0, 5, 200])
def test_what_is_saved_comes_back(tmp_path: Path, num_tokens: int) -> None:
    state = learned(num_tokens)
    path = saved(tmp_path, state)
    found = ReuseFile.read(path, IDENTITY, SHAPE)
    assert_same_state(found.state, state)
    assert (found.identity, found.shape, found.about) == (IDENTITY, SHAPE, {"source": "a test"})
    assert (found.num_tokens, found.nbytes) == (num_tokens, path.stat().st_size)
    whole = path.read_bytes()
    save_reuse(path, found.state, IDENTITY, SHAPE, found.about)
    assert path.read_bytes() == whole


def test_a_model_goes_on_from_a_file(tmp_path: Path) -> None:
    model, other = taught(200), taught(0)
    other.restore(ReuseFile.read(saved(tmp_path, model.state())).state)
    assert_same_state(other.state(), model.state())
    for one in (model, other):
        for layer in range(len(LAYERS)):
            one.observe(one_token(layer, [1, 2]))
    assert other.num_tokens == model.num_tokens == 201


def test_a_file_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    path, maps = saved(tmp_path), tmp_path / "a.maps"
    save_maps(maps, make_store(), IDENTITY)
    reuse, expert_maps = "what was learned of reuse, by which expertly keeps experts", "expert maps, by which fmoe"
    with pytest.raises(StoreError, match=f"holds {reuse}, not {expert_maps}"):
        load_maps(path)
    with pytest.raises(StoreError, match=f"holds {expert_maps} predicts, not {reuse}"):
        ReuseFile.read(maps)
    with pytest.raises(StoreError, match=f"holds {reuse}; accepted: a file of {expert_maps}.* or activation matrices"):
        read_any(path)


def test_another_models_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(StoreError, match=r"identity='4444.*of another model, or of this one before it changed"):
        ReuseFile.read(path, "5" * 64)
    with pytest.raises(StoreError, match=r"shape: of 3 layers of 6 to 8 experts.*; expected 1 layers of 8 experts"):
        ReuseFile.read(path, IDENTITY, ModelShape((8,), (2,)))
    with pytest.raises(StoreError, match=r"identity='trace:toy': of another model"):
        ReuseFile.read(forged_reuse(tmp_path, learned(), identity="trace:toy"), IDENTITY)


def test_every_cut_and_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    dice = random.Random(0)
    for at in [*range(60), *dice.sample(range(len(whole)), 120)]:
        path.write_bytes(whole[:at])
        refusal(path)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << dice.randrange(8))]) + whole[at + 1 :])
        refusal(path)
    path.write_bytes(whole + b"x")
    refusal(path)


def layers_of(*num_experts: int) -> str:
    return json.dumps({"num_experts": num_experts, "top_k": [1] * len(num_experts)})


BAD_METADATA: dict[str, tuple[dict[str, str | None], str]] = {
    "format": ({"format": "pt"}, "format='pt': not a file of what was learned of reuse"),
    "version": ({"version": "2"}, "version='2'"),
    "no checksum": ({"checksum": None}, "checksum=None: must be eight"),
    "no identity": ({"identity": None}, "identity=None: must say which model"),
    "shape": ({"shape": "[]"}, "shape='\\[\\]': must be a JSON object"),
    "shape other": ({"shape": '{"num_experts": [8, 6], "top_k": [2, 3]}'}, "shape: of 2 layers"),
    "meaning": ({"meaning": json.dumps(dict(MEANING) | {"horizon": 9})}, "meaning=.*another version of expertly"),
    "no meaning": ({"meaning": None}, "meaning=None: must be a JSON object"),
    "about": ({"about": '{"a": [1]}'}, "about=.*texts and numbers"),
}


@pytest.mark.parametrize("name", BAD_METADATA)
def test_a_header_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    metadata, expected = BAD_METADATA[name]
    assert re.search(expected, refusal(forged_reuse(tmp_path, learned(), **metadata)))


def test_a_shape_of_more_weights_than_there_can_be_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    path = forged_reuse(tmp_path, learned(), shape=layers_of(*[65000] * 8))
    with pytest.raises(StoreError, match=r"shape=.*weights of 135200000000 bytes; at most"):
        ReuseFile.read(path)


def test_a_forged_file_that_does_not_lie_is_accepted(tmp_path: Path) -> None:
    path = forged_reuse(tmp_path, learned())
    assert_same_state(ReuseFile.read(path, IDENTITY, SHAPE).state, learned())


BAD_TENSORS = {
    "not a number": (setting("weights", 7, np.nan), "tensor 'weights': number 7: nan; must be a weight, -1e"),
    "infinite": (setting("weights", 9, np.inf), "tensor 'weights': number 9: inf"),
    "far too large": (setting("weights", 9, -3e6), "tensor 'weights': number 9: -3000000"),
    "no share": (setting("mean", 2, 1.5), "tensor 'mean': number 2: 1.5; must be a share of tokens, 0 to 1"),
    "below 0": (setting("mean", 21, -0.5), "tensor 'mean': number 21: -0.5"),
    "no mean": (setting("mean", 0, np.nan), "tensor 'mean': number 0: nan"),
    "tokens": (setting("tokens", 1, -4), "tensor 'tokens': number 1: -4; must be a number of tokens, 0 to"),
    "too many tokens": (setting("tokens", 1, 1 << 60), "tensor 'tokens': number 1: 1152921504606846976"),
    "short": (lambda t: t.update(weights=t["weights"][1:]), "tensor 'weights': F32 .*must be F32 \\[484\\]"),
    "missing": (lambda t: t.pop("mean"), "tensor 'mean': missing"),
    "unknown": (lambda t: t.update(more=t["mean"]), "tensor 'more': unknown"),
    "dtype": (lambda t: t.update(mean=t["mean"].astype(np.float16)), "tensor 'mean': F16 .*must be F32"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_numbers_that_nobody_learns_are_refused(tmp_path: Path, name: str) -> None:
    change, expected = BAD_TENSORS[name]
    tensors = learned()
    change(tensors)
    assert re.search(expected, refusal(forged_reuse(tmp_path, tensors)))


@pytest.mark.filterwarnings("error")
def test_no_mutation_that_has_the_right_checksum_crashes(tmp_path: Path) -> None:
    """Whatever bytes change: the file is refused, or a model goes on from it and can be saved."""
    path = saved(tmp_path)
    num_loaded = 0
    for changed in mutations(path.read_bytes(), 300):
        path.write_bytes(changed)
        try:
            state = ReuseFile.read(path, None, SHAPE).state
        except StoreError:
            continue
        num_loaded += 1
        model = taught(0)
        model.restore(state)
        for _ in range(20):
            for layer in range(len(LAYERS)):
                model.observe(one_token(layer, [1, 2]))
        assert np.isfinite(model.worth()).all()
    assert 15 < num_loaded < 250


def test_numbers_that_nobody_learns_are_not_saved(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before, state = path.read_bytes(), learned()
    state["weights"][3] = np.nan
    with pytest.raises(StoreError, match=r"a\.reuse: tensor 'weights': number 3: nan"):
        save_reuse(path, state, IDENTITY, SHAPE)
    assert path.read_bytes() == before


def test_a_full_disk_leaves_the_file_before(tmp_path: Path) -> None:
    with tiny_disk(tmp_path) as disk:
        path = saved(disk)
        large = geometry(layers=40, experts=128)
        state = ReuseModel(large).state()
        assert state is not None
        with pytest.raises(StoreError, match="the disk is full"):
            save_reuse(path, state, IDENTITY, ModelShape.of(large))
        assert_same_state(ReuseFile.read(path, IDENTITY, SHAPE).state, learned())
        assert [file.name for file in disk.iterdir()] == ["a.reuse"]
