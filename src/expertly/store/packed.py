"""A packed store: a checkpoint rewritten so that any part of any expert is one contiguous read."""

from __future__ import annotations

import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import xxhash

from expertly.core.errors import StoreError
from expertly.core.geometry import PAGE_NBYTES, Geometry, LayerGeometry
from expertly.core.headers import TensorInfo, TensorSpec, read_safetensors_header
from expertly.core.untrusted import CONFIG, read_json_object, reading
from expertly.formats import FORMATS
from expertly.formats.tiles import TILE_OUTPUTS
from expertly.store.checkpoint import INDEX_NAME, check_claims
from expertly.store.manifest import IS_FLOAT, ITEMSIZE, JOURNAL_NAME, MANIFEST_NAME, PACK_AGAIN, STORE_DTYPES, Manifest
from expertly.store.sums import CHECK_EVERY, Sums, open_sums, sums_name

DENSE_NAME = "dense.safetensors"
EXPERTS_KEY = "experts"

_CHUNK_NBYTES = 4 << 20
_OF_CONTENT = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
"""What changes where a file is replaced, or written to."""


def experts_name(layer: int) -> str:
    return f"experts-{layer:05d}.safetensors"


def expert_files(layer: int) -> tuple[str, str]:
    return experts_name(layer), sums_name(layer)


def experts_spec(layer: LayerGeometry, dtype: str) -> TensorSpec:
    """Of the file `experts_name`: [E, I, M, H] (M: gate if any, up, down turned), or bytes [E, I / G, nbytes]."""
    if layer.format:
        return TensorSpec(EXPERTS_KEY, "U8", (layer.num_experts, layer.num_blocks, layer.block_nbytes))
    shape = (layer.num_experts, layer.intermediate_size, layer.num_matrices, layer.hidden_size)
    return TensorSpec(EXPERTS_KEY, STORE_DTYPES[dtype], shape)


def tiles_name(path: str) -> str:
    """The name of the tensor of a linear layer in a weight format: bytes [outputs / 16, nbytes]."""
    return f"{path}.tiles"


def dense_by_format(
    tensors: Mapping[str, TensorInfo] | Mapping[str, TensorSpec],
    formats: Mapping[str, str],
    dtype: str,
    *,
    is_decoded: bool = False,
) -> dict[str, int]:
    """Bytes of dense tensors once loaded in `dtype`, by weight format or dtype, the largest first. `formats`: of linear
    layers, by path. `is_decoded`: the device decodes these when it loads them.
    """
    kept = {tiles_name(path): FORMATS[name] for path, name in formats.items()}
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        form = kept.get(name)
        if form is not None and is_decoded:
            sizes[dtype] += tensor.nbytes // form.tile_nbytes * TILE_OUTPUTS * form.group * ITEMSIZE[dtype]
        elif form is None and tensor.dtype in IS_FLOAT:
            sizes[dtype] += math.prod(tensor.shape) * ITEMSIZE[dtype]
        else:
            sizes[form.name if form else tensor.dtype.lower()] += tensor.nbytes
    return dict(sizes.most_common())


_EXTRA_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")
KIMI_CODE = "tokenization_kimi.py"
"""Of Kimi's tokenizer, which is read and not run."""
_EXTRA_NAMES = ("LICENSE", "NOTICE", KIMI_CODE)
_NOT_EXTRA = ("config.json", MANIFEST_NAME, JOURNAL_NAME, "adapter_config.json")


def is_extra(name: str) -> bool:
    """Whether a store has copies of such small files: tokenizer, generation config, chat template, licence."""
    has_name = name.endswith(_EXTRA_SUFFIXES) or name in _EXTRA_NAMES
    return has_name and name not in _NOT_EXTRA and not name.startswith(".") and not name.endswith(".index.json")


def is_text(name: str) -> bool:
    """Whether one of these files is for people alone: it goes with the store, and may be edited."""
    return is_extra(name) and Path(name).suffix in ("", ".md", ".txt") and name not in ("vocab.txt", "merges.txt")


