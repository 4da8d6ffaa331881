"""From what a user calls a model to its packed store: the checkpoint, rewritten one expert or tensor at a time."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import str_to_torch_dtype

from expertly.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from expertly.core.headers import TensorSpec
from expertly.core.units import format_nbytes
from expertly.core.untrusted import CONFIG, check_model_files, read_json_object
from expertly.data import demo_folder
from expertly.formats import FORMATS, format_of, rounding_format
from expertly.formats.gguf import GgufLayout
from expertly.formats.tiles import TILE_OUTPUTS, TiledFormat
from expertly.model.conversion import (
    ACCEPTED,
    Conversion,
    ExpertsReader,
    Group,
    cast,
    make_layout,
    read_group,
    to_bytes,
)
from expertly.model.dequantizer import check_matrices
from expertly.model.gguf import GgufConversion, config_of, extras_of, kept_formats, open_checkpoint
from expertly.model.hub import download, split_name
from expertly.model.quantisations import is_named
from expertly.model.structure import build_meta_model, find_experts
from expertly.model.tables import SCALES, find_rows, table_modules
from expertly.model.tiled import can_be_tiled
from expertly.store.cache import entry_folder, list_entries, make_room, make_room_for_this_version, stores_folder
from expertly.store.checkpoint import ADAPTER_NAME, Bytes, Checkpoint, TensorRef
from expertly.store.gguf import SUFFIX
from expertly.store.manifest import (
    IS_FLOAT,
    ITEMSIZE,
    MANIFEST_NAME,
    STORE_DTYPES,
    Manifest,
    Rounding,
    check_store_dtype,
)
from expertly.store.packed import PackedStore, is_packed_store, tiles_name
from expertly.store.writer import Progress, StoreWriter

DEMO_NAME = "demo"

_PACKED_ROWS = 1024
"""Of a dense matrix at a time."""

_ACCEPTED = "a checkpoint folder, a GGUF file, a packed store or a hub id (owner/NAME, owner/NAME:Q4_K_M)"


def pack_cached(
    model: str | Path | None,
    dtype: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    quantize: str | None = None,
) -> PackedStore:
    """The packed store of `model`, made in the cache folder where it is not there yet.

    `model`: a checkpoint folder, a GGUF file, a packed store (opened as it is), a hub id (downloaded), or None or
    "demo" for the demo model. `quantize`: see `pack`. Raises ExpertlyError subclasses that say what is wrong with the
    model, an option or the folder.
    """
    folder = local_folder(model)
    if folder is None and quantize is None:
        folder = store_alone(str(model), dtype, cache_dir)
    keeps_size = dtype is None and quantize is None
    folder = folder or download(str(model), stores_folder(cache_dir) if keeps_size else None)
    if is_packed_store(folder):
        return _open_store(folder, dtype, quantize)
    checkpoint = open_source(folder)
    weights = weights_of(checkpoint, dtype, quantize)
    folder = _cached_folder(checkpoint, weights.format or weights.dtype, cache_dir)
    return _pack(checkpoint, folder, weights, progress)


def pack(
    source: str | Path,
    folder: str | Path,
    dtype: str | None = None,
    progress: Progress | None = None,
    quantize: str | None = None,
) -> PackedStore:
    """Write the checkpoint folder or GGUF file `source` as a packed store at `folder`, and open it.

    A store of it that is already there is opened as it is. `dtype` is that of the experts; by default they keep the
    weight format of a checkpoint that has one of `expertly.formats`, else have the config's, or what most weights have.
    Dense tensors that are not quantised stay as they are stored. `quantize`: round the experts of a checkpoint that is
    not quantised to this format, which changes tokens.
    `progress(done_nbytes, total_nbytes)`. Holds one expert, or one quantised dense tensor, in memory. Raises
    CheckpointError (UnsupportedModelError) for the source, StoreError for what is at `folder` or a disk that is full,
    ConfigError for an option.
    """
    if is_packed_store(Path(source)):
        raise CheckpointError(f"{source}: already a packed store; give the checkpoint that it was packed from")
    checkpoint = open_source(Path(source))
    return _pack(checkpoint, Path(folder), weights_of(checkpoint, dtype, quantize), progress)


def open_source(path: Path) -> Checkpoint:
    """Also refuses small files that transformers must not open, and says what is left out."""
    if path.is_dir():
        check_model_files(path, CheckpointError)
    checkpoint = open_checkpoint(path)
    if (path / ADAPTER_NAME).exists():
        logging.getLogger("expertly").warning(
            "%s: an adapter (LoRA) is not applied: texts are those of the model without it; merge it into the weights "
            "first (PEFT's merge_and_unload)",
            path / ADAPTER_NAME,
        )
    quantization = _quantization_of(checkpoint)
    tensors = checkpoint.tensors if checkpoint.gguf else _with_scales_of_shards(checkpoint.tensors)
    return replace(checkpoint, config={**checkpoint.config, **quantization}, tensors=tensors)


_SHARD = re.compile(r"(.+)\.shard_\d+\.weight")


def _with_scales_of_shards(tensors: Mapping[str, TensorRef]) -> Mapping[str, TensorRef]:
    """The tensors, where each FP8 shard of a table has the scale that is stored once for all of them, as
    Qwen3.8-Flash-Next does.
    """
    made, shared = dict(tensors), set[str]()
    for name, ref in tensors.items():
        match = _SHARD.fullmatch(name)
        if match is None or ref.dtype != "F8_E4M3":
            continue
        for ending in SCALES:
            scale = tensors.get(match[1] + ending)
            if scale is not None and math.prod(scale.shape) == 1:
                made.setdefault(name.removesuffix(".weight") + ending, scale)
                shared.add(match[1] + ending)
    return {name: ref for name, ref in made.items() if name not in shared}


_QUANTIZATION = "quantization_config"

_MLX, _FIRST_NAME = "quantization", "compression_config"

_OF_MLX = ("glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Families whose weights mlx-lm stores as transformers does, but for their quantisation and stacked experts."""

