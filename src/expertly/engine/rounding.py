"""Measures the cost of rounding a model's experts: its next-token predictions on a text against the checkpoint's.

Both models share the store's dense part; experts are read one at a time, first from the checkpoint, then from the
store. So the disk needs no second copy, and neither model need fit in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import log_softmax

from expertly.core.errors import ConfigError, NanError, StoreError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.core.observation import IterationInfo
from expertly.data import demo_prompts
from expertly.engine.compute import LayerCall, LayerCompute
from expertly.engine.process import keep_few_primitives, keep_off_trapped_instructions
from expertly.engine.reading import layer_rows
from expertly.engine.runtime import combine, dispatch
from expertly.model.gguf import open_checkpoint
from expertly.model.loading import load_dense, load_tokenizer, tokenizer_errors
from expertly.model.packing import Packing, Weights
from expertly.native.kernels import choose_kernels
from expertly.store.cache import store_errors
from expertly.store.checkpoint import Bytes, Checkpoint
from expertly.store.manifest import RoundingCost
from expertly.store.packed import PackedStore
from expertly.store.reader import ExpertFile

MAX_TOKENS = 512
"""Tokens of the text that are used."""

_MAX_TEXT_NBYTES = 1 << 20
_MAX_LOGITS_NBYTES = 256 << 20
_ROWS = 16
"""Tokens whose logits are compared at a time, in float64."""

Experts = Callable[[int, Sequence[int]], Iterator[Bytes]]
"""Called with a layer and some experts of it: their bytes in order, each expert in chunks."""

Progress = Callable[[int, int], None]
"""`progress(done_nbytes, total_nbytes)` of the experts to read."""


def measured(store: PackedStore, text: Path | None = None, progress: Progress | None = None) -> PackedStore:
    """The store with the cost of rounding in its manifest, measured on `text`; None: measured only if it has not been.
    A store that is not rounded, has no tokenizer or no checkpoint any more is returned as it is.

    Reads all experts of checkpoint and store at most. Takes the memory of the dense part, an expert, and two times the
    logits of MAX_TOKENS tokens. Raises ConfigError for the text, StoreError where the checkpoint has changed.
    """
    manifest = store.manifest
    rounding, source = manifest.rounding, Path(manifest.source)
    if rounding is None or (text is None and rounding.cost is not None):
        return store
    tokenizer = load_tokenizer(store.extras)
    if tokenizer is None or not source.exists():
        if text is None:
            return store
        lacking = "the model has no tokenizer" if tokenizer is None else f"{source}, which was packed, is not there"
        raise ConfigError(f"text={str(text)!r}: {lacking}: there is nothing to measure with")
    name, read = ("expertly's own prompts", _own_text()) if text is None else (str(text), _read(text))
    with tokenizer_errors(f"{store.extras}: the tokenizer"):
        tokens: list[int] = tokenizer(read, verbose=False)["input_ids"]
    if not tokens:
        raise ConfigError(f"text={name!r}: gives no token; write at least one word")
    checkpoint = open_checkpoint(source)
    if checkpoint.identity != manifest.identity or manifest.stamp not in ("", checkpoint.stamp):
        raise StoreError(f"{store.folder}: {source} has changed since it was packed: remove the store and pack again")
    kl, top1, num_tokens = _compare(store, checkpoint, tokens, progress or (lambda done, total: None))
    told = replace(manifest, rounding=replace(rounding, cost=RoundingCost(kl, top1, num_tokens, name)))
    with store_errors(store.folder, "writing what rounding cost"):
        told.write(store.folder)
    return replace(store, manifest=told)


def _own_text() -> str:
    lines = demo_prompts().read_text("utf-8").splitlines()
    return "\n\n".join(json.loads(line)["prompt"] for line in lines)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_TEXT_NBYTES).decode("utf-8", errors="strict")
    except OSError as error:
        raise ConfigError(f"text={str(path)!r}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        if error.start > _MAX_TEXT_NBYTES - 4:  # only its last character is cut
            return str(error.object[: error.start], "utf-8")
        raise ConfigError(f"text={str(path)!r}: must be UTF-8 ({error.reason} at byte {error.start})") from None


def _compare(
    store: PackedStore, checkpoint: Checkpoint, tokens: list[int], progress: Progress
) -> tuple[float, float, int]:
    """Mean KL divergence in nats, share of equal likeliest tokens, and the number of tokens compared."""
    manifest = store.manifest
    keep_few_primitives()
    keep_off_trapped_instructions()
    original = Packing(checkpoint, Weights(manifest.dtype))
    dtype = getattr(torch, manifest.dtype)
    total, done = sum(layer.nbytes for layer in (*original.layers, *manifest.layers)), 0

    def ran(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    with ExitStack() as opened:
        files = [ExpertFile(store.extents[layer][0]) for layer in range(len(manifest.layers))]
        for file in files:
            opened.callback(file.close)
        runtime = OneAtOnce(dtype, ran)
        model = load_dense(store.folder, manifest, dtype, "cpu", runtime)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        most = min(MAX_TOKENS, store.positions or MAX_TOKENS, _MAX_LOGITS_NBYTES // (vocabulary * dtype.itemsize))
        tokens = tokens[: max(1, most)]
        runtime.bring(original.layers, original.experts)
        wanted = _logits(model, tokens)
        runtime.bring(manifest.layers, partial(_stored, store, files))
        found = _logits(model, tokens)
    kl, same = 0.0, 0
    for first in range(0, len(tokens), _ROWS):
        one, other = (logits[first : first + _ROWS].double() for logits in (wanted, found))
        p = log_softmax(one, dim=-1)
        each = p.exp() * (p - log_softmax(other, dim=-1))
        kl += float(torch.where(p == -torch.inf, 0.0, each).sum())
        same += int((one.argmax(dim=-1) == other.argmax(dim=-1)).sum())
    if not np.isfinite(kl):
        raise NanError(f"{store.folder}: the model's predictions are NaN or infinite: no cost of rounding can be told")
    return kl / len(tokens), same / len(tokens), len(tokens)


def _logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V]. An encoder reads the same text."""
    ids = torch.tensor([tokens])
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs, use_cache=False).logits
    return logits[0]