def is_packed_store(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file()


class LayerFile(NamedTuple):
    """Where the experts of a layer lie."""

    path: Path
    begin: int  # offset of the file's first expert, a multiple of 4096; the next is `expert_nbytes` further
    sums: Sums | None  # with which what is read is compared; None: it is not
    places: Sequence[int]  # of each expert its place in the file, from 0
    check_every: int = CHECK_EVERY  # of so many reads of a block one is compared; the first is, too


class ExtentSource(Protocol):
    """The part of a PackedStore that reading needs."""

    def layer_file(self, layer: int) -> LayerFile:
        """Where the experts of a layer lie."""


@dataclass(frozen=True)
class PackedStore:
    """An opened store. Sizes and headers have been checked. Only headers and sums are in memory; no file is open."""

    folder: Path
    manifest: Manifest
    extents: tuple[tuple[Path, int], ...]  # by layer: the file, and the offset of expert 0 in it
    dense: Mapping[str, TensorInfo]
    sums: tuple[Sums, ...] = ()  # by layer; empty: reads are not compared
    checkpoint: Path | None = None  # the folder that it was opened for, which has newer small files
    check_every: int = CHECK_EVERY  # see LayerFile
    checked: Mapping[str, os.stat_result] = field(default_factory=dict)  # what files were when they were compared

    @classmethod
    def open(cls, folder: Path, expect_identity: str | None = None, stamp: str = "") -> PackedStore:
        """Raises StoreError naming the file that is missing, damaged or of another size, or if the store was packed
        from another checkpoint than that of `expect_identity` and `stamp`.
        """
        if not is_packed_store(folder):
            problem = f"not a packed store (no {MANIFEST_NAME})" if folder.is_dir() else "no such folder"
            raise StoreError(f"{folder}: {problem}")
        manifest = Manifest.read(folder)
        if expect_identity not in (None, manifest.identity) or stamp not in ("", manifest.stamp):
            raise StoreError(
                f"{folder}: packed from another checkpoint (of {manifest.source}, identity {manifest.identity[:16]}), "
                f"or that one, or how it is read, has changed since{PACK_AGAIN}"
            )
        layers, files = list(enumerate(manifest.layers)), manifest.files
        expert_names = [name for number, _ in layers for name in expert_files(number)]
        for name in ("config.json", INDEX_NAME, DENSE_NAME, *expert_names):
            if name not in files:
                raise StoreError(f"{folder / MANIFEST_NAME}: files lacks {name!r}{PACK_AGAIN}")
        for name, entry in files.items():
            if not is_text(name):
                _check_size(folder / name, entry.nbytes)
        extents = tuple(_extent(folder, manifest.dtype, number, layer) for number, layer in layers)
        sums = tuple(open_sums(folder, number, layer, files[sums_name(number)]) for number, layer in layers)
        return cls(folder, manifest, extents, _header(folder / DENSE_NAME), sums)

    def geometry(self, segments: int = 1) -> Geometry:
        """Raises ConfigError where `segments` does not divide an intermediate size."""
        return Geometry(self.manifest.layers, segments)

    def layer_file(self, layer: int) -> LayerFile:
        sums = self.sums[layer] if self.sums else None
        places = range(self.manifest.layers[layer].num_experts)
        return LayerFile(*self.extents[layer], sums, places, self.check_every)

    @property
    def extras(self) -> Path:
        """The folder whose tokenizer, generation config and chat template are used."""
        return self.checkpoint or self.folder

    @property
    def experts_nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.manifest.layers)

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_json_object(self.folder / "config.json", StoreError, CONFIG)

    @property
    def positions(self) -> int | None:
        """The most tokens of a text, if the config has a limit."""
        text = self.config.get("text_config")
        most = (text if isinstance(text, dict) else self.config).get("max_position_embeddings")
        return most if type(most) is int and most > 0 else None

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the dense tensors once loaded."""
        return sum(self.dense_by_format().values())

    def dense_by_format(self, *, is_decoded: bool = False) -> dict[str, int]:
        """`dense_nbytes` by weight format or dtype. `is_decoded`: on a device without kernels for weight formats."""
        return dense_by_format(self.dense, self.manifest.dense_formats, self.manifest.dtype, is_decoded=is_decoded)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(entry.nbytes for entry in self.manifest.files.values())

    def check_claims(self) -> None:
        """Raises StoreError where the config has far more layers or experts than the store."""
        shapes: dict[str, tuple[int, ...]] = {name: info.shape for name, info in self.dense.items()}
        dtype, layers = self.manifest.dtype, self.manifest.layers
        shapes |= {f"experts.{i}": experts_spec(layer, dtype).shape for i, layer in enumerate(layers)}
        check_claims(self.folder / "config.json", self.config, shapes, StoreError)

    def check_dense(self) -> Mapping[str, os.stat_result]:
        """Compare all files but experts with the manifest. Returns what they were then. Raises StoreError."""
        names = ("config.json", INDEX_NAME, DENSE_NAME, *filter(is_extra, self.manifest.files))
        return {name: self._check(name) for name in names if not is_text(name)}

    def check_since(self) -> None:
        """Raises StoreError where one of the files that were `checked` has been written to, or replaced, since then."""
        for name, about in self.checked.items():
            now = _about(self.folder / name)
            if any(getattr(about, each) != getattr(now, each) for each in _OF_CONTENT):
                raise StoreError(f"{self.folder / name}: was written to while the model was loaded; load it again")

    def check_layer(self, layer: int) -> None:
        """Compare the experts of a layer with the manifest. Raises StoreError."""
        for name in expert_files(layer):
            self._check(name)

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Open again, which checks sizes and headers, and compare all files with their checksums.
        `progress(done_nbytes, total_nbytes)`. Raises StoreError naming the first file that is damaged.
        """
        PackedStore.open(self.folder)
        sizes = {name: entry.nbytes for name, entry in self.manifest.files.items() if not is_text(name)}
        done, total = 0, sum(sizes.values())
        for name, nbytes in sizes.items():
            self._check(name, lambda read, done=done: progress(done + read, total))  # type: ignore[misc]
            done += nbytes

    def _check(self, name: str, progress: Callable[[int], None] = lambda nbytes: None) -> os.stat_result:
        """Compare a file with the manifest. Returns what it was before. `progress`: bytes of it that were read."""
        path, written, digest = self.folder / name, self.manifest.files[name].checksum, xxhash.xxh3_64()
        about, done = _about(path), 0
        buffer = memoryview(bytearray(min(_CHUNK_NBYTES, about.st_size + 1)))
        with reading(path, StoreError) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                done += count
                progress(done)
        if digest.intdigest() != written:
            raise StoreError(
                f"{path}: checksum {digest.intdigest():016x}, but it was written with {written:016x}: damaged"
                f"{PACK_AGAIN}"
            )
        return about


