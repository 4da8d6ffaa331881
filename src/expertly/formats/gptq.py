"""The layouts of GPTQ, AWQ and auto-round checkpoints (AutoGPTQ, GPTQModel; AutoAWQ), for the INT4 tiles of int4.py.

A word has numbers from 0 to 15 (or 255) of 8 (4) inputs in GPTQ, of outputs, in another order, in AWQ. Both have
tensors [inputs / G, ...] of float16 scales and of zero points. A weight is (number - zero point) * scale in float16. So
GPTQModel computes it (`TorchLinear.dequantize_weight`, `AwqTorchLinear`), which transformers uses for both; in a
bfloat16 model its `load` rounds the scales to bfloat16 first, and then the product.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.int4 import GROUPS, Int4Format, tile_group
from expertly.formats.layouts import WHERE, Header, Layout, NamePattern, check_field, is_plain, order_of, unpacked
from expertly.formats.tiles import Bytes, TiledFormat, torch

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of 8 outputs."""

_WORDS, _SCALES, _ZEROS, _ORDER = ".qweight", ".scales", ".qzeros", ".g_idx"

_BITS = (2, 4, 8)


class _InHalf(Int4Format):
    """`scales`: the dtype to which the checkpoint's scales are rounded."""

    stored_scales = "F16", "BF16"  # GPTQModel stores AWQ's scales in the dtype of the model

    def __init__(self, group: int, scales: str, has_zeros: bool = False, stored_group: int | None = None) -> None:
        """`stored_group`: inputs that share a scale in the checkpoint, a multiple of `group`."""
        super().__init__(group, scales, has_zeros)
        self._stored_group = stored_group or group

    def _shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        groups = columns // self._stored_group
        return (self.stored_scales, (groups, rows)), (("I32",), (groups, rows // 8))


class GptqFormat(_InHalf):
    """Zero points of symmetric checkpoints are all 8, and are not kept."""

    def __init__(
        self, group: int, scales: str, has_zeros: bool, stored_group: int, points: ZeroPoints, has_order: bool
    ) -> None:
        super().__init__(group, scales, has_zeros, stored_group)
        self.suffixes = (_WORDS, _SCALES, _ZEROS, *([_ORDER] if has_order else []))
        self._points = points

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        order = [(("I32", "I64"), (columns,))] if _ORDER in self.suffixes else []
        return ((("I32",), (columns // 8, rows)), *self._shapes(rows, columns), *order)

    def parts_of(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[Bytes, ...]:
        words, scales, zeros, *orders = tensors
        for order in orders:
            if not np.array_equal(order.numpy(), np.arange(columns) // self._stored_group):
                raise CheckpointError(
                    f"g_idx: inputs in another order than their groups of {self._stored_group} (desc_act): their bytes "
                    "cannot be kept; name a dtype to convert them"
                )
        numbers, groups = np.ascontiguousarray(words.numpy().T).view(np.uint8), columns // self.group
        parts = numbers.reshape(rows, groups, -1), self.scales_of(in_dtype(scales, self.scales).T, rows, groups)
        points = self._points.of(zeros, 4)
        return (*parts, points.repeat(groups // points.shape[1], axis=1)) if self.has_zeros else parts


class ZeroPoints:
    """How a GPTQ checkpoint stores them. `is_less_one`: less one; `is_carried`: by subtraction from the whole word, so
    that a zero point of 0 borrows from the next one. `are_middle`: all must be the middle of the numbers.
    """

    def __init__(self, is_less_one: bool, is_carried: bool, are_middle: bool) -> None:
        self._is_less_one, self._is_carried, self._are_middle = is_less_one, is_carried, are_middle

    def of(self, stored: torch.Tensor, bits: int) -> Bytes:
        """Zero points [rows, groups, 1] from 0 on, from words [groups, rows * bits / 32]."""
        words = stored.numpy().view(np.uint32)
        rows = words.shape[1] * 32 // bits
        if self._is_less_one:
            most = (1 << bits) - 1
            if not self._is_carried and (unpacked(words, bits, rows) == most).any():
                raise CheckpointError(
                    f"a zero point of {most + 1}, stored as {most}: must be 1 to {most} (or 0, stored so by gptqmodel, "
                    f"which {WHERE}.meta.quantizer does not name)"
                )
            words = words + np.uint32(0xFFFFFFFF // most)  # one more in each number
        points, middle = unpacked(words, bits, rows).T[..., None], 1 << (bits - 1)
        if self._are_middle and (wrong := points[points != middle]).size:
            raise CheckpointError(f"a zero point of {wrong[0]}: must be {middle}, as {WHERE}.sym is true")
        return points


class AwqFormat(_InHalf):
    """AWQ's version "gemm", always with zero points."""

    suffixes: tuple[str, ...] = (_WORDS, _SCALES, _ZEROS)

    def __init__(self, group: int, scales: str, stored_group: int | None = None) -> None:
        super().__init__(group, scales, has_zeros=True, stored_group=stored_group)

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        return ((("I32",), (columns, rows // 8)), *self._shapes(rows, columns))

    def parts_of(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[Bytes, ...]:
        words, scales, zeros = tensors
        numbers, points, groups = _in_order(words).T, _in_order(zeros).T[..., None], columns // self.group
        packed = numbers[:, 0::2] | numbers[:, 1::2] << 4
        halves = self.scales_of(in_dtype(scales, self.scales).T, rows, groups)
        return packed.reshape(rows, groups, -1), halves, points.repeat(groups // points.shape[1], axis=1)


AWQ = tuple(AwqFormat(group, scales) for scales in ("BF16", "F16") for group in GROUPS)

_gptq_form, _awq_form = cache(GptqFormat), cache(AwqFormat)


def in_dtype(scales: torch.Tensor, name: str) -> torch.Tensor:
    return scales.bfloat16() if name == "BF16" else scales.half()


def _in_order(words: torch.Tensor) -> Bytes:
    """Numbers [..., 8 n] from AWQ's words [..., n], in the order of outputs."""
    numbers = unpacked(words.numpy(), 4, 8 * words.shape[-1])
    return numbers.reshape(*numbers.shape[:-1], -1, 8)[..., _AWQ_PLACES].reshape(numbers.shape)


# -- what a config must say --------------------------------------------------------------------------------------------


class _HalfLayout(Layout):
    """What GPTQ and AWQ share."""

    group: int  # -1: a row

    def check(self, stem: str, tensors: Mapping[str, Header]) -> None:
        if is_plain(tensors) or (len(tensors) == 1 and not tensors.keys() & {*self.suffixes[:1]}):
            return
        self.check_beside(stem, tensors, [end for end in self.suffixes if end != _ORDER or end in tensors])
        for ending, (dtype, shape) in tensors.items():
            dims = "[n]" if ending == _ORDER else "[n, m]"
            accepted = {_SCALES: _InHalf.stored_scales, _ORDER: ("I32", "I64")}.get(ending, ("I32",))
            if dtype not in accepted or len(shape) != (1 if ending == _ORDER else 2):
                raise CheckpointError(
                    f"tensor '{stem}{ending}': {dtype} {list(shape)}: must be {' or '.join(accepted)} {dims}"
                )

    def _in_groups(self, columns: int, group: int | None = None) -> tuple[int, int] | None:
        """Inputs that share a scale in tiles and in the checkpoint; None: no tiles have such."""
        stored = self.group if group is None else group
        stored = columns if stored == -1 else stored
        size = tile_group(stored)
        return None if size is None or columns % stored else (size, stored)


class GptqLayout(_HalfLayout):
    suffixes = (_WORDS, _SCALES, _ZEROS, _ORDER)

    def __init__(self, quantization: Mapping[str, Any], dtype: str) -> None:
        version = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
        fields = {**quantization, "checkpoint_format": version}
        for field, accepted in {
            "bits": _BITS,
            "checkpoint_format": ("gptq", "gptq_v2"),
            "sym": (True, False, None),
            "desc_act": (False, True, None),  # `parts_of` checks g_idx for inputs that it moved
            "is_marlin_format": (False, None),
            "pack_dtype": ("int32", None),
            "rotation": (None,),
            "adapter": (None,),
        }.items():
            check_field(fields, field, accepted, WHERE)
        meta = quantization.get("meta")
        maker = str(meta.get("quantizer")) if isinstance(meta, dict) else ""
        sym = quantization.get("sym") is not False
        self._of_all = {"bits": quantization["bits"], "group_size": group_of(quantization), "sym": sym}
        self._rules = _rules_of(quantization.get("dynamic"))
        self._scales = "BF16" if dtype == "bfloat16" else "F16"
        self._points = {sym: ZeroPoints(version == "gptq", "gptqmodel" in maker, sym) for sym in (True, False)}
        self._are_middle = self._of_all["sym"] and all(changes.get("sym", True) for _, changes in self._rules)

    def _fields(self, stem: str) -> dict[str, Any]:
        """What the config says of a matrix: the first rule that its name matches counts, as in GPTQModel."""
        for pattern, changes in self._rules:
            if pattern.matches(stem):
                return {**self._of_all, **changes}
        return self._of_all

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        if _WORDS not in tensors or _SCALES not in tensors:
            return None
        fields, words = self._fields(stem), tensors[_WORDS][1]
        sizes = self._in_groups(words[0] * 8, fields["group_size"])
        if fields["bits"] != 4 or sizes is None:
            return None
        sym = fields["sym"]
        return _gptq_form(sizes[0], self._scales, not sym, sizes[1], self._points[sym], _ORDER in tensors)

    def usual_form(self) -> TiledFormat | None:
        size = 128 * (self._of_all["group_size"] if self._of_all["group_size"] > 0 else 1)
        return self.form_of(
            "", {_WORDS: ("I32", (size // 8, 128)), _SCALES: ("F16", (1, 128)), _ORDER: ("I32", (size,))}
        )

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """In the dtype of the scales; one that is not quantised as it is."""
        if len(tensors) == 1:
            return next(iter(tensors.values()))
        words, scales, zeros = (tensors[ending] for ending in (_WORDS, _SCALES, _ZEROS))
        rows, num = words.shape[1], zeros.shape[0]
        bits = 32 * zeros.shape[1] // max(1, rows)
        columns = len(words) * 32 // bits if bits in _BITS else 0
        for ending, shape in ((_WORDS, (columns * bits // 32, rows)), (_SCALES, (num, rows))):
            if tuple(tensors[ending].shape) != shape or not columns:
                raise CheckpointError(f"{ending}: {list(tensors[ending].shape)}: must be {list(shape)}")
        of_groups = torch.arange(columns) * num // columns
        order = order_of(tensors[_ORDER], num, columns) if _ORDER in tensors else of_groups
        numbers = torch.from_numpy(unpacked(words.numpy().T, bits, columns))
        points = torch.from_numpy(self._points[self._are_middle].of(zeros, bits))
        halves = in_dtype(scales, self._scales).T
        if not bool(halves.isfinite().all()):
            raise CheckpointError("a scale is NaN or infinite: must be finite")
        return numbers.to(halves.dtype).sub_(points[:, order, 0]).mul_(halves[:, order])  # the difference is exact


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
        where = f"{WHERE}.dynamic[{pattern!r:.80}]"
        compiled = NamePattern(pattern.removeprefix("+:").removeprefix("-:"), f"{WHERE}.dynamic")
        changes = {} if pattern.startswith("-:") or changes is False else changes
        if not isinstance(changes, dict):
            raise UnsupportedModelError(f"{where}={changes!r:.80}: must be an object of fields")
        check_field({"bits": 4, **changes}, "bits", _BITS, where)
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
    suffixes = (_WORDS, _SCALES, _ZEROS)

    def __init__(self, quantization: Mapping[str, Any], dtype: str) -> None:
        named = (quantization.get(field) for field in ("checkpoint_format", "version", "format"))
        version = next((str(one).lower() for one in named if one is not None), "gemm")
        if quantization.get("backend") == "llm-awq":
            version = "llm-awq"  # transformers also ignores the named version then
        fields = {"bits": 4, "group_size": 128, **quantization, "version": version}
        for field, accepted in {"bits": (4,), "version": ("gemm",)}.items():
            check_field(fields, field, accepted, WHERE)
        self.group, self._scales = group_of(fields), "BF16" if dtype == "bfloat16" else "F16"

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        sizes = self._in_groups(tensors[_WORDS][1][0]) if _WORDS in tensors else None
        return None if sizes is None else _awq_form(sizes[0], self._scales, sizes[1])

    def usual_form(self) -> TiledFormat | None:
        return self.form_of("", {_WORDS: ("I32", (128 * max(1, self.group), 128))})

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """In the dtype of the scales; one that is not quantised as it is."""
        if len(tensors) == 1:
            return next(iter(tensors.values()))
        words, scales, zeros = tensors.values()
        columns, rows, num = words.shape[0], words.shape[1] * 8, max(1, scales.shape[0])
        for ending, tensor, shape in ((_SCALES, scales, (num, rows)), (_ZEROS, zeros, (num, rows // 8))):
            if tuple(tensor.shape) != shape:
                raise CheckpointError(f"{ending}: {list(tensor.shape)}: must be {list(shape)}")
        if columns % num:
            raise CheckpointError(f"{_SCALES}: {num} groups: must divide {columns} inputs")
        halves = in_dtype(scales, self._scales).T
        numbers, points = (torch.from_numpy(_in_order(one)).T for one in (words, zeros))
        spread = (one.repeat_interleave(columns // num, 1) for one in (points, halves))
        return numbers.to(halves.dtype).sub_(next(spread)).mul_(next(spread))