def _stored(store: PackedStore, files: Sequence[ExpertFile], layer: int, experts: Sequence[int]) -> Iterator[Bytes]:
    nbytes, begin = store.manifest.layers[layer].expert_nbytes, store.extents[layer][1]
    expert_bytes = np.empty(nbytes, np.uint8)
    for expert in experts:
        files[layer].read_into(begin + expert * nbytes, expert_bytes.data)
        yield expert_bytes


class OneAtOnce:
    """A `model.hooks.Runtime` that reads each layer's experts one at a time."""

    wants_token_ids = False

    def __init__(self, dtype: torch.dtype, ran: Callable[[int], None]) -> None:
        """`ran` is called after each layer, with the bytes of its experts."""
        self._dtype = dtype
        self._ran = ran
        self._kernels = choose_kernels()
        self._layers: tuple[LayerGeometry, ...] = ()
        self._read: Experts = lambda layer, experts: iter(())

    def bring(self, layers: tuple[LayerGeometry, ...], read: Experts) -> None:
        """From now on `read` gives the experts."""
        self._layers, self._read = layers, read

    def begin_iteration(self, info: IterationInfo) -> None:
        """Nothing is counted."""

    def check_output(self, hidden_states: torch.Tensor) -> None:
        """`_compare` checks the result for NaN."""

    def check_logits(self, logits: torch.Tensor) -> None:
        """`_compare` checks the result for NaN."""

    def end_iteration(self, ok: bool) -> None:
        """Nothing is kept."""

    def forward_experts(
        self,
        module: nn.Module,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        shape = self._layers[layer]
        with torch.no_grad():
            work = dispatch(layer, top_k_index, shape.num_experts, None)
            slot = torch.empty(shape.expert_nbytes, dtype=torch.uint8)
            rows = layer_rows(slot, Geometry(self._layers), layer, self._dtype)
            compute = LayerCompute(module, shape, 1, rows, self._dtype, None, self._kernels)
            call = LayerCall(compute, work, hidden_states)
            experts, filled = iter(wanted := sorted(work.router.experts)), 0
            for chunk in self._read(layer, wanted):
                slot[filled : filled + chunk.nbytes] = torch.from_numpy(chunk)
                filled += chunk.nbytes
                if filled == slot.nbytes:
                    call.compute([Span(layer, next(experts), 0, 1, 0)])
                    filled = 0
            assert next(experts, None) is None and not filled, "an expert was not read whole"
            result = combine(call.outputs, top_k_weights, hidden_states, self._kernels)
        self._ran(shape.nbytes)
        return result