_MODELOPT_NAME = "hf_quant_config.json"


def quantization_in(config: Mapping[str, Any]) -> Any:
    """A config's `quantization_config`, or its text's, by the first name of compressed-tensors, too; with what
    DeepSeek-V4's config.json says beside it of experts.
    """
    text, dtype = config.get("text_config"), config.get("expert_dtype")
    parts = (config, text if isinstance(text, dict) else {})
    fields = next((part[key] for key in (_QUANTIZATION, _FIRST_NAME) for part in parts if part.get(key)), None)
    return fields if dtype is None or not isinstance(fields, dict) else {"expert_dtype": dtype, **fields}


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_quantization(value) if key == "text_config" and isinstance(value, dict) else value
        for key, value in config.items()
        if key not in (_QUANTIZATION, _FIRST_NAME, _MLX)
    }


def _quantization_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """`quantization_config`, where others have it: MLX a field of another name, modelopt a file."""
    path, fields = checkpoint.folder / _MODELOPT_NAME, checkpoint.config.get(_MLX)
    if isinstance(fields, dict) and not checkpoint.gguf:
        model_type = str(checkpoint.config.get("model_type"))
        if model_type not in _OF_MLX:
            raise UnsupportedModelError(
                f"{checkpoint.folder / 'config.json'}: {_MLX}: MLX changes more than names in a {model_type}; accepted "
                f"of MLX: {', '.join(_OF_MLX)}; or a checkpoint in transformers' layout"
            )
        return {_QUANTIZATION: {**fields, "quant_method": "mlx"}}
    fields = quantization_in(checkpoint.config)
    if fields or not path.is_file():
        return {_QUANTIZATION: fields} if fields else {}
    fields = read_json_object(path, CheckpointError, CONFIG).get("quantization")
    return {_QUANTIZATION: {"quant_method": "modelopt", **fields}} if isinstance(fields, dict) else {}


@dataclass(frozen=True, slots=True)
class Weights:
    """How experts are stored: in a dtype, or in a weight `format` and computed in that dtype."""

    dtype: str
    format: str = ""
    rounded_to: str = ""  # the format, as --quantize calls it
    is_named: bool = False  # whether somebody asked for the dtype


