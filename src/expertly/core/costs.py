"""What moving, decoding and computing cost on one machine: measured by the engine, used by the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from expertly.core.errors import ConfigError
from expertly.core.geometry import LayerGeometry

CODECS = ("none", "planes")
"""How experts are stored. none: as they are computed with. planes: the byte planes of weights apart, compressed where
that helps.
"""


def check_codec(name: object) -> str:
    """`name`, if it is a codec or "auto". Raises ConfigError naming what is accepted."""
    if not isinstance(name, str) or name not in (*CODECS, "auto"):
        raise ConfigError(f"codec={name!r}: unknown; accepted: {', '.join(CODECS)}, auto")
    return name


@dataclass(frozen=True, slots=True)
class Link:
    """A serial server of transfers: n spans submitted together have all arrived after one latency and the sum of the
    times that each occupies it; none of them before that if they arrive together. With an infinite rate, no latency and
    no overhead it is infinitely fast.
    """

    nbytes_per_s: float
    latency_ns: int  # from the submission of a span until it moves, at the least: a busy link hides it
    overhead_ns: int  # of each span, beyond its bytes
    prefetch_latency_ns: int = 0  # of each prefetch, where these run only on an idle link; 0: they pay `latency_ns`
    prefetch_read_nbytes: int = 0  # then: read in parts of at least so many, a few at a time; 0: one prefetch at a time
    prefetches_when_called: bool = False  # and none begins but when the computing thread prefetches, polls or waits
    arrive_together: bool = False  # at the same time come those that are submitted, or begin to be prefetched, together

    def occupies_ns(self, nbytes: int) -> int:
        """How long a span of so many bytes keeps the link from serving the next one."""
        return self.overhead_ns + round(nbytes / self.nbytes_per_s * 1e9)


@dataclass(frozen=True, slots=True)
class HostCompute:
    """How fast a host's processors compute experts from its memory while a link copies others out of it, and how fast
    the link is then.
    """

    nbytes_per_s: float  # of weights
    flops_per_s: float
    call_ns: int  # once a layer: hidden states come to the host, outputs go back
    link_slowdown: float  # how many times longer a copy takes meanwhile; at least 1


@dataclass(frozen=True, slots=True)
class CodecCosts:
    """What storing experts compressed saves and costs. Rates count decoded bytes.

    The defaults are assumed, for a bfloat16 model and two threads; `expertly doctor` measures.
    """

    ratio: float = 0.68  # stored bytes of a byte of weights
    decode_nbytes_per_s: float = 1.0e9  # of one thread, while all of them decode
    threads: int = 2  # that decode side by side
    threads_beside: int = 1  # of them, while the model computes on the same processors
    read_processors: float = 0.0  # that reading takes from them (drivers, a virtual disk's host)

    @property
    def all_nbytes_per_s(self) -> float:
        """The rate of all threads together."""
        return self.decode_nbytes_per_s * self.threads


@dataclass(frozen=True, slots=True)
class LayerTime:
    """The time of a layer's experts, in decode steps of one token, where so many of them were wholly absent."""

    num_absent: int
    total_ns: int  # the median
    num_samples: int


@dataclass(frozen=True, slots=True)
class MeasuredCompute:
    """What one model's passes cost on one machine, without transfers. All its MoE layers have one geometry.

    The lists run over `tokens`: of the forward pass (`dense_ns`, `head_ns`) or of one expert. An expert that is
    computed in parts costs `parts_ns` in all, in proportion to their neurons, and `part_ns` for each.
    """

    model: str
    dtype: str
    num_threads: int
    context: int  # tokens in the KV cache when it was measured: attention costs more with more
    num_layers: int
    layer: LayerGeometry
    tokens: tuple[int, ...]  # rising
    dense_ns: tuple[int, ...]  # one MoE layer's block without its experts: attention, router, dispatch, control plane
    head_ns: tuple[int, ...]  # once an iteration: embedding, layers without experts, head, choosing the token
    expert_ns: tuple[int, ...]  # a whole expert
    parts_ns: tuple[int, ...]
    part_ns: tuple[int, ...]
    submit_ns: int  # the computing thread's own time for spans demanded together: deciding, waking readers, sharing
    load_ns: int  # and for each span of them
    slowdown_while_loading: float  # of `dense_ns` while the link is busy; at least 1
    observe_ns: int = 0  # what a layer takes longer where a predictor's thread looks at its router's choice
    observe_light_ns: int | None = None  # and where that goes by counts alone; None: the same
    plan_ns: int = 0  # and where it is decided what of a prediction to prefetch
    prefetch_ns: int = 0  # and for experts that are prefetched together beside it
    prefetch_each_ns: int = 0  # and for each of them, besides `load_ns`
    decide_ns: int = 0  # and where an eviction policy learns from its router's choice
