"""The memory and disk that a model needs, from its config and headers alone: no weight is read or downloaded."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from expertly.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from expertly.core.geometry import DenseShape, LayerGeometry, stored_as
from expertly.core.untrusted import CONFIG, read_json_object
from expertly.formats import expert_format
from expertly.formats.fp8 import FP8
from expertly.model import hooks
from expertly.model.conversion import make_quantizer
from expertly.model.gguf import config_of, open_checkpoint
from expertly.model.hub import HubModel
from expertly.model.packing import Packing, Weights, kept_format, local_folder, weights_of
from expertly.model.structure import ExpertsSite, build_meta_model, dense_shape, find_experts, read_config
from expertly.model.tiled import put_tiles
from expertly.store.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint, check_claims
from expertly.store.manifest import ITEMSIZE, Rounding, check_store_dtype
from expertly.store.packed import PackedStore, is_packed_store


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """A checkpoint's own bytes. `experts_nbytes` is None where experts cannot be distinguished from the rest."""

    nbytes: int
    experts_nbytes: int | None
    dtypes: dict[str, int]  # safetensors' name to bytes
    largest_file_nbytes: int
    is_here: bool  # False: on the hub


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """A model's sizes when it runs: computed in `dtype`, with experts in that or in a weight format."""

    name: str
    model_type: str
    dtype: str
    layers: tuple[LayerGeometry, ...]
    dense_nbytes: int
    dense: DenseShape  # bytes that a token's pass reads
    dense_by_format: dict[str, int]  # bytes by weight format (of linear layers) or dtype
    decoded_dense_nbytes: int  # on a device without kernels for weight formats
    config: dict[str, Any]  # with the defaults of its family
    stored: StoredWeights | None  # None: only a config exists
    is_packed: bool
    refused: str | None  # the reason why it cannot be packed
    rounding: Rounding | None = None  # of a packed store

    @property
    def experts_nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def stored_as(self) -> str:
        return stored_as(self.layers, self.dtype)


def needs_of(model: str | None, dtype: str | None = None) -> ModelNeeds:
    """The needs of a checkpoint folder, a packed store, a config.json or a folder with only that, or a hub id. Raises
    CheckpointError or UnsupportedModelError with the reason, as packing would.
    """
    name = "demo" if model is None else str(model)
    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        return _of_folder(name, path.parent, dtype, has_weights=False)
    folder = local_folder(model)
    if folder is None:
        hub = HubModel.find(name)
        with tempfile.TemporaryDirectory(prefix="expertly-") as made:
            hub.fetch("config.json", Path(made))
            return _of_checkpoint(name, hub.checkpoint(Path(made)), dtype, hub.files)
    if is_packed_store(folder):
        return _of_store(name, PackedStore.open(folder))
    has_weights = folder.is_file() or any((folder / one).exists() for one in (SINGLE_NAME, INDEX_NAME))
    return _of_folder(name, folder, dtype, has_weights=has_weights)


def _of_store(name: str, store: PackedStore) -> ModelNeeds:
    store.check_claims()
    config, model, _ = _bare_model(store.folder, store.manifest.dtype, store.manifest.dense_formats)
    stored = StoredWeights(store.nbytes, store.experts_stored_nbytes, {}, 0, True)
    layers = store.manifest.layers
    of, decoded = store.manifest, sum(store.dense_by_format(is_decoded=True).values())
    return ModelNeeds(
        *(name, config["model_type"], of.dtype, layers, store.dense_nbytes, dense_shape(model)),
        *(store.dense_by_format(), decoded, config, stored, True, None),
        rounding=of.rounding,
    )


def _of_folder(name: str, folder: Path, dtype: str | None, *, has_weights: bool) -> ModelNeeds:
    if has_weights:
        checkpoint = open_checkpoint(folder)
        beside = folder.parent if checkpoint.gguf else folder
        sizes = {one: (beside / one).stat().st_size for one in checkpoint.headers}
        return _of_checkpoint(name, checkpoint, dtype, sizes, is_here=True)
    path, kept = folder / "config.json", ""
    if path.is_file():  # else reading the config says what is wanted
        config = read_json_object(path, CheckpointError, CONFIG)
        check_claims(path, config, None, CheckpointError)
        kept = kept_format(config, "bfloat16") if dtype is None else ""
    return _of_config(name, folder, Weights(check_store_dtype(dtype or "bfloat16"), kept), None, None)