def weights_of(checkpoint: Checkpoint, dtype: str | None, quantize: str | None = None) -> Weights:
    """In `dtype`, else in the checkpoint's format where it can be kept, or rounded. Raises as `default_dtype`."""
    if quantize is not None:
        form = rounding_format(quantize).name
        if dtype is not None:
            raise ConfigError(f"dtype={dtype!r} and quantize={quantize!r}: accepted: one of the two")
        quantization = checkpoint.config.get("quantization_config") or kept_formats(checkpoint)
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise ConfigError(
                f"quantize={quantize!r}: {checkpoint.folder} is quantised already ({method!r:.80}); accepted: without "
                "quantize, or a checkpoint of the model in bfloat16, float16 or float32"
            )
        return Weights(default_dtype(checkpoint), form, quantize)
    if dtype is not None:
        return Weights(check_store_dtype(dtype), is_named=True)
    computed = default_dtype(checkpoint)
    headers = {name: (ref.dtype, ref.shape) for name, ref in checkpoint.tensors.items()}
    form = kept_formats(checkpoint) or format_of(checkpoint.config.get(_QUANTIZATION), headers, computed)
    return Weights(computed, form)


def store_alone(name: str, dtype: str | None = None, cache_dir: Path | None = None) -> Path | None:
    """The newest store of a hub id whose checkpoint is no longer in the hub's cache; None where there is none."""
    repository, tag = split_name(name)
    folder = f"models--{repository.replace('/', '--')}"
    stores = []
    for entry in list_entries(cache_dir):
        _, is_its, path = entry.source.partition(f"/{folder}/snapshots/")
        is_asked = (dtype is None or entry.dtype == dtype) and (not tag or is_named(path, tag))
        if entry.problem is None and is_its and is_asked and not os.path.exists(entry.source):
            stores.append(entry.folder)
    return max(stores, key=lambda folder: (folder / MANIFEST_NAME).stat().st_mtime, default=None)


def source_folder(model: str | Path | None, store: Path | None = None) -> Path:
    """The folder or GGUF file of what a user calls a model: that, the demo model, or the hub's of an id, downloaded or
    from the hub's own cache. `store`: where a store as large as its weights is packed next. Raises CheckpointError
    saying why none of these worked.
    """
    return local_folder(model) or download(str(model), store)


def local_folder(model: str | Path | None) -> Path | None:
    """The same without the hub: None where `model` may be an id of it. Raises CheckpointError where it is neither."""
    if model is None or model == DEMO_NAME:
        return demo_folder()
    name, path = str(model), Path(model).expanduser()
    snapshots = list(path.glob("snapshots/*")) if (path / "refs").is_dir() else []
    if len(snapshots) == 1:  # of a repository in the hub's cache
        return snapshots[0]
    if name.strip() and (path.is_dir() or (path.suffix == SUFFIX and path.is_file())):
        return path
    if name.strip() and path.exists():
        raise CheckpointError(f"model={name!r}: a file; must be {_ACCEPTED}")
    is_path = isinstance(model, Path) or name.startswith((".", "/", "~"))
    if is_path or split_name(name)[0].count("/") > 1 or not name.strip():
        raise CheckpointError(f"model={name!r}: no such folder; must be {_ACCEPTED}")
    return None


def default_dtype(checkpoint: Checkpoint) -> str:
    """The config's dtype, else that of most bytes that are not quantised; float32 where a GGUF file quantises experts.
    Raises CheckpointError.
    """
    config = checkpoint.config
    if kept_formats(checkpoint):
        return "float32"  # transformers' own for a GGUF file, whose weights decode to it
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    for part, key in ((part, key) for part in parts for key in ("dtype", "torch_dtype") if part.get(key) is not None):
        try:
            return check_store_dtype(str(part[key]).removeprefix("torch."), key)
        except ConfigError as error:
            path = checkpoint.folder / "config.json"
            raise CheckpointError(f"{path}: {error}; or name one with dtype") from None
    nbytes: Counter[str] = Counter()
    for ref in checkpoint.tensors.values():
        nbytes[ref.dtype] += ref.nbytes
    stored = max(STORE_DTYPES, key=lambda name: nbytes[STORE_DTYPES[name]])
    return "bfloat16" if config.get("quantization_config") or not nbytes[STORE_DTYPES[stored]] else stored


def _open_store(
    folder: Path, dtype: str | None, quantize: str | None, identity: str | None = None, stamp: str = ""
) -> PackedStore:
    """The store that is there. Raises ConfigError where it is of another dtype or rounding than was asked for."""
    store = PackedStore.open(folder, identity, stamp)
    manifest, again = store.manifest, f"pack {store.manifest.source} again for another"
    if quantize is not None and quantize != (manifest.rounding and manifest.rounding.to):
        rounding_format(quantize)
        rounded = "" if manifest.rounding else ", not rounded"
        raise ConfigError(
            f"quantize={quantize!r}: the packed store {folder} holds {manifest.stored_as}{rounded}; {again}"
        )
    if dtype is not None and dtype != manifest.stored_as:
        if dtype not in FORMATS:
            check_store_dtype(dtype)
        raise ConfigError(f"dtype={dtype!r}: the packed store {folder} holds {manifest.stored_as}; {again}")
    return store


