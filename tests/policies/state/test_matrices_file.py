"""Files of activation matrices: what comes back, and what is refused; tests of maps cover what all files share."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from expertly.core.errors import StoreError
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.eam.matrices import Matrices
from expertly.policies.state.any_file import read_any
from expertly.policies.state.file import MapsFile, load_maps, save_maps
from expertly.policies.state.header import MatricesHeader
from expertly.policies.state.matrices_file import DTYPES, MatricesFile, load_matrices, save_matrices
from expertly.policies.state.merge import merged_matrices
from expertly.policies.state.sealed import NO_CHECKSUM
from tests.policies.state.builders import IDENTITY, SHAPE, forged, make_store, mutations, setting
from tests.store.mounts import tiny_disk


def make_matrices(prefill: int = 4, decode: int = 6, capacity: int = 8, seed: int = 0) -> Matrices:
    """Of 3 layers of 8, 6 and 8 experts."""
    dice, matrices = np.random.default_rng(seed), Matrices(SHAPE, capacity)
    for collection, num in ((matrices.prefill, prefill), (matrices.decode, decode)):
        for _ in range(num):
            counts = dice.integers(0, 30, (3, 8))
            counts[1, 6:] = 0
            collection.add(counts)
    return matrices


def assert_same_matrices(found: Matrices, expected: Matrices) -> None:
    assert (found.shape, found.capacity) == (expected.shape, expected.capacity)
    for name, array in expected.state().items():
        np.testing.assert_array_equal(found.state()[name], array, err_msg=name)


def saved(folder: Path, matrices: Matrices | None = None) -> Path:
    path = folder / "a.matrices"
    save_matrices(path, matrices or make_matrices(), IDENTITY, {"source": "a test"})
    return path


def forged_matrices(folder: Path, tensors: dict[str, np.ndarray], **metadata: str | None) -> Path:
    return forged(folder / "a.matrices", tensors, MatricesHeader(IDENTITY, SHAPE, 8).metadata(NO_CHECKSUM) | metadata)


def tensors_of(matrices: Matrices) -> dict[str, np.ndarray]:
    kinds = {"I64": np.int64, "I32": np.int32}
    return {name: matrices.state()[name].astype(kinds[dtype]) for name, dtype in DTYPES.items()}


def refusal(path: Path) -> str:
    with pytest.raises(StoreError) as caught:
        load_matrices(path, IDENTITY, SHAPE)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 600
    return message


@pytest.mark.parametrize(("prefill", "decode"), [(0, 0), (3, 0), (0, 5), (4, 6), (20, 20)])
def test_what_is_saved_comes_back(tmp_path: Path, prefill: int, decode: int) -> None:
    matrices = make_matrices(prefill, decode)
    path = saved(tmp_path, matrices)
    found = MatricesFile.read(path, IDENTITY, SHAPE)
    assert_same_matrices(found.store, matrices)
    assert (found.header.about, found.nbytes) == ({"source": "a test"}, path.stat().st_size)
    whole = path.read_bytes()
    save_matrices(path, found.store, IDENTITY, found.header.about)
    assert path.read_bytes() == whole


def test_a_file_of_the_other_kind_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(StoreError, match=r"holds activation matrices, by which moe-infinity predicts, not expert maps"):
        load_maps(path)
    save_maps(tmp_path / "a.maps", make_store(), IDENTITY)
    with pytest.raises(StoreError, match=r"holds expert maps, by which fmoe predicts, not activation matrices"):
        load_matrices(tmp_path / "a.maps")
    assert isinstance(read_any(path), MatricesFile) and isinstance(read_any(tmp_path / "a.maps"), MapsFile)
    with pytest.raises(StoreError, match="not expert maps"):
        read_any(path, read_any(tmp_path / "a.maps"))


def test_another_models_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(StoreError, match=r"identity='4444.*of another model, or of this one before it changed"):
        load_matrices(path, "5" * 64)
    with pytest.raises(StoreError, match=r"shape: of 3 layers of 6 to 8 experts.*; expected 1 layers of 8 experts"):
        load_matrices(path, IDENTITY, ModelShape((8,), (2,)))


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


BAD_METADATA: dict[str, tuple[dict[str, str | None], str]] = {
    "format": ({"format": "pt"}, "format='pt': not a file of activation matrices"),
    "version": ({"version": "2"}, "version='2'"),
    "no checksum": ({"checksum": None}, "checksum=None: must be eight"),
    "capacity": ({"capacity": "5"}, "tensor 'decode_born': 6 matrices, more than the capacity=5"),
    "huge capacity": ({"capacity": "9999999"}, "capacity='9999999': must be"),
    "greedy capacity": (
        {"capacity": "1000000", "shape": json.dumps({"num_experts": [9000] * 4, "top_k": [1] * 4})},
        "capacity='1000000': a store of [0-9]+ bytes",
    ),
    "shape": ({"shape": "[]"}, "shape='\\[\\]': must be a JSON object"),
    "shape other": ({"shape": '{"num_experts": [8, 6], "top_k": [2, 3]}'}, "shape: of 2 layers"),
    "about": ({"about": '{"a": [1]}'}, "about=.*texts and numbers"),
}


@pytest.mark.parametrize("name", BAD_METADATA)
def test_a_header_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    metadata, expected = BAD_METADATA[name]
    assert re.search(expected, refusal(forged_matrices(tmp_path, tensors_of(make_matrices()), **metadata)))


def test_a_forged_file_that_does_not_lie_is_accepted(tmp_path: Path) -> None:
    path = forged_matrices(tmp_path, tensors_of(make_matrices()))
    assert_same_matrices(load_matrices(path, IDENTITY, SHAPE), make_matrices())


BAD_TENSORS = {
    "below 0": (setting("decode", (2, 1, 3), -1), "tensor 'decode': matrix 2, layer 1, expert 3: -1; must be a count"),
    "too many": (setting("prefill", (0, 0, 0), 1 << 25), "expert 0: 33554432; must be a count of tokens, from 0 to"),
    "no such expert": (setting("decode", (0, 1, 6), 1), "layer 1, expert 6: 1; must be 0: there are 6 experts"),
    "empty": (setting("decode", 3, 0), "tensor 'decode': matrix 3: counts no token"),
    "born twice": (setting("decode_born", 1, 0), "tensor 'decode_born': must count"),
    "born before": (setting("prefill_born", 1, -4), "tensor 'prefill_born'"),
    "short": (lambda t: t.update(decode=t["decode"][1:]), "tensor 'decode': I32 .*must be I32 \\[6, 3, 8\\]"),
    "missing": (lambda t: t.pop("prefill"), "tensor 'prefill': missing"),
    "no count": (lambda t: t.pop("decode_born"), "tensor 'decode_born': missing"),
    "unknown": (lambda t: t.update(more=t["decode"]), "tensor 'more': unknown"),
    "dtype": (lambda t: t.update(decode=t["decode"].astype(np.float32)), "tensor 'decode': F32 .*must be I32"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_numbers_that_no_matrix_has_are_refused(tmp_path: Path, name: str) -> None:
    change, expected = BAD_TENSORS[name]
    tensors = tensors_of(make_matrices())
    change(tensors)
    assert re.search(expected, refusal(forged_matrices(tmp_path, tensors)))


@pytest.mark.filterwarnings("error")
def test_no_mutation_that_has_the_right_checksum_crashes(tmp_path: Path) -> None:
    """Whatever bytes change: the file is refused, or what is loaded can be used and saved."""
    path = saved(tmp_path)
    num_loaded = 0
    for number, changed in enumerate(mutations(path.read_bytes(), 300)):
        path.write_bytes(changed)
        try:
            matrices = load_matrices(path)
        except StoreError:
            continue
        num_loaded += 1
        for counts in np.random.default_rng(number).integers(0, 9, (3, *matrices.decode.total.shape)):
            counts[:, min(matrices.shape.num_experts) :] = 0
            matrices.decode.add(counts)
        save_matrices(path, matrices, IDENTITY)
    assert 15 < num_loaded < 250


def test_numbers_that_no_matrix_has_are_not_saved(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before, matrices = path.read_bytes(), make_matrices()
    matrices.decode.matrices[0, 0, 0] = np.nan
    with pytest.raises(StoreError, match=r"a\.matrices: tensor 'decode': matrix 0, layer 0, expert 0: nan"):
        save_matrices(path, matrices, IDENTITY)
    assert path.read_bytes() == before


def test_a_full_disk_leaves_the_file_before(tmp_path: Path) -> None:
    with tiny_disk(tmp_path) as disk:
        path = saved(disk)
        with pytest.raises(StoreError, match="the disk is full"):
            save_matrices(path, make_matrices(9000, 9000, 9000), IDENTITY)
        assert_same_matrices(load_matrices(path, IDENTITY, SHAPE), make_matrices())
        assert [file.name for file in disk.iterdir()] == ["a.matrices"]


def test_merged_are_all_of_them_the_older_ones_first() -> None:
    one, other = make_matrices(2, 3), make_matrices(1, 4, seed=1)
    both = merged_matrices([one, other], 20)
    np.testing.assert_array_equal(both.decode.matrices[:7], [*one.decode.matrices[:3], *other.decode.matrices[:4]])
    assert (both.prefill.num_matrices, both.capacity) == (3, 20)
    assert merged_matrices([one, other], 2).most_of_a_phase == 2
