"""How many bytes of weights outside the experts one token's pass reads."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from expertly.core.geometry import DenseShape
from expertly.model.loading import experts_modules


def dense_shape(model: PreTrainedModel) -> DenseShape:
    """Of a loaded model: the mean over its MoE layers' blocks, and the rest of the language model, the head included.

    A block is the layer that holds the experts (`model.layers.3`). A table of embeddings counts as one row unless
    it is also the head; other weights count once, whichever token is fed.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    blocks = [_block(paths[id(module)]) for module in experts_modules(model)]
    head = model.get_output_embeddings()
    head_weights = {id(one) for one in head.parameters()} if isinstance(head, nn.Module) else set()
    in_blocks = rest = 0
    for path, parameter in model.named_parameters():
        if any(path.startswith(block + ".") for block in blocks):
            in_blocks += _nbytes(parameter)
        elif id(parameter) in head_weights or _belongs(path, blocks):
            is_table = id(parameter) not in head_weights and _is_table(model, path)
            rest += _nbytes(parameter) // (parameter.shape[0] if is_table else 1)
    return DenseShape(in_blocks // len(blocks), rest)


def _block(path: str) -> str:
    """The path up to its first number."""
    parts = path.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: first + 1])


def _belongs(path: str, blocks: list[str]) -> bool:
    """Is it beside the stack of the blocks or in it, and not in another tower (of images, of sound)?"""
    stacks = {block.rpartition(".")[0].rpartition(".")[0] for block in blocks}
    return any(path.startswith(f"{stack}.") or stack == "" for stack in stacks)


def _is_table(model: PreTrainedModel, path: str) -> bool:
    return isinstance(model.get_submodule(path.rpartition(".")[0]), nn.Embedding)


def _nbytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()