def _pack(checkpoint: Checkpoint, folder: Path, weights: Weights, progress: Progress | None) -> PackedStore:
    if is_packed_store(folder):
        dtype = None if weights.format else weights.dtype
        store = _open_store(folder, dtype, weights.rounded_to or None, checkpoint.identity, checkpoint.stamp)
    else:
        store = Packing(checkpoint, weights).write(folder, progress)
    return replace(store, checkpoint=None if checkpoint.gguf else checkpoint.folder)


def _cached_folder(checkpoint: Checkpoint, stored_as: str, cache_dir: Path | None) -> Path:
    """The cache's folder for the checkpoint's store: named by its identity, or by its stamp where that is taken by
    another folder's weights. A store of weights that have changed since is removed.
    """
    model_type = str(checkpoint.config.get("model_type"))
    by_identity = entry_folder(model_type, checkpoint.identity, stored_as, cache_dir)
    by_stamp = entry_folder(model_type, checkpoint.stamp, stored_as, cache_dir)
    for folder in (by_stamp, by_identity):
        make_room_for_this_version(folder)
        if not is_packed_store(folder):
            continue
        manifest = Manifest.read(folder)
        if manifest.stamp == checkpoint.stamp:
            return folder
        if os.path.exists(manifest.source) and not os.path.samefile(manifest.source, checkpoint.folder):
            return by_stamp
        make_room(folder, f"{checkpoint.folder}, or how it is read, may have changed since it was packed")
    return by_identity


_CODES = {torch.int32: "I32", torch.int64: "I64"}
"""Safetensors' names of the dtypes of buffers that a model computes."""


