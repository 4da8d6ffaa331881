"""The file of weights: what was saved is read, and nothing else is believed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from expertly.core.errors import StoreError
from expertly.core.geometry import LayerGeometry
from expertly.policies.learned_file import PredictorFile, save_predictor
from expertly.policies.predictor.learned import LearnedWeights, Mlp
from tests.weights import random_weights

LAYERS = (LayerGeometry(6, 2, 4, 4, 2, 1), LayerGeometry(4, 1, 4, 4, 2, 1), LayerGeometry(5, 2, 4, 4, 2, 1))
IDENTITY = "a" * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "predictor.safetensors"
    save_predictor(path, random_weights(LAYERS, 7, 3), IDENTITY, {"model": "toy", "split": "7:3", "mean": [0.5]})
    return path


def test_what_was_saved_is_read(path: Path) -> None:
    weights, file = random_weights(LAYERS, 7, 3), PredictorFile.read(path, IDENTITY)
    assert file.identity == IDENTITY and file.about == {"model": "toy", "split": "7:3", "mean": [0.5]}
    assert file.nbytes == path.stat().st_size
    read = file.weights
    assert (read.num_experts, read.top_k) == ((6, 4, 5), (2, 1, 2))
    assert (read.starts, read.distances) == ((0, 0, 0), (1, 2))
    assert read.mlps.keys() == weights.mlps.keys()
    for pair, mlp in weights.mlps.items():
        for field in dataclasses.fields(Mlp):
            np.testing.assert_array_equal(getattr(read.mlps[pair], field.name), getattr(mlp, field.name))


def test_a_model_of_one_layer_has_weights_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "one"
    save_predictor(path, random_weights(LAYERS[:1]), IDENTITY, {})
    assert PredictorFile.read(path).weights.mlps == {}


def test_another_model_is_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"identity='aaa.*of another model.*expected 'bbb"):
        PredictorFile.read(path, "b" * 64)
    of_trace = tmp_path / "of-trace"
    save_predictor(of_trace, random_weights(LAYERS), "trace:toy", {})
    with pytest.raises(StoreError, match="train-predictor --model` names it"):
        PredictorFile.read(of_trace, IDENTITY)


@pytest.mark.parametrize("cut", [0, 7, 100, 4096, -1])
def test_a_file_that_was_cut_is_not_read(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(StoreError, match=str(path)):
        PredictorFile.read(path)


def test_any_changed_byte_is_seen(path: Path) -> None:
    raw = path.read_bytes()
    dice = np.random.default_rng(0)
    for place in dice.integers(0, len(raw), 60).tolist():
        if raw[place : place + 1].isspace():
            continue
        changed = bytearray(raw)
        changed[place] ^= 1 << int(dice.integers(0, 8))
        path.write_bytes(changed)
        with pytest.raises(StoreError):
            PredictorFile.read(path)


def rewrite(path: Path, **changes: str | None) -> None:
    """Change the header's metadata; None: leave it out."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    for name, value in changes.items():
        if value is None:
            del header["__metadata__"][name]
        else:
            header["__metadata__"][name] = value
    data = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data + raw[8 + size :])


SHAPE = {"num_experts": [6, 4, 5], "top_k": [2, 1, 2], "starts": [0, 0, 0], "distances": [1, 2]}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": "expertly-maps"}, "format='expertly-maps': holds expert maps, .* not the weights of a predictor"),
        ({"format": None}, "format=None"),
        ({"version": "9"}, "version='9': this version of expertly reads 1"),
        ({"checksum": "zz"}, "checksum='zz'"),
        ({"identity": ""}, "identity=''"),
        ({"shape": "["}, "shape='\\[': must be a JSON object"),
        ({"about": "3"}, "about='3': must be a JSON object"),
        ({"shape": json.dumps(SHAPE | {"num_experts": []})}, "1 to 4096 layers"),
        ({"shape": json.dumps(SHAPE | {"num_experts": [6, 4, -5]})}, "num_experts must be whole numbers from 1"),
        ({"shape": json.dumps(SHAPE | {"num_experts": [6, 4, True]})}, "num_experts must be whole numbers from 1"),
        ({"shape": json.dumps(SHAPE | {"top_k": [2, 1]})}, "must list num_experts and top_k of 1 to"),
        ({"shape": json.dumps(SHAPE | {"top_k": [7, 1, 1]})}, "top_k must be at most num_experts"),
        ({"shape": json.dumps(SHAPE | {"starts": [0, 0, 3]})}, "starts must not be behind"),
        ({"shape": json.dumps(SHAPE | {"distances": []})}, "1 to 64 distances"),
        ({"shape": json.dumps(SHAPE | {"distances": list(range(1, 99))})}, "1 to 64 distances"),
        ({"shape": json.dumps(SHAPE | {"num_experts": [6, 4, 60000]})}, r"must be F16 \[3, 60000, 3\]"),
    ],
)
def test_a_header_that_cannot_be_is_named(path: Path, changes: dict[str, str | None], named: str) -> None:
    rewrite(path, **changes)
    with pytest.raises(StoreError, match=named):
        PredictorFile.read(path)


def saved(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "changed"
    save_predictor(path, dataclasses.replace(random_weights(LAYERS, 7, 3), **changes), IDENTITY, {})
    return path


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    weights = random_weights(LAYERS, 7, 3)
    mlps = dict(weights.mlps)
    mlps[0, 1] = dataclasses.replace(mlps[0, 1], bias=np.array([0, np.nan, 0, 0], np.float16))
    with pytest.raises(StoreError, match="tensor 'bias': holds a number that is not finite"):
        PredictorFile.read(saved(tmp_path, mlps=mlps))


def test_a_network_too_few_or_too_many_is_seen(tmp_path: Path) -> None:
    weights: LearnedWeights = random_weights(LAYERS, 7, 3)
    fewer = {pair: mlp for pair, mlp in weights.mlps.items() if pair != (1, 2)}
    with pytest.raises(StoreError, match="distances=1: a network for it is missing"):
        PredictorFile.read(saved(tmp_path, mlps=fewer))
    with pytest.raises(StoreError, match=r"of layers \(0, 2\): twice, or of no use"):
        PredictorFile.read(saved(tmp_path, distances=(1,)))


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(StoreError, match="cannot be read"):
            PredictorFile.read(path)
