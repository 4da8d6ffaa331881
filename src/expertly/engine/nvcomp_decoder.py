"""zstd on a CUDA device, by nvCOMP. The only file that imports it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from expertly.core.errors import ConfigError, TransferError

PACKAGES = "nvidia-nvcomp-cu12 or nvidia-nvcomp-cu13"
LEAST_VERSION = 6
"""From which on what is decompressed can go where it is wanted, without the host waiting for sizes."""


class NvcompDecoder:
    """See DeviceDecoder.

    Frames of libzstd are what nvCOMP calls raw: without a header of its own. The sizes that they decompress to are read
    back from the device once for each number of planes, which makes the host wait; after that nothing does.
    """

    def __init__(
        self,
        device: torch.device,
        stream: int,
        mark: Callable[[], Any],
        is_past: Callable[[Any], bool],
        library: Any = None,
    ) -> None:
        """`stream`: the copy stream's handle; `mark` and `is_past` are those of Streams. Raises ConfigError where
        nvCOMP is missing, too old or does not work on the device.
        """
        nvcomp = _library() if library is None else library
        self._nvcomp = nvcomp
        self._stream = stream
        try:
            self._codec = nvcomp.Codec(
                algorithm="Zstd",
                bitstream_kind=nvcomp.BitstreamKind.RAW,
                device_id=device.index or 0,
                cuda_stream=stream,
            )
        except (RuntimeError, TypeError, ValueError) as error:  # what its binding raises
            raise ConfigError(f"nvCOMP cannot be used on {device} ({error})") from error
        self._configs: dict[tuple[int, int], Any] = {}  # by planes and their size
        self._mark, self._is_past = mark, is_past
        self._queued: deque[tuple[Any, Any]] = deque()  # what the device may still read the tables of

    def decompress(self, stored: Sequence[torch.Tensor], planes: Sequence[torch.Tensor]) -> None:
        """See DeviceDecoder. Raises TransferError where nvCOMP refuses; what is queued is not waited for."""
        while self._queued and self._is_past(self._queued[0][0]):
            self._queued.popleft()
        shape = len(planes), planes[0].numel()
        try:
            sources = self._nvcomp.as_arrays(list(stored), cuda_stream=self._stream)
            targets = self._nvcomp.as_arrays(list(planes), cuda_stream=self._stream)
            if shape not in self._configs:
                self._configs[shape] = self._codec.decompression_config(sources)
            self._codec.decode(sources, out=targets, decompression_config=self._configs[shape])
        except (RuntimeError, TypeError, ValueError) as error:  # what its binding raises
            raise TransferError(f"nvCOMP cannot decompress {len(stored)} frames ({error})") from error
        self._queued.append((self._mark(), (sources, targets)))


def why_not() -> str | None:
    """What keeps nvCOMP from being used in this Python; None where nothing does."""
    try:
        _library()
    except ConfigError as error:
        return str(error)
    return None


def _library() -> Any:
    try:
        nvcomp: Any = import_module("nvidia.nvcomp")
    except (ImportError, OSError):
        raise ConfigError(f"nvCOMP is not installed in this Python; `pip install` {PACKAGES} brings it") from None
    version = str(nvcomp.__version__)
    if int(version.split(".")[0]) < LEAST_VERSION:
        raise ConfigError(f"nvCOMP {version} is installed; accepted: {LEAST_VERSION} and later")
    return nvcomp
