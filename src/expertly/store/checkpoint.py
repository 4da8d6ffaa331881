"""A checkpoint as it comes from the hub: its config, where its tensors lie, and its identity."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from expertly.core.errors import CheckpointError, ExpertlyError
from expertly.core.headers import parse_safetensors_header, read_header_bytes
from expertly.core.untrusted import is_plain_name, read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_SAMPLE_NBYTES = 4096
_NUM_SAMPLES = 64
_WHOLE_NBYTES = 4 << 20

_HASHED_NBYTES = 64 << 20
"""A file of so many bytes is hashed whole in a few milliseconds."""

_BLOB = re.compile("[0-9a-f]{64}")
"""The name of a file of weights in the hub's cache: the SHA-256 of its bytes."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor on disk. `dtype` is safetensors' name, or in a GGUF file GGUF's; floats have the same names in both."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. No tensor is in memory; reads go through the page cache, never by mmap."""

    folder: Path  # or a GGUF file
    config: Mapping[str, Any]  # the contents of config.json
    tensors: Mapping[str, TensorRef]
    headers: Mapping[str, bytes]  # of each file, by name
    gguf: str = ""  # the architecture that a GGUF file names

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read config, index and all headers. Raises CheckpointError naming the file and the problem."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder")
        weight_map = _weight_map(folder)
        config = read_json_object(folder / "config.json", CheckpointError)
        names = sorted(set(weight_map.values())) if weight_map else [SINGLE_NAME]
        headers: dict[str, bytes] = {}
        tensors: dict[str, TensorRef] = {}
        for file_name in names:
            path = folder / file_name
            if not path.is_file():
                needs = f"{INDEX_NAME} names it for {sum(v == file_name for v in weight_map.values())} tensors"
                raise CheckpointError(f"{path}: missing shard: {needs}")
            headers[file_name] = raw = read_header_bytes(path, CheckpointError)
            for name, info in parse_safetensors_header(path, raw, CheckpointError).items():
                if name in tensors:
                    raise CheckpointError(f"{path}: tensor {name!r} is also in {tensors[name].path.name}")
                tensors[name] = TensorRef(path, info.dtype, info.shape, info.begin, info.nbytes)
        for name, file_name in weight_map.items():
            if name not in tensors or tensors[name].path.name != file_name:
                raise CheckpointError(f"{folder / file_name}: tensor {name!r} is not in it, but {INDEX_NAME} says so")
        check_claims(
            folder / "config.json", config, {name: ref.shape for name, ref in tensors.items()}, CheckpointError
        )
        return cls(folder, config, tensors, headers)

    @cached_property
    def identity(self) -> str:
        """SHA-256 over the config, each file's name, size and header, and a sample of each file's bytes.

        The sample (64 blocks of 4 KiB spread over the file, or all of a file below 4 MiB) distinguishes fine-tunings of
        one model, whose headers are equal. File times and folder names do not matter. What was learned about a model
        goes by it; whether a store is up to date goes by `stamp` as well.
        """
        digest = hashlib.sha256()

        def add(part: bytes) -> None:
            digest.update(len(part).to_bytes(8, "little") + part)

        if not self.gguf:
            add((self.folder / "config.json").read_bytes())
        for name, header in self.headers.items():
            add(name.encode())
            add(header)
            for part in _samples(self._beside / name):
                add(part)
        return digest.hexdigest()

    @cached_property
    def stamp(self) -> str:
        """Another one whenever a file of weights was changed or replaced, even between the bytes of the sample."""
        told = "".join(f"{name} {_stamp(self._beside / name)}\n" for name in self.headers)
        return hashlib.sha256(told.encode()).hexdigest()

    @property
    def _beside(self) -> Path:
        """The folder of the files."""
        return self.folder.parent if self.gguf else self.folder

    def _read_into(self, name: str, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the tensor's bytes from `start`."""
        ref = self.tensors[name]
        assert start >= 0 and start + buffer.nbytes <= ref.nbytes, "read outside of the tensor"
        offset = ref.offset + start
        try:
            with ref.path.open("rb") as file:
                file.seek(offset)
                count = file.readinto(buffer)
        except OSError as error:
            raise CheckpointError(
                f"{ref.path}: reading tensor {name!r} at offset {offset} failed ({error.strerror})"
            ) from error
        if count < buffer.nbytes:
            raise CheckpointError(f"{ref.path}: truncated inside tensor {name!r}, at offset {offset + count}")

    def read(self, name: str, row: int | None = None) -> Bytes:
        """All bytes of a tensor, or those of `tensor[row]`, [nbytes]; its dtype and shape are in `tensors`."""
        ref = self.tensors[name]
        assert row is None or row < ref.shape[0], "no such row"
        buffer = np.empty(ref.nbytes if row is None else ref.nbytes // ref.shape[0], np.uint8)
        self._read_into(name, buffer.data, 0 if row is None else row * buffer.nbytes)
        return buffer

    def read_chunks(self, name: str, chunk_nbytes: int = 8 << 20) -> Iterator[Bytes]:
        """The bytes of a tensor in chunks. A chunk is valid until the next one."""
        total = self.tensors[name].nbytes
        buffer = np.empty(min(chunk_nbytes, total), np.uint8)
        for start in range(0, total, chunk_nbytes):
            chunk = buffer[: min(chunk_nbytes, total - start)]
            self._read_into(name, chunk.data, start)
            yield chunk


_COUNTS = re.compile(r"(^|_)(num|n)_(\w+_)?(layer|expert)s?(_|$)|^(en|de)coder_layers$")
"""Names of config fields that count layers or experts."""

_OF_EXPERTS = re.compile(r"expert|moe|_exps")
"""In names of tensors that hold many experts."""

_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")

_FEW = 256
"""As many layers or experts are accepted for any tensors: building them takes no time."""

_MOST_WITHOUT_WEIGHTS = 1024
"""As many are accepted of a config without weights: twice what released models have."""


def check_claims(
    path: Path, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None, failure: type[ExpertlyError]
) -> None:
    """Refuse a config with far more layers or experts than there are tensors, before a model is built from it.

    `shapes`: of all tensors; None for a config without weights. The limit is how many different numbers the tensors'
    names have, or how many experts one tensor holds. Raises `failure` naming the field.
    """
    if shapes is None:
        most, accepted = _MOST_WITHOUT_WEIGHTS, f"accepted without weights: at most {_MOST_WITHOUT_WEIGHTS}"
    else:
        numbers = {number for name in shapes for number in _NUMBER.findall(name)}
        stacked = (shape[0] for name, shape in shapes.items() if len(shape) > 2 and _OF_EXPERTS.search(name))
        most = max(_FEW, len(numbers), *stacked)
        accepted = f"there are tensors for {most} at most"
    for field, value in _counts(config):
        if value > most:
            raise failure(f"{path}: {field}={value}: {accepted}")


def _counts(config: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, float]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _counts(value, f"{outer}{key}.")
        elif _COUNTS.search(key):
            yield from (
                (outer + key, one)
                for one in (value if isinstance(value, list) else [value])
                if isinstance(one, int | float)
            )


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name; empty where the checkpoint is one file."""
    if (folder / SINGLE_NAME).is_file():  # like in transformers, it has precedence over an index
        return {}
    path = folder / INDEX_NAME
    if not path.is_file():
        if any(one.is_symlink() and not one.exists() for one in (path, folder / SINGLE_NAME)):
            raise CheckpointError(f"{folder}: its weights are a broken link: an unfinished download?")
        others = sorted(
            p.name for pattern in ("*.safetensors", "*.bin", "*.gguf", "*.pt") for p in folder.glob(pattern)
        )
        which = "a file to give itself" if others and others[0].endswith(".gguf") else "which cannot be packed"
        found = f"; found {', '.join(others[:3])}, {which}" if others else ""
        raise CheckpointError(f"{folder}: no {SINGLE_NAME} and no {INDEX_NAME}{found}")
    weight_map = read_json_object(path, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map={weight_map!r:.80}: must map tensor names to file names")
    for name, file_name in weight_map.items():
        if not is_plain_name(file_name):
            raise CheckpointError(
                f"{path}: weight_map[{name!r}]={file_name!r:.80}: must be a file name in the same folder"
            )
    return weight_map


def _stamp(path: Path) -> str:
    """The hub's hash of a file in its cache, or a hash of a small file: those of a copy are the same. Else size and
    time of the last change, which are those of a copy that keeps times. (Numbers of inodes are not stable everywhere.)
    """
    try:
        file, about = path.resolve(), path.stat()
        if file.parent.name == "blobs" and _BLOB.fullmatch(file.name) and about.st_mtime_ns <= path.lstat().st_mtime_ns:
            return file.name  # not written to since the link to it was made
        if about.st_size <= _HASHED_NBYTES:
            return xxhash.xxh3_128_hexdigest(path.read_bytes())
        return f"{about.st_size} bytes at {about.st_mtime_ns} ns"
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def _samples(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            yield size.to_bytes(8, "little")
            if size <= _WHOLE_NBYTES:
                yield file.read(size)
                return
            for i in range(_NUM_SAMPLES):
                offset = i * (size - _SAMPLE_NBYTES) // (_NUM_SAMPLES - 1)
                yield os.pread(file.fileno(), _SAMPLE_NBYTES, offset)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
