"""Layers that keep a checkpoint's quantised bytes in memory, linear ones and tables of embeddings.

Their weights lie in the tiles of a weight format, 16 outputs after the other (`formats/tiles.py`). The compiled kernels
multiply straight from them. Of a table the blocks of the tokens' rows are decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from expertly.core.errors import ConfigError, ModelUseError
from expertly.formats import FORMATS
from expertly.formats.tiles import TILE_OUTPUTS, TiledFormat
from expertly.native.kernels import Kernels, are_plain

_DECODED_NBYTES = 8 << 20
"""Of rows that are decoded at a time."""


class TiledLayer(nn.Module):
    """Mixed in before a layer's class: its weight [rows, columns] is tiles, uint8 [rows / 16, nbytes]; no training."""

    tiles: torch.Tensor
    _expertly_format: TiledFormat
    _expertly_dtype: torch.dtype  # that the layer computes in, to which weights are rounded
    _expertly_kernels: Kernels | None

    @property
    def weight(self) -> torch.Tensor:
        """A decoded copy, for whoever asks for it by name: changing it changes nothing."""
        rows = TILE_OUTPUTS * len(self.tiles)
        weight = torch.empty(rows, self._columns, dtype=self._expertly_dtype, device=self.tiles.device)
        for part, blocks in self._parts():
            weight[part] = self._expertly_format.decode(blocks)
        return weight

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Raises ModelUseError where somebody gives the layer another weight."""
        if name == "weight":
            raise self.refusal(name)
        super().register_parameter(name, param)

    def refusal(self, attempt: str) -> ModelUseError:
        return ModelUseError(
            f"{attempt}: this layer keeps its bytes in {self._expertly_format.name} and takes no other; to undo that, "
            f"pack and load the model with dtype={str(self._expertly_dtype).removeprefix('torch.')!r}"
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self._expertly_format.name}"

    @property
    def _columns(self) -> int:
        form = self._expertly_format
        return self.tiles.shape[1] // form.tile_nbytes * form.group

    @property
    def _blocks_at_once(self) -> int:
        return max(1, _DECODED_NBYTES // (TILE_OUTPUTS * self._columns * self._expertly_dtype.itemsize))

    def _parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Some rows at a time, and their blocks."""
        first = 0
        for blocks in self.tiles.split(self._blocks_at_once):
            rows = slice(first, first + TILE_OUTPUTS * len(blocks))
            yield rows, blocks
            first = rows.stop


class TiledLinear(TiledLayer, nn.Linear):  # type: ignore[override]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kernels, bias, dtype, tiles = self._expertly_kernels, self.bias, self._expertly_dtype, self.tiles
        width = input.shape[-1]
        num_tokens = input.numel() // width if width else 0
        if (
            kernels is None
            or not num_tokens
            or width != self.in_features
            or input.dtype != dtype
            or not are_plain(input, bias)
            or not tiles.is_cpu
            or (bias is not None and not bias.is_contiguous())
        ):
            return linear(input, self.weight, bias)
        out = input.new_empty(*input.shape[:-1], self.out_features)
        kernels.dots(tiles.data_ptr(), input.contiguous(), out, tiles.shape[1], bias, self._expertly_format.kernel)
        return out


class _SharingLinear(TiledLinear):
    """Whose weight is another's, as a head's may be the table's."""

    _expertly_owner: tuple[TiledLayer]  # as a module of its own it would be saved twice

    @property
    def tiles(self) -> torch.Tensor:  # type: ignore[override]
        return self._expertly_owner[0].tiles


