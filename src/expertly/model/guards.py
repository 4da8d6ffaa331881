"""What people do with an ordinary model and this one cannot do: refused with the reason, or made harmless."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch

from expertly.core.errors import ModelUseError
from expertly.model.batching import bounded_config, refuse_compiled
from expertly.model.experts import IMPLEMENTATION

_ELSEWHERE = "this model's experts are not in it, they come and go behind it"


class GuardedModel:
    """Mixed in before the model's own class. Guards are off until `seal`, so that loading can move and cast."""

    _expertly_is_sealed = False

    def seal(self: Any) -> None:
        """From now on the model is what it is."""
        self._expertly_is_sealed = True

    # -- a model without experts must not be written ---------------------------------------------------------

    def save_pretrained(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelUseError(f"save_pretrained: {_ELSEWHERE}: it would write a model without them; copy the checkpoint")

    def push_to_hub(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelUseError(f"push_to_hub: {_ELSEWHERE}: it would upload a model without them")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ModelUseError(f"pickling: {_ELSEWHERE} (files, threads, slots): load it again where it is needed")

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Dense weights are copied, everything of expertly (runtime, statistics) is shared.

        The copy keeps the original alive: when that goes, the runtime closes.
        """
        duplicate = self.__class__.__new__(self.__class__)
        memo[id(self)] = duplicate
        for module in self.modules():
            for name, value in vars(module).items():
                if name.startswith("_expertly_"):
                    memo[id(value)] = value
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        duplicate.__dict__["_expertly_original"] = self
        return duplicate

    # -- device and dtype are those of the slots -------------------------------------------------------------

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._expertly_is_sealed:
            return super().to(*args, **kwargs)  # type: ignore[misc]
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if memory_format is not None:
            self._refuse(f"to(memory_format={memory_format})")
        return self._stay("to", device, dtype)

    def cuda(self: Any, device: Any = None) -> Any:
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return self._stay("cuda", wanted, None)

    def cpu(self: Any) -> Any:
        return self._stay("cpu", torch.device("cpu"), None)

    def half(self: Any, *args: Any) -> Any:
        return self._stay("half", None, torch.float16)

    def float(self: Any, *args: Any) -> Any:
        return self._stay("float", None, torch.float32)

    def double(self: Any) -> Any:
        return self._stay("double", None, torch.float64)

    def bfloat16(self: Any) -> Any:
        return self._stay("bfloat16", None, torch.bfloat16)

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        if self._expertly_is_sealed:
            self._refuse("changing the parameters in place")
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def _stay(self: Any, call: str, device: torch.device | None, dtype: torch.dtype | None) -> Any:
        """`self` where nothing would change."""
        here = self.device
        moves = device is not None and (device.type != here.type or device.index not in (None, here.index))
        if moves or dtype not in (None, self.dtype):
            wanted = " ".join(str(value) for value in (device, dtype) if value is not None)
            self._refuse(f"{call}: {wanted} (the model is on {here} in {self.dtype})")
        return self

    def _refuse(self, what: str) -> NoReturn:
        raise ModelUseError(f"{what}: {_ELSEWHERE}; load the model again with the device and dtype you want")

    # -- who computes the experts ------------------------------------------------------------------------------

    def set_experts_implementation(self: Any, experts_implementation: str | dict[str, str]) -> None:
        wanted = experts_implementation
        values = set(wanted.values()) if isinstance(wanted, dict) else {wanted}
        if self._expertly_is_sealed and not values <= {IMPLEMENTATION, self.config._experts_implementation}:
            raise ModelUseError(f"set_experts_implementation({wanted!r}): {_ELSEWHERE}; accepted: {IMPLEMENTATION!r}")

    # -- nothing is traced or captured -------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelUseError(f"compile: {_ELSEWHERE}, which cannot be traced; call the model as it is")

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        return False  # a static cache works, uncompiled

    def init_continuous_batching(
        self: Any, generation_config: Any = None, continuous_batching_config: Any = None, **kwargs: Any
    ) -> Any:
        """As upstream's, with a bounded cache where none is asked for, and no CUDA graphs."""
        refuse_compiled(generation_config or self.generation_config, continuous_batching_config)
        config = bounded_config(continuous_batching_config, kwargs.get("workload_hints"))
        return super().init_continuous_batching(  # type: ignore[misc]
            generation_config=generation_config, continuous_batching_config=config, **kwargs
        )
