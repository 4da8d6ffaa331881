"""A checkpoint as it comes from the hub: its config, where its tensors lie, and its identity."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import CheckpointError, ExpertlyError
from expertly.core.headers import parse_safetensors_header, read_header_bytes
from expertly.core.untrusted import (
    CONFIG,
    INDEX,
    is_plain_name,
    open_file,
    read_file,
    read_json_object,
    reading,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ADAPTER_NAME = "adapter_config.json"

_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.safetensors$")
_log = logging.getLogger("expertly")

_SAMPLE_NBYTES = 4096
_NUM_SAMPLES = 64
_WHOLE_NBYTES = 4 << 20

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
    factors: tuple[float, ...] = ()  # by which its matrices are multiplied, if they are


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. No tensor is in memory; reads go through the page cache, never by mmap."""

    folder: Path  # or a GGUF file
    config: Mapping[str, Any]  # the contents of config.json
    tensors: Mapping[str, TensorRef]
    headers: Mapping[str, bytes]  # of each file, by name
    gguf: str = ""  # the architecture that a GGUF file names
    reading: str = ""  # what its metadata was taken for

    @property
    def sizes_from(self) -> str:
        return "its metadata" if self.gguf else "config.json"

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read config, index and all headers. An index decides which file a tensor is of, or without one the headers.
        Raises CheckpointError naming the file and the problem.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder")
        names, weight_map = files_of(folder)
        single, index = folder / SINGLE_NAME, folder / INDEX_NAME
        if weight_map and single.exists() and SINGLE_NAME not in names:
            _log.warning("%s: not read: %s names the files of the weights", single, INDEX_NAME)
        if not weight_map and index.exists():
            _log.warning("%s: not used: none of the files that it names is there", index)
        config = read_json_object(folder / "config.json", CheckpointError, CONFIG)
        headers: dict[str, bytes] = {}
        tensors: dict[str, TensorRef] = {}
        superseded: list[str] = []
        for file_name in names:
            path = folder / file_name
            if not path.exists():
                needs = f"{INDEX_NAME} names it for {sum(v == file_name for v in weight_map.values())} tensors"
                raise CheckpointError(f"{path}: missing shard: {needs}")
            headers[file_name] = raw = read_header_bytes(path, CheckpointError)
            for name, info in parse_safetensors_header(path, raw, CheckpointError).items():
                if weight_map.get(name, file_name) != file_name:
                    superseded.append(f"{name:.200} in {file_name!r:.200}")
                    continue
                if name in tensors:
                    which = f"{INDEX_NAME} must say which counts"
                    raise CheckpointError(f"{path}: tensor {name!r:.200} is also in {tensors[name].path.name}: {which}")
                tensors[name] = TensorRef(path, info.dtype, info.shape, info.begin, info.nbytes)
        for name, file_name in weight_map.items():
            if name not in tensors:
                raise CheckpointError(
                    f"{folder / file_name}: tensor {name!r:.200} is not in it, but {INDEX_NAME} says so"
                )
        if superseded:
            _log.warning(
                "%s: names other files for %d tensors that are in several; not read: %s%s",
                index,
                len(superseded),
                superseded[0],
                ", ..." if superseded[1:] else "",
            )
        shapes = {name: ref.shape for name, ref in tensors.items()}
        check_claims(folder / "config.json", config, shapes, CheckpointError)
        return cls(folder, config, tensors, headers)

    @cached_property
    def identity(self) -> str:
        """SHA-256 over the config, each file's name, size and header, and a sample of each file's bytes (64 blocks of 4
        KiB spread over the file, or all of a file below 4 MiB), which fine-tunings of one model differ in. What was
        learned about a model goes by it; whether a store is up to date goes by `stamp` as well.
        """

        def parts() -> Iterator[bytes]:
            if not self.gguf:
                yield read_file(self.folder / "config.json", CONFIG, CheckpointError)
            for name, header in self.headers.items():
                yield from (name.encode(), header)
                yield from _samples(self._beside / name)

        digest = hashlib.sha256()
        for part in parts():
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    @cached_property
    def stamp(self) -> str:
        """Another one whenever a file of weights was changed, even between the samples, or is read otherwise."""
        stamps = "".join(f"{name} {_stamp(self._beside / name)}\n" for name in self.headers)
        return hashlib.sha256(f"{stamps}{self.reading}".encode()).hexdigest()

    @property
    def _beside(self) -> Path:
        """The folder of the files."""
        return self.folder.parent if self.gguf else self.folder

    def label(self, name: str) -> str:
        """What errors call a tensor."""
        return f"{self.tensors[name].path}: tensor {name!r:.200}"

    def _read_into(self, name: str, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the tensor's bytes from `start`."""
        ref = self.tensors[name]
        assert start >= 0 and start + buffer.nbytes <= ref.nbytes, "read outside of the tensor"
        offset = ref.offset + start
        try:
            with BufferedReader(open_file(ref.path, CheckpointError)) as file:  # a raw file reads 2 GiB at most
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


# Names of config fields: those that count layers or experts,
_COUNTS = re.compile(r"(^|_)(num|n)_(\w+_)?(layer|expert|block|stage)s?(_|$)|^(en|de)coder_layers$|^depths?$")
# those whose numbers are never below 0, and 0 only where there is no such part,
_NOT_NEGATIVE = re.compile(
    r"(^|_)(heads|layers|experts|hidden_size|vocab_size|intermediate_size|head_dim|eps|epsilon)$"
)
# those without which there is no text model, and numbers by which positions are divided,
_POSITIVE = re.compile(
    r"(hidden_size|vocab_size|num_hidden_layers|num_attention_heads|num_key_value_heads|rope_theta)"
    r"|rope_(parameters|scaling)\.(.+\.)?(\w*factor|rope_theta|original_max_position_embeddings)(\.\d+)?"
)
# and those that may be larger than any tensor: nothing is built that large.
_UNBOUNDED = re.compile(
    r"token|max_|_max|position|window|length|theta|seed|pixel|param|index|limit|version|flops|range"
)
# In names of tensors: of those that hold many experts; numbers.
_OF_EXPERTS, _NUMBER = re.compile(r"expert|moe|_exps"), re.compile(r"(?<![^._])\d+(?![^._])")

_FEW, _SMALL_SIZE = 256, 1 << 22
"""As many layers or experts, and such a size, are accepted for any tensors: building them takes no time."""

_MOST_WITHOUT_WEIGHTS, _LARGEST_WITHOUT_WEIGHTS = 1024, 1 << 28
"""And of a config without weights: twice what released models have; tables of n-grams have a tenth of the rows."""

_PACKED = 32
"""Numbers that an element of a tensor may hold, in 1 bit each."""


def check_claims(
    path: Path, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None, failure: type[ExpertlyError]
) -> None:
    """Refuse a config whose numbers are none of a model, or larger than its tensors account for, before a model is
    built from it.

    `shapes`: of all tensors; None for a config without weights. The limit of layers and experts is how many different
    numbers the tensors' names have, or how many experts one tensor holds; that of sizes is the tensors' largest. Raises
    `failure` naming the field.
    """
    if shapes is None:
        largest = _LARGEST_WITHOUT_WEIGHTS
        most, accepted = _MOST_WITHOUT_WEIGHTS, f"accepted without weights: at most {_MOST_WITHOUT_WEIGHTS}"
    else:
        numbers = {number for name in shapes for number in _NUMBER.findall(name)}
        stacked = (shape[0] for name, shape in shapes.items() if len(shape) > 2 and _OF_EXPERTS.search(name))
        most = max(_FEW, len(numbers), *stacked)
        accepted = f"there are tensors for {most} at most"
        largest = max(_SMALL_SIZE, _PACKED * max((max(shape, default=0) for shape in shapes.values()), default=0))
    for field, value in _numbers(config):
        key = field.rpartition(".")[2]
        said = f"{path}: {field}={value!s:.80}: "
        if isinstance(value, float) and not math.isfinite(value) and not (value > 0 and "limit" in key):
            raise failure(f"{said}must be a finite number")  # but mamba's time_step_limit
        if _COUNTS.search(key) and value > most:
            raise failure(f"{said}{accepted}")
        if type(value) is int and value > largest and not _UNBOUNDED.search(key):
            raise failure(f"{said}no tensor is as large; accepted: at most {largest}")
        if value < 0 and _NOT_NEGATIVE.search(key):
            raise failure(f"{said}must be at least 0")
        if value <= 0 and (_POSITIVE.fullmatch(key) or _POSITIVE.fullmatch(field)):
            raise failure(f"{said}must be above 0")


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, int | float]]:
    """All numbers of a config with their fields' names, but those of its quantisation."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if name or key not in CONFIG.long:
                yield from _numbers(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, name)
    elif type(value) in (int, float):
        yield name, value  # type: ignore[misc]


def has_weights(folder: Path) -> bool:
    """Whether there are files of weights in a folder, or in folders in it, or an index of such files."""
    return (folder / INDEX_NAME).exists() or any(_weights_in(path) for path in (folder, *_folders_in(folder)))


def _weights_in(folder: Path) -> list[str]:
    """Names of the files of a model's weights, and none of an adapter."""
    return sorted(path.name for path in folder.glob("[!.]*.safetensors") if not path.name.startswith("adapter_model"))


