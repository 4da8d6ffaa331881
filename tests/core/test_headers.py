"""A header that lies is caught, whatever the lie."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from expertly.core.errors import CheckpointError
from expertly.core.headers import (
    TensorSpec,
    header_metadata,
    read_header_bytes,
    read_safetensors_header,
    safetensors_header,
)
from expertly.core.untrusted import HEADER
from tests.store.builders import entry, safetensors_bytes


def write(folder: Path, content: bytes) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return path


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.zeros((0, 4), np.int8), "c": np.float64(3)}
    save_file({name: np.asarray(value) for name, value in tensors.items()}, path, {"format": "pt"})
    infos = read_safetensors_header(path, CheckpointError)
    shapes = {"a": ("I8", (0, 4)), "b": ("F32", (2, 3)), "c": ("F64", ())}
    assert {name: (info.dtype, info.shape) for name, info in infos.items()} == shapes
    raw = path.read_bytes()
    assert np.frombuffer(raw[infos["b"].begin : infos["b"].end], np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    header = {"z": entry(offsets=(8, 16)), "a": entry(offsets=(0, 8)), "empty": entry(shape=(0, 3), offsets=(8, 8))}
    infos = read_safetensors_header(write(tmp_path, safetensors_bytes(header, bytes(16))), CheckpointError)
    assert list(infos) == ["a", "empty", "z"], "in the order of the file, whatever the header's"


BAD_ENTRIES = {
    "dtype NaN": (entry(dtype="NaN"), "dtype='NaN': unknown; accepted: .*BF16"),
    "dtype missing": ({"shape": [2], "data_offsets": [0, 8]}, "dtype: Field required"),
    "shape negative": (entry(shape=(-2,)), r"shape\[0\]=-2: must be greater than or equal to 0"),
    "shape bool": (entry(shape=(True, 2)), r"shape\[0\]=True"),
    "shape overflows": (entry(shape=(1 << 40, 1 << 40)), "hold 8 bytes"),
    "length": (entry(shape=(3,)), "hold 8 bytes, but shape .3. of F32 needs 12"),
    "offsets three": (entry(offsets=(0, 8, 9)), "data_offsets="),
    "offsets reversed": (entry(offsets=(8, 0)), "hold -8 bytes"),
    "not an object": ([1, 2], "must be a valid dictionary"),
    "half an element": (entry("F4", (3,), (0, 1)), "needs 1.5"),
}


BAD_FILES = {
    "empty": (b"", "truncated"),
    "header beyond the file": (safetensors_bytes({}, nbytes=1000), "truncated: header length 1000"),
    "huge header": (safetensors_bytes({}, nbytes=HEADER.nbytes + 1), "header length"),
    "not JSON": (safetensors_bytes(b"{nonsense}"), "not JSON"),
    "deep JSON": (safetensors_bytes(b"[" * 200_000), "not JSON"),
    "a list": (safetensors_bytes([]), "must be an object"),
    "a name twice": (
        safetensors_bytes(
            b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"x",
        ),
        "names 't' twice",
    ),
    "overlap": (
        safetensors_bytes({"a": entry(offsets=(0, 8)), "b": entry(offsets=(4, 12))}, bytes(12)),
        "tensor 'b'.*overlaps tensor 'a'",
    ),
    "hole": (safetensors_bytes({"a": entry(offsets=(4, 12))}, bytes(12)), "unused bytes"),
    "beyond the file": (safetensors_bytes({"a": entry()}, bytes(7)), "tensor 'a'.*beyond the 7 data bytes"),
    "trailing bytes": (safetensors_bytes({"a": entry()}, bytes(9)), "belong to no tensor"),
}


BAD_FILES |= {
    name: (safetensors_bytes({"layers.0": bad}, bytes(8)), f"layers.0.*{message}")
    for name, (bad, message) in BAD_ENTRIES.items()
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_named(tmp_path: Path, case: str) -> None:
    content, message = BAD_FILES[case]
    path = write(tmp_path, content)
    with pytest.raises(CheckpointError, match=message) as error:
        read_safetensors_header(path, CheckpointError)
    assert str(path) in str(error.value)


def test_no_mutation_of_a_header_gets_through_or_crashes(tmp_path: Path) -> None:
    """Whatever is accepted lies inside the file, does not overlap, and has the length of its shape."""
    header = {f"t{i}": entry("F32", (2, 3), (24 * i, 24 * i + 24)) for i in range(4)}
    good = safetensors_bytes(header, bytes(96))
    rng = random.Random(0)
    accepted = 0
    for _ in range(400):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            position = rng.randrange(len(raw) - 96)
            choice = rng.random()
            if choice < 0.6:
                raw[position] = rng.choice(b'0123456789[]{},:"eE.-tFU ' + bytes([rng.randrange(256)]))
            elif choice < 0.8:
                del raw[position]
            else:
                raw.insert(position, rng.choice(b"0123456789"))
        path = write(tmp_path, bytes(raw))
        try:
            infos = list(read_safetensors_header(path, CheckpointError).values())
        except CheckpointError:
            continue
        accepted += 1
        assert all(first.end <= second.begin for first, second in pairwise(infos))
        assert all(info.end <= len(raw) for info in infos)
        sizes = {"F32": 4, "F16": 2, "F64": 8}
        assert all(np.prod(info.shape) * sizes.get(info.dtype, 0) == info.nbytes for info in infos)
    assert accepted  # a changed name is a good file


def test_metadata_is_strings_and_comes_back(tmp_path: Path) -> None:
    about = {"name": 'a "b"', "number": "3"}
    path = write(tmp_path, safetensors_header([TensorSpec("t", "U8", (2,))], about) + bytes(2))
    assert header_metadata(path, read_header_bytes(path, CheckpointError), CheckpointError) == about
    assert read_safetensors_header(path, CheckpointError)["t"].begin % 4096 == 0
    path = write(tmp_path, safetensors_header([]))
    assert header_metadata(path, read_header_bytes(path, CheckpointError), CheckpointError) == {"format": "pt"}
    path = write(tmp_path, safetensors_bytes({}))
    assert header_metadata(path, read_header_bytes(path, CheckpointError), CheckpointError) == {}
    for metadata in ([], "text", {"a": 1}, {"a": None}):
        path = write(tmp_path, safetensors_bytes({"__metadata__": metadata}))
        with pytest.raises(CheckpointError, match=r"__metadata__: .*must be a valid"):
            header_metadata(path, read_header_bytes(path, CheckpointError), CheckpointError)
