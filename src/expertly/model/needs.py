"""The memory and disk that a model needs, from its config and headers alone: no weight is read or downloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from expertly.core.errors import CheckpointError, ConfigError
from expertly.core.geometry import DenseShape, LayerGeometry, stored_as
from expertly.core.untrusted import CONFIG, read_json_object
from expertly.formats import expert_format, format_of
from expertly.formats.fp8 import FP8
from expertly.model import hooks
from expertly.model.gguf import config_of
from expertly.model.hub import HubModel, split_name
from expertly.model.packing import Packing, local_folder, open_source, quantization_in, weights_of
from expertly.model.structure import ExpertsSite, build_meta_model, dense_shape, find_experts, read_config
from expertly.model.tables import Table, find_tables, table_modules, without
from expertly.model.tiled import can_be_tiled, put_tiles
from expertly.native.kernels import STEP_NBYTES
from expertly.store.checkpoint import ADAPTER_NAME, Checkpoint, check_claims, has_weights
from expertly.store.manifest import ITEMSIZE, Rounding
from expertly.store.packed import PackedStore, dense_by_format, is_packed_store


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """A checkpoint's own bytes."""

    nbytes: int
    is_here: bool  # False: on the hub


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """A model's sizes when it runs: computed in `dtype`, with experts in that or in a weight format."""

    name: str
    model_type: str
    dtype: str
    layers: tuple[LayerGeometry, ...]
    dense: DenseShape  # bytes that a token's pass reads
    dense_by_format: dict[str, int]  # bytes by weight format (of linear layers) or dtype
    decoded_dense_nbytes: int  # on a device without kernels for weight formats
    config: dict[str, Any]  # with the defaults of its family
    stored: StoredWeights | None  # None: only a config exists
    tables_nbytes: int = 0  # of embeddings that are read by row from the packed store
    is_packed: bool = False
    rounding: Rounding | None = None  # of a packed store

    @property
    def dense_nbytes(self) -> int:
        return sum(self.dense_by_format.values())

    @property
    def experts_nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def stored_as(self) -> str:
        return stored_as(self.layers, self.dtype)


def needs_of(model: str | None) -> ModelNeeds:
    """The needs of a folder, GGUF file, packed store, config.json alone or hub id. Raises as packing would."""
    name = "demo" if model is None else str(model)
    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        return _of_config(name, path.parent)
    folder = local_folder(model)
    if folder is None:
        return _of_hub(name)
    if is_packed_store(folder):
        return _of_store(name, PackedStore.open(folder))
    if folder.is_file() or has_weights(folder) or (folder / ADAPTER_NAME).exists():
        return _of_checkpoint(name, open_source(folder), is_here=True)
    return _of_config(name, folder)


def _of_store(name: str, store: PackedStore) -> ModelNeeds:
    store.check_claims()
    manifest, stored = store.manifest, StoredWeights(store.nbytes, is_here=True)
    needs = _needs(name, store.folder, manifest.dtype, manifest.layers, manifest.dense_formats, store, stored)
    return replace(needs, is_packed=True, rounding=manifest.rounding)


def _of_hub(name: str) -> ModelNeeds:
    hub = HubModel.look_up(name)
    with hub.heads(split_name(name)[1]) as source:
        is_here = source.is_relative_to(hub.cached_path(""))
        return _of_checkpoint(name, open_source(source), is_here=is_here)


def _of_checkpoint(name: str, checkpoint: Checkpoint, *, is_here: bool) -> ModelNeeds:
    weights = weights_of(checkpoint, None)
    packing = Packing(checkpoint, weights)
    stored = StoredWeights(sum(ref.nbytes for ref in checkpoint.tensors.values()), is_here)
    source = config_of(checkpoint)
    return _needs(name, source, weights.dtype, packing.layers, packing.dense_formats, packing, stored)


def _needs(
    name: str,
    source: Path | PreTrainedConfig,
    dtype: str,
    layers: tuple[LayerGeometry, ...],
    formats: Mapping[str, str],
    dense: PackedStore | Packing,
    stored: StoredWeights,
) -> ModelNeeds:
    tensors: Any = dense.dense
    config, model, _, tables = _bare_model(source, dtype, formats, tensors)
    rest = without(tables, tensors)
    by_format = dense_by_format(rest, formats, dtype)
    decoded = sum(dense_by_format(rest, formats, dtype, is_decoded=True).values())
    return ModelNeeds(
        *(name, config["model_type"], dtype, layers, dense_shape(model), by_format, decoded, config, stored),
        tables_nbytes=sum(table.nbytes for table in tables),
    )


