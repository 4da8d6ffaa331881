"""Room behind the keys and values of a dynamic cache, so that a token is written beside the others.

transformers joins them anew for each token: at 4 096 tokens that copies more than attention reads. Whatever was handed
out is never written again: a cache that was copied, cropped or taken back to an earlier token gets memory of its own.
B sequences, G heads of keys, n tokens, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

ROOM_TOKENS = 64
"""That a layer's memory has room for whenever it grows."""


def give_room(cache: Any) -> None:
    """To every plain layer of transformers' cache, or of its half that grows; other kinds of layer stay."""
    layers: list[Any] = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
    for layer in layers:
        if type(layer) is DynamicLayer:
            layer.__class__ = RoomyLayer
            vars(layer)["_expertly_rooms"] = _Room(), _Room()


class _Room:
    """Memory [B, G, more than n, D] whose first tokens are handed out."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._num_written = 0

    def append(self, past: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        """`past` [B, G, n, D], or nothing, and `more` [B, G, m, D] side by side."""
        memory, num_past = self._memory, past.shape[-2] if past.dim() == 4 else 0
        num_tokens = num_past + more.shape[-2]
        if (
            memory is None
            or num_past != self._num_written
            or num_tokens > memory.shape[2]
            or past.data_ptr() != memory.data_ptr()
            or past.shape[:2] != memory.shape[:2]
            or past.stride() != memory.stride()
        ):
            sizes = (*more.shape[:2], num_tokens + ROOM_TOKENS, more.shape[3])
            memory = self._memory = more.new_empty(sizes)
            if num_past:
                memory[:, :, :num_past] = past
        memory[:, :, num_past:num_tokens] = more
        self._num_written = num_tokens
        return memory[:, :, :num_tokens]


class RoomyLayer(DynamicLayer):
    """A layer that grows in room of its own."""

    _expertly_rooms: tuple[_Room, _Room]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As DynamicLayer's."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._expertly_rooms
        assert self.keys is not None and self.values is not None
        self.keys, self.values = keys.append(self.keys, key_states), values.append(self.values, value_states)
        return self.keys, self.values