def _about(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror}){PACK_AGAIN}") from None


def _check_size(path: Path, nbytes: int) -> None:
    about = _about(path)
    if not stat.S_ISREG(about.st_mode):  # to open a pipe would wait for ever
        raise StoreError(f"{path}: must be a file{PACK_AGAIN}")
    if about.st_size != nbytes:
        problem = "truncated" if about.st_size < nbytes else "changed"
        raise StoreError(f"{path}: {problem}: {about.st_size} bytes, but {MANIFEST_NAME} says {nbytes}{PACK_AGAIN}")


def _header(path: Path) -> dict[str, TensorInfo]:
    try:
        return read_safetensors_header(path, StoreError)
    except StoreError as error:
        raise StoreError(f"{error}{PACK_AGAIN}") from None


def _extent(folder: Path, dtype: str, index: int, layer: LayerGeometry) -> tuple[Path, int]:
    path, spec = folder / experts_name(index), experts_spec(layer, dtype)
    info = _header(path).get(EXPERTS_KEY)
    if info is None or (info.dtype, info.shape) != (spec.dtype, spec.shape) or info.begin % PAGE_NBYTES:
        stored = "no such tensor" if info is None else f"{info.dtype} {list(info.shape)} at offset {info.begin}"
        raise StoreError(
            f"{path}: tensor {EXPERTS_KEY!r}: {stored}; must be {spec.dtype} {list(spec.shape)} at a multiple of "
            f"{PAGE_NBYTES}{PACK_AGAIN}"
        )
    return path, info.begin
