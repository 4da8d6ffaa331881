"""Checkpoints in the schemes of compressed-tensors, made by its compressors, and decoded by them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import make_checkpoint
from tests.model.checkpoints import in_groups, read_tensors, write_checkpoint

Scheme = Mapping[str, Any]
"""Fields of `weights`, and beside them `format`, `scales` (their dtype), `targets`, `activations`."""


def make_compressed(
    folder: Path, dtype: torch.dtype, *schemes: Scheme, static: bool = False, group: int = 128, of_expert: int = 2
) -> tuple[Path, Path]:
    """qwen3_moe with its linear layers in the first scheme whose `targets` are in their names; and the decoded one.
    `static`: each has the scale of its activations, too.
    """
    pytest.importorskip("compressed_tensors", reason="makes these checkpoints")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    source = make_checkpoint(in_groups(group, of_expert), folder.with_name(f"{folder.name}-source"), dtype=dtype)
    groups, decoded, tensors = {}, {}, {}
    for number, fields in enumerate(schemes):
        args = {
            key: value for key, value in fields.items() if key not in ("format", "scales", "targets", "activations")
        }
        groups[f"group_{number}"] = QuantizationScheme(
            targets=[f"re:.*{target}.*" for target in fields.get("targets", ())] or ["Linear"],
            weights=QuantizationArgs(**args),
            input_activations=fields.get("activations"),
            format=fields["format"],
        )
    for name, tensor in read_tensors(source).items():
        fitting = (one for one in zip(schemes, groups.values(), strict=True) if _is_of(name, one[0]))
        fields, scheme = next(fitting, (None, None))
        if fields is None or scheme is None:
            decoded[name] = tensors[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        tensor = tensor * (64 / tensor.shape[1]) ** 0.5  # wider sums would make more of what is rounded
        state = {"weight": tensor.float(), **_scales(tensor.float(), scheme.weights, fields["scales"])}
        compressor = BaseCompressor.get_value_from_registry(fields["format"])
        packed = compressor.compress(state, scheme)
        decoded[name] = compressor.decompress(dict(packed), scheme)["weight"].to(dtype)
        tensors |= {f"{stem}.{part}": value for part, value in packed.items()}
        if static:
            tensors[f"{stem}.input_scale"] = torch.ones(1)
    config = QuantizationConfig(
        config_groups=groups,
        format=schemes[0]["format"] if len(schemes) == 1 else "mixed-precision",
        quantization_status="compressed",
        ignore=["lm_head", "re:.*mlp.gate$"],
    ).model_dump(mode="json")
    plain = write_checkpoint(folder.with_name(f"{folder.name}-decoded"), decoded, source)
    return write_checkpoint(folder, tensors, source, quantization_config=config), plain


def _is_of(name: str, fields: Scheme) -> bool:
    targets = fields.get("targets", ("",))
    return name.endswith("_proj.weight") and any(target in name for target in targets)


def _scales(weight: torch.Tensor, args: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Scales and zero points that use all numbers, as observers choose them."""
    rows, columns = weight.shape
    high, wide = {"tensor": (rows, columns), "channel": (1, columns), "block": tuple(args.block_structure or ())}.get(
        args.strategy, (1, args.group_size)
    )
    padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
    blocks = padded.reshape(-(-rows // high), high, -(-columns // wide), wide)
    low, top = blocks.amin((1, 3)), blocks.amax((1, 3))
    most = {("float", 8): 448.0, ("float", 4): 6.0}.get((args.type, args.num_bits), 2 ** (args.num_bits - 1) - 0.5)
    made: dict[str, torch.Tensor] = {}
    if args.strategy == "tensor_group":
        made["weight_global_scale"] = (6.0 * 448 / weight.abs().amax()).reshape(1)
        sizes = torch.maximum(-low, top) / 6 * made["weight_global_scale"]
        return made | {"weight_scale": sizes.clamp(max=448).to(torch.float8_e4m3fn).to(dtype)}
    if args.symmetric:
        made["weight_scale"] = (torch.maximum(-low, top) / most).to(dtype)
        if args.type == "float" and args.num_bits == 4:
            made["weight_scale"] = made["weight_scale"].log2().ceil().exp2()
    else:
        made["weight_scale"] = ((top.clamp(min=0) - low.clamp(max=0)) / (2 * most)).to(dtype)
        middle = (-most - low.clamp(max=0) / made["weight_scale"].float()).round()
        made["weight_zero_point"] = middle.clamp(-most - 0.5, most).to(torch.int8)
    if args.strategy == "tensor":
        made = {name: value.reshape(1) for name, value in made.items()}
    return made