class TiledEmbedding(TiledLayer, nn.Embedding):  # type: ignore[override]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kernels, tiles, width = self._expertly_kernels, self.tiles, self.embedding_dim
        ids = input.reshape(-1)
        is_usual = kernels is not None and input.is_cpu and tiles.is_cpu and not input.is_floating_point()
        if kernels is None or not is_usual or not ids.numel() or torch.compiler.is_compiling():
            return embedding(input, self.weight, self.padding_idx)
        places = dict[int, list[int]]()  # of the tokens in each block
        tokens = ids.tolist()
        for place, token in enumerate(tokens):
            places.setdefault(token // TILE_OUTPUTS, []).append(place)
        if min(tokens) < 0 or max(tokens) >= self.num_embeddings:
            raise IndexError("index out of range in self")  # torch's words
        out, form = torch.empty(len(tokens), width, dtype=self._expertly_dtype), self._expertly_format
        decoded = torch.empty(TILE_OUTPUTS, width, dtype=self._expertly_dtype)
        for block, some in places.items():
            kernels.tile_decode(form.kernel, tiles[block].data_ptr(), decoded)
            for place in some:
                out[place] = decoded[tokens[place] % TILE_OUTPUTS]
        return out.view(*input.shape, width)


_TILED: dict[type[nn.Module], type[TiledLayer]] = {nn.Linear: TiledLinear, nn.Embedding: TiledEmbedding}

for _kind in (TiledLinear, _SharingLinear):
    _kind.__name__ = _kind.__qualname__ = "Linear"
TiledEmbedding.__name__ = TiledEmbedding.__qualname__ = "Embedding"


def is_own(model: PreTrainedModel, path: str) -> bool:
    """Whether the weight of a module is no other's, too, and the model computes it in its dtype."""
    tied = model.all_tied_weights_keys
    return f"{path}.weight" not in (*tied, *tied.values()) and _is_in_dtype(model, path)


def can_be_tiled(model: PreTrainedModel, path: str) -> bool:
    """Whether a module can keep tiles in place of its weight: a linear layer, or a table that looks rows up as they are
    stored, which computes in the model's dtype, as do the linear layers that share the weight, if any.
    """
    module, sharing = model.get_submodule(path), _sharing(model, path)
    return (
        type(module) in _TILED
        and getattr(module, "max_norm", None) is None
        and f"{path}.weight" not in model.all_tied_weights_keys
        and all(type(model.get_submodule(each)) is nn.Linear for each in sharing)
        and all(_is_in_dtype(model, each) for each in (path, *sharing))
    )


def _is_in_dtype(model: PreTrainedModel, path: str) -> bool:
    in_float32 = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    return in_float32.isdisjoint(path.split("."))


def _sharing(model: PreTrainedModel, path: str) -> list[str]:
    """Modules whose weight is that of the one at `path`."""
    tied = model.all_tied_weights_keys.items()
    return [name.rpartition(".")[0] for name, source in tied if source == f"{path}.weight"]


def put_tiles(model: Any, formats: Mapping[str, str]) -> None:
    """Make layers of a model on the meta device, by their paths, keep tiles of these formats in place of weights, and
    those that share their weights the same tiles, whose bytes are loaded with the rest. Raises ConfigError naming a
    layer that cannot have any.
    """
    for path, name in formats.items():
        try:
            if not can_be_tiled(model, path):
                kind = type(model.get_submodule(path)).__name__
                raise ConfigError(f"a {kind}, not a linear layer or table of embeddings")
            rows, columns = model.get_submodule(path).weight.shape
            shape = rows // TILE_OUTPUTS, FORMATS[name].block_nbytes_of(rows, columns)
        except (AttributeError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from None
        owner: Any = model.get_submodule(path)
        for each in (path, *_sharing(model, path)):
            module: Any = model.get_submodule(each)
            dtype = module.weight.dtype
            del module.weight
            module.__class__ = _TILED[type(module)] if module is owner else _SharingLinear
            module._expertly_format, module._expertly_dtype = FORMATS[name], dtype
            module._expertly_kernels, module._expertly_owner = None, (owner,)
            module._is_hf_initialized = True
            model.all_tied_weights_keys.pop(f"{each}.weight", None)
        owner.register_buffer("tiles", torch.empty(shape, dtype=torch.uint8, device="meta"))


def use_tiles(model: nn.Module, kernels: Kernels) -> int:
    """Compute layers that have tiles by the compiled kernels, else decode them for good. How many are computed."""
    num_used = 0
    modules: list[Any] = [module for module in model.modules() if isinstance(module, TiledLayer)]
    for module in sorted(modules, key=lambda module: isinstance(module, _SharingLinear)):  # the tiles' owners first
        if kernels.most_tokens(module._expertly_dtype, module._expertly_format.name):
            module._expertly_kernels = kernels
            num_used += 1
            continue
        owner = module._expertly_owner[0]
        weight = nn.Parameter(module.weight, requires_grad=False) if module is owner else owner.weight
        if module is owner:
            del module.tiles
        module.__class__ = nn.Embedding if isinstance(module, TiledEmbedding) else nn.Linear
        module.weight = weight
    return num_used