def _of_checkpoint(
    name: str, checkpoint: Checkpoint, dtype: str | None, file_sizes: dict[str, int], is_here: bool = False
) -> ModelNeeds:
    weights = weights_of(checkpoint, dtype)
    refused = None
    try:
        make_quantizer(checkpoint.config.get("quantization_config"), weights.dtype)
    except UnsupportedModelError as error:
        refused = str(error)
    packing = None if refused is not None else Packing(checkpoint, weights)
    dtypes: dict[str, int] = {}
    for ref in checkpoint.tensors.values():
        dtypes[ref.dtype] = dtypes.get(ref.dtype, 0) + ref.nbytes
    stored = StoredWeights(
        nbytes=sum(dtypes.values()),
        experts_nbytes=None if packing is None else sum(checkpoint.tensors[one].nbytes for one in packing.expert_names),
        dtypes=dict(sorted(dtypes.items(), key=lambda item: -item[1])),
        largest_file_nbytes=max((file_sizes[ref.path.name] for ref in checkpoint.tensors.values()), default=0),
        is_here=is_here,
    )
    return _of_config(name, config_of(checkpoint), weights, stored, refused, packing)


def _of_config(
    name: str,
    source: Path | PreTrainedConfig,
    weights: Weights,
    stored: StoredWeights | None,
    refused: str | None,
    packing: Packing | None = None,
) -> ModelNeeds:
    config, model, sites = _bare_model(source, weights.dtype, {} if packing is None else packing.dense_formats)
    if packing is not None:
        layers, dense_nbytes, by_format = packing.layers, packing.dense_nbytes, packing.dense_by_format()
        decoded = sum(packing.dense_by_format(is_decoded=True).values())
    else:
        kept = expert_format(weights.format) if weights.format else None
        layers = tuple(site.geometry if kept is None else kept.geometry(site.geometry) for site in sites)
        decoded = sum(parameter.nbytes for parameter in model.parameters())
        tiles = _put_fp8(model) if weights.format == FP8.name else 0
        by_format = {weights.dtype: sum(parameter.nbytes for parameter in model.parameters())}
        by_format |= {FP8.name: tiles} if tiles else {}
        dense_nbytes = sum(by_format.values())
    return ModelNeeds(
        *(name, config["model_type"], weights.dtype, layers, dense_nbytes, dense_shape(model)),
        *(by_format, decoded, config, stored, False, refused),
    )


def _bare_model(
    source: Path | PreTrainedConfig, dtype: str, formats: Mapping[str, str]
) -> tuple[dict[str, Any], Any, Sequence[ExpertsSite]]:
    """The config with its defaults, the model on the meta device without its experts' weights, and their sites.
    `formats`: weight formats of linear layers, by path.
    """
    config = source if isinstance(source, PreTrainedConfig) else read_config(source)
    model = build_meta_model(config, getattr(torch, dtype))
    sites = find_experts(model, ITEMSIZE[dtype])
    for layer, site in enumerate(sites):
        hooks.strip(model, site)._expertly_layer = layer
    put_tiles(model, formats)
    if not dense_shape(model).layer_nbytes:
        raise CheckpointError(f"{config.name_or_path or source}: config.json makes layers without weights")
    return config.to_dict(), model, sites


def _put_fp8(model: Any) -> int:
    """Give every linear layer but the head tiles, as packing does with checkpoints in FP8. Returns their bytes."""
    formats: dict[str, str] = {}
    for path, one in model.named_modules():
        if type(one) is nn.Linear and one is not model.get_output_embeddings():
            with contextlib.suppress(ConfigError):  # not in whole tiles
                FP8.block_nbytes_of(*one.weight.shape)
                formats[path] = FP8.name
    put_tiles(model, formats)
    return sum(model.get_submodule(path).tiles.nbytes for path in formats)