def _of_config(name: str, folder: Path) -> ModelNeeds:
    """Of a config alone."""
    path, kept, is_fp8, dtype = folder / "config.json", "", False, "bfloat16"
    if path.is_file():  # else reading the config says what is wanted
        raw = read_json_object(path, CheckpointError, CONFIG)
        check_claims(path, raw, None, CheckpointError)
        quantization = quantization_in(raw)
        kept = format_of(quantization, {}, dtype)
        is_fp8 = bool(kept) and isinstance(quantization, dict) and quantization.get("quant_method") == "fp8"
    config, model, sites, _ = _bare_model(folder, dtype, {})
    tables_nbytes = sum(module.weight.nbytes for module in table_modules(model).values())
    layers = tuple(expert_format(kept).geometry(site.geometry) if kept else site.geometry for site in sites)
    decoded = sum(parameter.nbytes for parameter in model.parameters()) - tables_nbytes
    tiles = _put_fp8(model) if is_fp8 else {}
    by_format = {dtype: sum(parameter.nbytes for parameter in model.parameters()) - tables_nbytes, **tiles}
    return ModelNeeds(
        *(name, config["model_type"], dtype, layers, dense_shape(model), by_format, decoded, config, None),
        tables_nbytes=tables_nbytes,
    )


def _bare_model(
    source: Path | PreTrainedConfig,
    dtype: str,
    formats: Mapping[str, str],
    tensors: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], Any, Sequence[ExpertsSite], list[Table]]:
    """The config with its defaults, the model on the meta device without its experts' weights, their sites, and which
    of `tensors` are tables that are read by row.
    """
    config = source if isinstance(source, PreTrainedConfig) else read_config(source)
    model = build_meta_model(config, getattr(torch, dtype))
    tables = find_tables(model, tensors or {}, formats)
    sites = find_experts(model, ITEMSIZE[dtype])
    for layer, site in enumerate(sites):
        hooks.strip(model, site)._expertly_layer = layer
    put_tiles(model, formats)
    if not dense_shape(model).layer_nbytes:
        raise CheckpointError(f"{config.name_or_path or source}: config.json makes layers without weights")
    return config.to_dict(), model, sites, tables


def _put_fp8(model: Any) -> dict[str, int]:
    """Give every linear layer but the head tiles, as packing does with FP8. Returns the bytes by format."""
    formats: dict[str, str] = {}
    for path, module in model.named_modules():
        if type(module) is nn.Linear and module is not model.get_output_embeddings() and can_be_tiled(model, path):
            with contextlib.suppress(ConfigError):  # not in whole tiles
                FP8.block_nbytes_of(*module.weight.shape)
                formats[path] = FP8.name
    put_tiles(model, formats)
    return {FP8.name: sum(model.get_submodule(path).tiles.nbytes for path in formats)} if formats else {}


# -- beside weights, of the tokens that it reads -----------------------------------------------------------------------


def _text_of(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def pass_nbytes(config: dict[str, Any], itemsize: int) -> int:
    """Activations of each token that a forward pass on a CPU reads."""
    text = _text_of(config)
    hidden = text.get("hidden_size", 0)
    top_k = next(
        (text[name] for name in ("num_experts_per_tok", "num_experts_per_token", "top_k") if text.get(name)), 1
    )
    wide = text.get("intermediate_size", 0) or 0
    # Llama 4 gives each expert a copy of all tokens, scaled, and sums as many outputs.
    copies = 3 * text.get("num_local_experts", 0) if text.get("model_type") == "llama4_text" else 0
    return int(itemsize * (hidden * (8 + 2 * top_k + copies) + 3 * wide))


def kv_cache_nbytes(config: dict[str, Any], context: int, itemsize: int, *, is_coded: bool = False) -> int:
    """Keys and values of `context` tokens of one request; an upper bound for sliding, shared or compressed layers.
    `is_coded`: in 8 bits (model/kv_codes.py), and those of one layer as numbers, which a prompt's attention reads.
    """
    text = _text_of(config)
    heads = text.get("num_attention_heads", text.get("num_heads", 1))
    hidden = text.get("hidden_size", 0)
    size = text.get("head_dim") or hidden // max(1, heads)
    key_size = text.get("qk_nope_head_dim", 0) + text.get("qk_rope_head_dim", 0) or size
    value_size = text.get("v_head_dim") or size
    kv_heads = heads if "kv_lora_rank" in text else text.get("num_key_value_heads") or heads
    layers = text.get("num_hidden_layers", text.get("num_layers", 0))
    width = kv_heads * (key_size + value_size)
    if not is_coded:
        return layers * width * context * itemsize
    return (layers * (width + kv_heads * 2 * STEP_NBYTES) + width * (itemsize + 2)) * context