def _folders_in(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:  # of others
        return []


def files_of(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The files of the weights, and which of them an index names for each tensor. Raises CheckpointError."""
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    weight_map = _weight_map(index) if index.exists() else {}
    named = sorted(set(weight_map.values()))
    if named and not any((folder / name).exists() for name in named):
        if single.exists():  # an index of what was there before
            return [SINGLE_NAME], {}
        inner = [path.name for path in _folders_in(folder) if any((path / name).exists() for name in named)]
        if len(inner) == 1:
            weight_map = {name: f"{inner[0]}/{file}" for name, file in weight_map.items()}
            return [f"{inner[0]}/{name}" for name in named], weight_map
    if named:
        return named, weight_map
    if single.exists():
        return [SINGLE_NAME], {}
    files = [path for path in _weights_in(folder) if (folder / path).exists()]
    if files:
        _check_shards(folder, files)
        return files, {}
    inner = [] if _weights_in(folder) else [path.name for path in _folders_in(folder) if has_weights(path)]
    if len(inner) == 1:
        files, weight_map = files_of(folder / inner[0])
        weight_map = {name: f"{inner[0]}/{file}" for name, file in weight_map.items()}
        return [f"{inner[0]}/{file}" for file in files], weight_map
    raise CheckpointError(f"{folder}: {_why_no_weights(folder, inner)}")


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name to file name, of an index. Raises CheckpointError."""
    weight_map = read_json_object(path, CheckpointError, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map={weight_map!r:.80}: must map tensor names to file names")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not all(map(is_plain_name, file_name.split("/"))):
            raise CheckpointError(
                f"{path}: weight_map[{name!r:.80}]={file_name!r:.80}: must be a file name in the same folder, or in "
                "one in it"
            )
    return weight_map


def _check_shards(folder: Path, names: list[str]) -> None:
    """Refuse numbered shards of which one is missing: without an index nothing else says so."""
    for name in names:
        if match := _SHARD.search(name):
            num = int(match[1])
            stem = name[: match.start()]
            parts = (f"{stem}-{number:05d}-of-{num:05d}.safetensors" for number in range(1, num + 1))
            missing = next((part for part in parts if part not in names), None)
            if missing is not None:
                raise CheckpointError(f"{folder / missing}: missing shard: the weights are split into {num} files")


def _why_no_weights(folder: Path, inner: list[str]) -> str:
    if any(path.is_symlink() and not path.exists() for path in (folder / INDEX_NAME, *folder.glob("*.safetensors"))):
        return "its weights are a broken link: an unfinished download?"
    if adapters := [*folder.glob("adapter_*"), *folder.glob("*/adapter_*")]:
        about = adapters[0].parent / ADAPTER_NAME
        base = about.exists() and read_json_object(about, CheckpointError).get("base_model_name_or_path")
        of = f" of {base!r:.200}" if isinstance(base, str) else ""
        return f"an adapter (LoRA){of} without its model; merge it into that first (PEFT's merge_and_unload)"
    if inner:
        return f"weights are in several folders in it: {', '.join(inner[:3])}; give one of them"
    beside = sorted(path.name for end in ("bin", "gguf", "pt") for path in folder.glob(f"*.{end}"))
    use = "a file to give itself" if beside and beside[0].endswith(".gguf") else "which cannot be packed"
    named = f"; found {', '.join(beside[:3])}, {use}" if beside else ""
    return f"no {SINGLE_NAME} and no {INDEX_NAME}{named}"


def _stamp(path: Path) -> str:
    """The hub's hash of a file in its cache, else size and time of the last change, which are those of a copy that
    keeps times. (Numbers of inodes are not stable everywhere.)
    """
    try:
        file, about = path.resolve(), path.stat()
        if file.parent.name == "blobs" and _BLOB.fullmatch(file.name) and about.st_mtime_ns <= path.lstat().st_mtime_ns:
            return file.name  # not written to since the link to it was made
        return f"{about.st_size} bytes at {about.st_mtime_ns} ns"
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def _samples(path: Path) -> Iterator[bytes]:
    with reading(path, CheckpointError) as file:
        size = os.fstat(file.fileno()).st_size
        yield size.to_bytes(8, "little")
        if size <= _WHOLE_NBYTES:
            yield file.read(size)
            return
        for i in range(_NUM_SAMPLES):
            offset = i * (size - _SAMPLE_NBYTES) // (_NUM_SAMPLES - 1)
            yield os.pread(file.fileno(), _SAMPLE_NBYTES, offset)
