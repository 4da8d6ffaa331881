"""The layouts of GPTQ, AWQ and auto-round checkpoints (AutoGPTQ, GPTQModel; AutoAWQ).

A word has 32 / bits numbers: of inputs in GPTQ, of outputs, in another order, in AWQ. Both have tensors [groups, ...]
of float16 scales and of zero points. A weight is (number - zero point) * scale in float16. So GPTQModel computes it
(`TorchLinear.dequantize_weight`, `AwqTorchLinear`), which transformers uses for both; in a bfloat16 model its `load`
rounds the scales to bfloat16 first, and then the product.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.int4 import int4_form
from expertly.formats.layouts import WHERE, Accepted, Header, Layout, NamePattern, check_field
from expertly.formats.matrix import Bytes, Matrix, torch, unpacked
from expertly.formats.tiles import TiledFormat

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of 8 outputs."""

_WORDS, _SCALES, _ZEROS, _ORDER = ".qweight", ".scales", ".qzeros", ".g_idx"

_BITS = (2, 4, 8)

_HALVES = ("F16", "BF16")  # GPTQModel stores AWQ's scales in the dtype of the model


class _HalfLayout(Layout):
    """What GPTQ and AWQ share."""

    def __init__(self, quantization: Mapping[str, Any], dtype: str) -> None:
        self._scales = "BF16" if dtype == "bfloat16" else "F16"

    def endings(self, stem: str, tensors: Mapping[str, Header]) -> Sequence[str]:
        if len(tensors) == 1 and _WORDS not in tensors:
            return ()
        return [ending for ending in self.suffixes if ending != _ORDER or ending in tensors]

    def accepted(self, stem: str, tensors: Mapping[str, Header], size: list[int]) -> Accepted:
        (rows, columns), num = size, (0, *tensors[_SCALES][1])[-2]
        width = rows * self._bits(tensors) // 32
        accepted: Accepted = {
            _WORDS: (("I32",), [tensors[_WORDS][1]]),
            _SCALES: (_HALVES, [[num, rows]]),
            _ZEROS: (("I32",), [[num, width]]),
            _ORDER: (("I32", "I64"), [[columns]]),
        }
        return {ending: accepted[ending] for ending in tensors}

    def _bits(self, tensors: Mapping[str, Header]) -> int:
        return 4

    def _form(self, stem: str, tensors: Mapping[str, Header], group: int, has_zeros: bool) -> TiledFormat | None:
        _, columns = self.size(stem, tensors)
        form, num = int4_form(group, columns, self._scales, has_zeros), tensors[_SCALES][1][0]
        expected = 1 if group == -1 else columns // group
        if form is not None and num != expected:
            raise CheckpointError(f"tensor '{stem}{_SCALES}': {num} groups: must be {expected}, as {WHERE} has it")
        return form

    def _half(self, scales: torch.Tensor) -> torch.Tensor:
        """[rows, groups], rounded to the model's dtype."""
        return (scales.bfloat16() if self._scales == "BF16" else scales.half()).T


