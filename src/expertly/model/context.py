"""Tells the runtime when a forward pass begins and ends and what its rows are; one pass at a time."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from expertly.core.errors import ModelUseError
from expertly.core.observation import IterationInfo
from expertly.model.adapter import find_experts_modules
from expertly.model.runtime import Runtime
from expertly.model.tensors import saturated_half

Role = Literal["encoder", "decoder", "causal"]
Mask = npt.NDArray[np.bool_]

_MAX_SHARED = 64

_MAX_VERIFIED = 32
"""Most tokens a sequence that assisted decoding verifies in one pass; transformers starts at 20 and adapts."""


def attach(model: PreTrainedModel, runtime: Runtime) -> None:
    """Wrap the forward of every stack of `model` (the innermost transformers model around an experts module).

    The stack's class becomes a subclass of the same name, so that the wrapping survives a deepcopy and user hooks
    stay what they are. Passes of one model, and of its deep copies, are serialised by one re-entrant lock.
    torch.compile around the model leaves the stacks as they are (or says that it may not, with fullgraph=True).
    """
    context = IterationContext(runtime)
    sites = [site for site, _ in find_experts_modules(model)]
    for name in dict.fromkeys(_stack_of(model, site) for site in sites):
        stack: Any = model.get_submodule(name)
        within = [layer for layer, site in enumerate(sites) if not name or site.startswith(f"{name}.")]
        stack._expertly_layers = range(within[0], within[-1] + 1)
        role: Role = "causal"
        if model.config.is_encoder_decoder:
            role = "encoder" if "encoder" in name.split(".") else "decoder"
        stack._expertly_context = context
        stack.__class__ = _announcing(type(stack), role)


@contextlib.contextmanager
def unannounced(model: PreTrainedModel) -> Iterator[None]:
    """The runtime is told nothing of the forward passes in the block. Needs a model that was attached."""
    context = _context_of(model)
    with context.lock:
        was_running, context.is_running = context.is_running, True
        try:
            yield
        finally:
            context.is_running = was_running


@contextlib.contextmanager
def between_passes(model: PreTrainedModel) -> Iterator[None]:
    """No other thread runs a forward pass in the block. Needs a model that was attached."""
    with _context_of(model).lock:
        yield


def _context_of(model: PreTrainedModel) -> IterationContext:
    stack: Any = next(module for module in model.modules() if hasattr(module, "_expertly_context"))
    context: IterationContext = stack._expertly_context
    return context


def _stack_of(model: PreTrainedModel, site: str) -> str:
    """Path of the innermost transformers model that holds the module at `site`."""
    parts = site.split(".")
    for length in range(len(parts), -1, -1):
        if isinstance(model.get_submodule(".".join(parts[:length])), PreTrainedModel):
            return ".".join(parts[:length])
    raise AssertionError(site)


def _announcing(original: type[PreTrainedModel], role: Role) -> type[PreTrainedModel]:
    names = tuple(inspect.signature(original.forward).parameters)[1:]

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            raise ModelUseError("experts whose weights come and go cannot be traced; call the model as it is")
        context: IterationContext = self._expertly_context
        with context.lock:
            info = None
            if not context.is_running:  # else a stack within a stack: the outer one has begun
                inputs = dict(zip(names, args, strict=False)) | kwargs if args else kwargs
                info = context.describe(role, inputs, self._expertly_layers)
            if info is None:
                return original.forward(self, *args, **kwargs)
            context.begin(info)
            is_ok = False
            try:
                result = original.forward(self, *args, **kwargs)
                is_ok = True
            finally:
                context.end(is_ok)
            return result

    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "forward": torch.compiler.disable(forward, reason="experts come and go"),
    }
    return type(original.__name__, (original,), namespace)


class IterationContext:
    """What one model, and all deep copies of it, share: the runtime, the lock, and whether a pass is running."""

    def __init__(self, runtime: Runtime) -> None:
        self.lock = threading.RLock()
        self.is_running = False
        self._runtime = runtime
        self._shared: dict[tuple[int, int, bool], IterationInfo] = {}  # of passes without pads, by shape

    def __deepcopy__(self, memo: dict[int, Any]) -> IterationContext:
        return self

    def begin(self, info: IterationInfo) -> None:
        self._runtime.begin_iteration(info)
        self.is_running = True

    def end(self, is_ok: bool) -> None:
        self.is_running = False
        self._runtime.end_iteration(is_ok)

    def describe(self, role: Role, inputs: Mapping[str, Any], layers: range | None = None) -> IterationInfo | None:
        """The rows of a pass from the keyword arguments of its stack, which has the MoE layers `layers`; None where
        there are no inputs to speak of.

        A few tokens on top of a filled cache are decode (assisted decoding verifies so many at once), more are
        prefill (the next turn of a chat, a chunk of a prompt). A decoder's single token is decode: its prompt went
        to the encoder. Packed sequences have a phase each.
        """
        rows = inputs.get("input_ids")
        if rows is None:
            rows = inputs.get("inputs_embeds")
        if rows is None or rows.dim() < 2:
            return None
        info = self._describe(role, rows.shape[0], rows.shape[1], inputs)
        if not self._runtime.wants_token_ids:
            return info
        return replace(_with_tokens(info, rows, inputs), layers=layers, decodes=role != "encoder")

    def _describe(self, role: Role, batch: int, length: int, inputs: Mapping[str, Any]) -> IterationInfo:
        if inputs.get("cu_seq_lens_q") is not None:
            return self._describe_packed(batch * length, inputs)
        is_prefill = length > _MAX_VERIFIED or (
            not (role == "decoder" and length == 1) and not _is_filled(inputs.get("past_key_values"))
        )
        if length == 1 and not is_prefill:
            return self._unpadded(batch, length, is_prefill)
        is_pad = _pads(inputs.get("attention_mask"), batch, length)
        if is_pad is None:
            return self._unpadded(batch, length, is_prefill)
        same = self._unpadded(batch, length, is_prefill)
        return IterationInfo(same.is_prefill, is_pad, batch, same.phase)

    def _unpadded(self, batch: int, length: int, is_prefill: bool) -> IterationInfo:
        key = (batch, length, is_prefill)
        info = self._shared.get(key)
        if info is None:
            if len(self._shared) >= _MAX_SHARED:
                self._shared.clear()
            phase: Literal["prefill", "decode"] = "prefill" if is_prefill else "decode"
            info = IterationInfo(_frozen(np.full(batch * length, is_prefill)), None, batch, phase)
            self._shared[key] = info
        return info

    def _describe_packed(self, num_rows: int, inputs: Mapping[str, Any]) -> IterationInfo:
        """Continuous batching: sequences side by side in one row [1, T], then pads. One token and a past: decode."""
        bounds = np.asarray(inputs["cu_seq_lens_q"].tolist(), dtype=np.int64)
        lengths = np.diff(bounds)
        starts = bounds[:-1][lengths == 1]
        is_prefill = np.ones(num_rows, dtype=bool)
        past = inputs.get("cu_seq_lens_k")
        if isinstance(past, Mapping):
            past = past.get("full_attention", next(iter(past.values()), None))
        if past is not None:
            has_past = np.diff(np.asarray(past.tolist(), dtype=np.int64))[: len(lengths)][lengths == 1] > 1
        else:
            positions = inputs.get("position_ids")
            has_past = np.zeros(len(starts), dtype=bool)
            if positions is not None:
                has_past = np.asarray(positions.reshape(-1).tolist(), dtype=np.int64)[starts] > 0
        is_prefill[starts[has_past]] = False
        is_pad = None
        if bounds[-1] < num_rows:
            is_pad = np.arange(num_rows) >= bounds[-1]
            is_prefill[is_pad] = False
        phase: Literal["prefill", "decode"] = "prefill" if is_prefill.any() else "decode"
        num_requests = int(np.count_nonzero(lengths))
        return IterationInfo(_frozen(is_prefill), None if is_pad is None else _frozen(is_pad), num_requests, phase)


def _is_filled(cache: Any) -> bool:
    get_seq_length = getattr(cache, "get_seq_length", None)
    if get_seq_length is None:
        return bool(cache)  # None, or a legacy tuple
    try:
        return bool(get_seq_length() > 0)
    except ValueError:  # no attention layer to count tokens
        return bool(cache.has_previous_state())


def _pads(attention_mask: Any, batch: int, length: int) -> Mask | None:
    """[T]; None where nothing is a pad.

    From a mask [B, at least S] whose last S columns are this pass's tokens, or from one ready for attention,
    [B, 1, S, columns] (a static cache's first pass), by kind of layer perhaps: there a pad does not see itself.
    """
    if isinstance(attention_mask, Mapping):
        attention_mask = attention_mask.get("full_attention", next(iter(attention_mask.values()), None))
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape[0] != batch:
        return None
    if attention_mask.dim() == 2 and attention_mask.shape[1] >= length:
        sees = attention_mask[:, -length:] != 0
    elif attention_mask.dim() == 4 and attention_mask.shape[2] == length <= attention_mask.shape[3]:
        itself = attention_mask[:, 0].diagonal(dim1=-2, dim2=-1)
        sees = itself if itself.dtype == torch.bool else itself == 0
    else:
        return None
    is_pad = (~sees).reshape(-1).cpu().numpy()
    return _frozen(is_pad) if is_pad.any() else None


def _with_tokens(info: IterationInfo, rows: torch.Tensor, inputs: Mapping[str, Any]) -> IterationInfo:
    """`info`, and which token of which sequence each row is; `rows` are ids [B, S] or embeddings [B, S, H]."""
    batch, length = rows.shape[0], rows.shape[1]
    bounds = inputs.get("cu_seq_lens_q")
    starts = None
    if bounds is None:
        sequences = np.repeat(np.arange(batch, dtype=np.int32), length)
    else:  # sequences of no token have no row; the pads behind the last are counted to it
        first, *ends = np.asarray(bounds.tolist(), dtype=np.int64)
        sequences = np.searchsorted(ends, np.arange(batch * length), side="right").astype(np.int32)
        sequences = np.minimum(sequences, np.int32(len(ends) - 1))
        starts = _starts(inputs.get("position_ids"), np.array([first, *ends[:-1]]), batch * length)
    token_ids = embeddings = None
    if rows.dim() == 2:
        token_ids = _frozen(rows.reshape(-1).cpu().numpy().astype(np.int32))
    else:
        embeddings = _frozen(saturated_half(rows.detach().reshape(-1, rows.shape[-1])))
    return replace(
        info,
        token_ids=token_ids,
        embeddings=embeddings,
        sequences=_frozen(sequences),
        starts=starts,
    )


def _starts(positions: Any, first_rows: npt.NDArray[np.int64], num_rows: int) -> npt.NDArray[np.int64] | None:
    """Position of the first row of each sequence side by side; None where there are no positions."""
    if not isinstance(positions, torch.Tensor) or positions.numel() != num_rows:
        return None
    of_rows = np.asarray(positions.reshape(-1).tolist(), dtype=np.int64)
    return _frozen(of_rows[np.minimum(first_rows, num_rows - 1)])


def _frozen(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values.setflags(write=False)
    return values