class Packing:
    """One checkpoint on its way into a store."""

    def __init__(self, checkpoint: Checkpoint, weights: Weights) -> None:
        """Plans everything from config and headers. Raises CheckpointError."""
        self._checkpoint, self._weights, dtype = checkpoint, weights, weights.dtype
        rounding = rounding_format(weights.rounded_to) if weights.rounded_to else None
        kept = bool(weights.format) and rounding is None
        self._torch_dtype: torch.dtype = getattr(torch, dtype)
        try:
            layout = GgufLayout() if checkpoint.gguf else make_layout(checkpoint.config.get(_QUANTIZATION), dtype)
            if layout is not None:
                check_matrices(layout, checkpoint.tensors)
        except UnsupportedModelError as error:  # of the config
            raise UnsupportedModelError(f"{checkpoint.folder / 'config.json'}: {error}") from None
        model = build_meta_model(config_of(checkpoint), self._torch_dtype)
        self._kept, self._model, self._tables = kept, model, table_modules(model)
        self._sites = find_experts(model, ITEMSIZE[dtype])
        self._plain = made = Conversion(model, sites=self._sites)
        if layout is not None:
            made = GgufConversion(model, checkpoint.gguf) if checkpoint.gguf else Conversion(model, layout, self._sites)
        self._conversion = made
        groups, unexpected = made.groups(checkpoint.tensors)
        self._readers = [ExpertsReader(site, checkpoint, made, groups, kept, rounding) for site in self._sites]
        expert_names = set().union(*(reader.source_names for reader in self._readers))
        self._check_unexpected(unexpected)
        self._dense_forms: dict[str, TiledFormat] = {}
        """Of layers beside the experts that keep their bytes, by module path."""
        self._of_tables = set[str]()
        """Tensors of tables in FP8, and their scales."""
        self._dense = self._plan_dense([group for group in groups.values() if expert_names.isdisjoint(group.names)])
        missing = made.missing(groups)
        computed: Any = model._expertly_computed
        can_be_read = (name for name in missing if self._plain.target(name) == (name, None))
        self._computed: dict[str, torch.Tensor] = {name: computed[name] for name in can_be_read if name in computed}
        for name, buffer in self._computed.items():
            self._dense[TensorSpec(name, _CODES[buffer.dtype], tuple(buffer.shape))] = None
        missing = [name for name in missing if name not in self._computed]
        if missing:
            reason = made.why_missing(checkpoint, missing[0])
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise CheckpointError(f"{checkpoint.folder}: no tensor for {missing[0]}{more}: {reason}")
        self.layers = tuple(reader.geometry for reader in self._readers)

    @property
    def dense_formats(self) -> dict[str, str]:
        return {path: form.name for path, form in self._dense_forms.items()}

    @property
    def dense(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self._dense}

    def write(self, folder: Path, progress: Progress | None) -> PackedStore:
        checkpoint = self._checkpoint
        plan = Manifest(
            identity=checkpoint.identity,
            source=str(checkpoint.folder.absolute()),
            model_type=str(checkpoint.config.get("model_type")),
            dtype=self._weights.dtype,
            layers=self.layers,
            sites=tuple(site.name for site in self._sites),
            files={},
            rounding=Rounding(self._weights.rounded_to) if self._weights.rounded_to else None,
            stamp=checkpoint.stamp,
            dense_formats=self.dense_formats,
        )
        self._say_what_is_converted()
        with StoreWriter(folder, plan, tuple(self._dense), progress) as writer:
            store = writer.finished_store()
            if store is not None:
                return store
            for layer, reader in enumerate(self._readers):
                writer.write_layer(layer, reader.experts(self._torch_dtype))
            writer.write_dense(chunk for spec in self._dense for chunk in self._dense_chunks(spec))
            config = _without_quantization(checkpoint.config)
            writer.write_file("config.json", (json.dumps(config, indent=2) + "\n").encode())
            with extras_of(checkpoint) as extras:
                writer.copy_extras(extras)
            if replace(checkpoint).stamp != plan.stamp:  # which that of `checkpoint` itself remembers
                raise CheckpointError(f"{checkpoint.folder}: its weights changed while they were packed; pack again")
            return writer.finish()

    def _say_what_is_converted(self) -> None:
        """One line where nobody asked for the dtype of quantised experts, which makes them larger."""
        readers = [reader for reader in self._readers if reader.is_decoded]
        if self._weights.is_named or not readers:
            return
        sizes = [reader.geometry.nbytes for reader in readers]
        stored = sum(self._checkpoint.tensors[name].nbytes for reader in readers for name in reader.source_names)
        logging.getLogger("expertly").warning(
            "%s: quantised experts of %d layers are decoded, as no format here keeps their bytes: %s in %s for %s",
            self._checkpoint.folder,
            len(readers),
            format_nbytes(sum(sizes)),
            self._weights.dtype,
            format_nbytes(stored),
        )

    def _plan_dense(self, groups: list[Group]) -> dict[TensorSpec, Group | None]:
        """What to write: a stored tensor as it is under its name (None), or a group's dequantised parameter."""
        plan: dict[TensorSpec, Group | None] = {}
        for group in groups:
            refs = {name: self._checkpoint.tensors[name] for name in group.names}
            expected, is_alone = self._conversion.shape(group.target), group.converter is None
            form = self._kept_form(group)
            if form is not None:
                path = group.target.removesuffix(".weight")
                self._dense_forms[path] = form
                shape = expected[0] // TILE_OUTPUTS, form.block_nbytes_of(*expected)
                plan[TensorSpec(tiles_name(path), "U8", shape)] = group
                continue
            if is_alone:
                self._check_shape(refs, expected)
            if rows := self._rows_in_fp8(group, refs):
                self._of_tables.update(rows)
                plan.update({TensorSpec(name, refs[name].dtype, refs[name].shape): None for name in rows})
                continue
            is_float = all(ref.dtype in IS_FLOAT for ref in refs.values())
            if self._checkpoint.gguf or (group.is_dequantized and not is_float):
                plan[TensorSpec(self._dense_name(group), STORE_DTYPES[self._weights.dtype], expected)] = group
                continue
            is_cast = is_alone and self._conversion.parameters[group.target].is_floating_point()
            for name, ref in refs.items():
                if is_cast and ref.dtype not in IS_FLOAT:
                    raise CheckpointError(f"{self._checkpoint.label(name)}: dtype={ref.dtype!r}: {ACCEPTED}")
                plan[TensorSpec(name, ref.dtype, ref.shape)] = None
        return plan

    def _rows_in_fp8(self, group: Group, refs: Mapping[str, TensorRef]) -> tuple[str, ...]:
        """The tensors of a table that is read by row in FP8, with their scales; none of other parameters."""
        module = self._tables.get(group.target.removesuffix(".weight"))
        if module is None or not group.is_dequantized or self._checkpoint.gguf:
            return ()
        groups, _ = self._plain.groups(group.names)
        rows = find_rows(groups.get(group.target), refs, module)
        return (*rows.names, *rows.scales) if rows is not None and rows.scales else ()

    def _check_shape(self, refs: Mapping[str, TensorRef], expected: tuple[int, ...]) -> None:
        """Of a dense tensor; GGUF's may have dimensions of 1 elsewhere."""
        for name, ref in refs.items():
            shapes = [[size for size in shape if size != 1] for shape in (ref.shape, expected)]
            if ref.shape != expected and not (self._checkpoint.gguf and shapes[0] == shapes[1]):
                label, source = self._checkpoint.label(name), self._checkpoint.sizes_from
                raise CheckpointError(f"{label}: shape {list(ref.shape)}, but {source} makes it {list(expected)}")

    def _kept_form(self, group: Group) -> TiledFormat | None:
        """The format of a linear layer's or an embedding's weight that stays in it: whole tiles."""
        path, _, last = group.target.rpartition(".")
        if (
            not self._kept
            or last != "weight"
            or self._plain.target(group.target) != (group.target, None)
            or not (can_be_tiled(self._model, path) or path in self._tables)
        ):
            return None
        rows, columns = self._conversion.shape(group.target)
        try:
            form, *further = dict.fromkeys(self._conversion.forms(group, self._checkpoint)) or (None,)
            if form is None or further:
                return None
            form.block_nbytes_of(rows, columns)
            self._conversion.check_sizes(group, self._checkpoint, rows, columns)
        except (ConfigError, CheckpointError):  # not in whole tiles: dequantising says what is wrong
            return None
        return form

    def _dense_name(self, group: Group) -> str:
        """A name that an unquantised checkpoint could have for the group's parameter."""
        for name in (*group.names, group.target):
            if self._plain.target(name) == (group.target, None):
                return name
        raise CheckpointError(f"{self._checkpoint.folder}: {group.target}: cannot be stored without its quantisation")

    def _dense_chunks(self, spec: TensorSpec) -> Iterator[Bytes]:
        """The bytes of a dense tensor; each chunk is only valid until the next."""
        group = self._dense[spec]
        if spec.name in self._computed:
            yield to_bytes(self._computed[spec.name])
            return
        if group is None:
            for chunk in self._checkpoint.read_chunks(spec.name):
                if spec.name in self._of_tables:
                    numbers = torch.from_numpy(chunk).view(str_to_torch_dtype[spec.dtype]).float()
                    if not bool(numbers.isfinite().all()):
                        raise CheckpointError(f"{self._checkpoint.label(spec.name)}: a number is not finite")
                yield chunk
            return
        form = self._dense_forms.get(group.target.removesuffix(".weight"))
        if form is not None:
            matrices = self._conversion.parts(self._conversion.forms(group, self._checkpoint), group, self._checkpoint)
            parts = [np.concatenate(several) for several in zip(*matrices, strict=True)]
            order = self._conversion.row_order(group)
            parts = parts if order is None else [part[order.numpy()] for part in parts]
            for first in range(0, len(parts[0]), _PACKED_ROWS):
                yield form.pack([part[first : first + _PACKED_ROWS] for part in parts]).reshape(-1)
            return
        tensor = self._conversion.convert(group, read_group(self._checkpoint, group))
        if tuple(tensor.shape) != spec.shape:
            raise CheckpointError(f"tensor {group.names[0]!r}: makes {list(tensor.shape)}, not {list(spec.shape)}")
        yield to_bytes(cast(tensor, self._torch_dtype, group.target))

    def _check_unexpected(self, names: list[str]) -> None:
        """Refuse experts that the config does not know, and any tensor of a GGUF file that means nothing."""
        checkpoint = self._checkpoint
        for name in names if checkpoint.gguf else ():
            model = f"a {checkpoint.gguf} model of {self._model.config.num_hidden_layers} layers"
            raise CheckpointError(f"{checkpoint.label(name)}: is of no part of {model}")
        for name, site in ((name, site) for site in self._sites for name in names):
            if name.startswith(f"{site.name}.expert"):
                expected = f"config.json says {site.geometry.num_experts} experts in {site.name}"
                raise CheckpointError(f"{checkpoint.label(name)}: belongs to no expert; {expected}")