class GptqLayout(_HalfLayout):
    """Zero points of symmetric checkpoints are all the middle of the numbers, and are not kept."""

    suffixes = (_WORDS, _SCALES, _ZEROS, _ORDER)

    def __init__(self, quantization: Mapping[str, Any], dtype: str) -> None:
        super().__init__(quantization, dtype)
        version = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
        fields = {**quantization, "checkpoint_format": version}
        for field, accepted in {
            "bits": _BITS,
            "checkpoint_format": ("gptq", "gptq_v2"),
            "sym": (True, False, None),
            "desc_act": (False, True, None),  # the format checks g_idx for inputs that it moved
            "is_marlin_format": (False, None),
            "pack_dtype": ("int32", None),
            "rotation": (None,),
            "adapter": (None,),
        }.items():
            check_field(fields, field, accepted, WHERE)
        meta = quantization.get("meta")
        maker = str(meta.get("quantizer")) if isinstance(meta, dict) else ""
        sym = quantization.get("sym") is not False
        self._of_all = {
            "bits": quantization["bits"],
            "group_size": group_of({"group_size": 128, **quantization}),
            "sym": sym,
        }
        self._rules = _rules_of(quantization.get("dynamic"))
        self._is_less_one, self._is_carried = version == "gptq", "gptqmodel" in maker
        self._are_middle = sym and all(changes.get("sym", True) for _, changes in self._rules)

    def _fields(self, stem: str) -> dict[str, Any]:
        """What the config says of a matrix: the first rule that its name matches counts, as in GPTQModel."""
        for pattern, changes in self._rules:
            if pattern.matches(stem):
                return {**self._of_all, **changes}
        return self._of_all

    def _bits(self, tensors: Mapping[str, Header]) -> int:
        """Of zero points, and so of numbers."""
        rows, width = tensors[_WORDS][1][1], (0, *tensors[_ZEROS][1])[-1]
        return next((bits for bits in _BITS if width * 32 == rows * bits), 4)

    def size(self, stem: str, tensors: Mapping[str, Header]) -> list[int]:
        num_words, rows = tensors[_WORDS][1][:2]
        return [rows, 32 * num_words // self._bits(tensors)]

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        if not {_WORDS, _SCALES, _ZEROS} <= tensors.keys() or self._bits(tensors) != 4:
            return None
        fields = self._fields(stem)
        return self._form(stem, tensors, fields["group_size"], not fields["sym"]) if fields["bits"] == 4 else None

    def usual_form(self) -> TiledFormat | None:
        num = max(1, self._of_all["group_size"])
        shapes = {_WORDS: (16 * num, 128), _SCALES: (128 if num > 1 else 1, 128), _ZEROS: (1, 16)}
        return self.form_of("", {ending: ("I32", shape) for ending, shape in shapes.items()})

    def read(self, tensors: Mapping[str, torch.Tensor]) -> Matrix:
        words, scales, zeros, *orders = tensors.values()
        rows, order = words.shape[1], orders[0] if orders else None
        bits = 32 * zeros.shape[1] // rows
        numbers, points = words.T.contiguous(), torch.from_numpy(self._points(zeros, bits))
        return Matrix(numbers, self._half(scales), bits, len(words) * 32 // bits, zeros=points, order=order)

    def _points(self, stored: torch.Tensor, bits: int) -> Bytes:
        """Zero points [rows, groups] from 0 on, from words [groups, rows * bits / 32]: less one, or (gptq_v2) as they
        are. GPTQModel subtracts 1 from each number of the whole word, so that a zero point of 0 borrows from the next.
        """
        words = stored.numpy().view(np.uint32)
        rows, most, middle = words.shape[1] * 32 // bits, (1 << bits) - 1, 1 << bits - 1
        if self._is_less_one:
            if not self._is_carried and (unpacked(words, bits, rows) == most).any():
                raise CheckpointError(
                    f"a zero point of {most + 1}, stored as {most}: must be 1 to {most} (or 0, stored so by gptqmodel, "
                    f"which {WHERE}.meta.quantizer does not name)"
                )
            words = words + np.uint32(0xFFFFFFFF // most)  # one more in each number
        points = unpacked(words, bits, rows).T
        if self._are_middle and (wrong := points[points != middle]).size:
            raise CheckpointError(f"a zero point of {wrong[0]}: must be {middle}, as {WHERE}.sym is true")
        return points


def group_of(fields: Mapping[str, Any]) -> int:
    """`group_size`, inputs that share a scale; -1: all. Raises UnsupportedModelError."""
    size = fields.get("group_size", -1)
    if type(size) is not int or not (size == -1 or 0 < size < 1 << 31):
        raise UnsupportedModelError(f"{WHERE}.group_size={size!r:.80}: must be a whole number above 0, or -1 for a row")
    return size


def _rules_of(dynamic: object) -> list[tuple[NamePattern, dict[str, Any]]]:
    """GPTQModel's `dynamic`: by a pattern of names the fields that such a matrix has instead; "-:": not quantised."""
    rules = []
    for pattern, changes in (dynamic or {}).items() if isinstance(dynamic, dict | None) else ():
        place = f"{WHERE}.dynamic[{pattern!r:.80}]"
        compiled = NamePattern(pattern.removeprefix("+:").removeprefix("-:"), f"{WHERE}.dynamic")
        changes = {} if pattern.startswith("-:") or changes is False else changes
        if not isinstance(changes, dict):
            raise UnsupportedModelError(f"{place}={changes!r:.80}: must be an object of fields")
        check_field({"bits": 4, **changes}, "bits", _BITS, place)
        kept = {field: changes[field] for field in ("bits", "sym") if field in changes}
        rules.append((compiled, kept | ({"group_size": group_of(changes)} if "group_size" in changes else {})))
    return rules


_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round": "gptq_v2"}


def auto_round(quantization: Mapping[str, Any], dtype: str) -> Layout:
    """The layout of auto-round, which is GPTQ's or AWQ's. `extra_config` has what is said of single layers."""
    packing, awq = quantization.get("packing_format"), "auto_round:auto_awq"
    check_field(quantization, "packing_format", (*_PACKINGS, awq), WHERE)
    check_field({"data_type": "int", **quantization}, "data_type", ("int",), WHERE)
    of_layers = quantization.get("extra_config") or {}
    check_field({"extra_config": type(of_layers)}, "extra_config", (dict,), WHERE)
    rules = {}
    for name, fields in of_layers.items():
        is_left = isinstance(fields, dict) and fields.get("bits", 4) == 16
        pattern = name if re.search(r"[*\[(^$]", name) else f"{re.escape(name)}$"
        rules[f"{'-' if is_left else '+'}:{pattern}"] = fields
    if packing == awq:
        if changed := [name for name in rules if name.startswith("+")]:
            raise UnsupportedModelError(f"{WHERE}.extra_config[{changed[0][2:]!r:.80}]: accepted with {awq}: 16 bits")
        return AwqLayout({**quantization, "version": "gemm"}, dtype)
    return GptqLayout({**quantization, "checkpoint_format": _PACKINGS[str(packing)], "dynamic": rules}, dtype)


class AwqLayout(_HalfLayout):
    """AWQ's version "gemm", always with zero points."""

    suffixes = (_WORDS, _SCALES, _ZEROS)

    def __init__(self, quantization: Mapping[str, Any], dtype: str) -> None:
        super().__init__(quantization, dtype)
        named = (quantization.get(field) for field in ("checkpoint_format", "version", "format"))
        version = next((str(name).lower() for name in named if name is not None), "gemm")
        if quantization.get("backend") == "llm-awq":
            version = "llm-awq"  # transformers also ignores the named version then
        fields = {"bits": 4, "group_size": 128, **quantization, "version": version}
        for field, accepted in {"bits": (4,), "version": ("gemm",)}.items():
            check_field(fields, field, accepted, WHERE)
        self._group = group_of(fields)

    def size(self, stem: str, tensors: Mapping[str, Header]) -> list[int]:
        columns, num_words = tensors[_WORDS][1][:2]
        return [8 * num_words, columns]

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        return self._form(stem, tensors, self._group, has_zeros=True) if _WORDS in tensors else None

    def usual_form(self) -> TiledFormat | None:
        num = max(1, self._group)
        return self.form_of("", {_WORDS: ("I32", (128 * num, 128)), _SCALES: ("F16", (128 if num > 1 else 1, 1024))})

    def read(self, tensors: Mapping[str, torch.Tensor]) -> Matrix:
        words, scales, zeros = tensors.values()
        numbers, points = _in_order(words).T, torch.from_numpy(_in_order(zeros).T)
        packed = torch.from_numpy(numbers[:, 0::2] | numbers[:, 1::2] << 4)
        return Matrix(packed, self._half(scales), 4, len(words), zeros=points)


def _in_order(words: torch.Tensor) -> Bytes:
    """Numbers [..., 8 n] from AWQ's words [..., n], in the order of outputs."""
    numbers = unpacked(words.numpy(), 4, 8 * words.shape[-1])
    return numbers.reshape(*numbers.shape[:-1], -1, 8)[..., _AWQ_PLACES].reshape(numbers.shape)
