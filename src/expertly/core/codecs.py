"""How experts are stored on disk, and which way is the faster one on a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from expertly.core.errors import ConfigError

CODECS = ("none", "planes")
"""none: weights as they are computed with. planes: the byte planes of weights apart, compressed where that helps."""

LEAST_GAIN = 1.10
"""How much faster than `none` loads must be for `planes` to be chosen: what is measured in a second is not exact."""

MIN_MEASURED_NBYTES = 64 << 20
"""Of experts. Fewer are not worth measuring for: that takes longer than reading them all."""


@dataclass(frozen=True, slots=True)
class CodecRates:
    """What choosing between codecs takes, on one machine and for one model."""

    ratio: float  # stored bytes / decoded bytes of experts in `planes`
    disk_nbytes_per_s: float
    decode_nbytes_per_s: float  # of weights, by one thread while all threads decode
    num_threads: int  # that decode at a time


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec, and one sentence without a full stop that says why."""

    codec: str
    why: str


def check_codec(name: object) -> str:
    """`name` where it is a codec or "auto". Raises ConfigError naming what is accepted."""
    if not isinstance(name, str) or name not in (*CODECS, "auto"):
        raise ConfigError(f"codec={name!r}: unknown; accepted: {', '.join(CODECS)}, auto")
    return name


def refuse_compressed(value: object) -> None:
    """Nothing stays compressed in memory any more. Raises ConfigError where `value` asks for it."""
    if value not in (None, 0, "0", "auto"):
        raise ConfigError(
            f"compressed={value!r:.80}: experts do not stay compressed in memory any more, and no device decodes them; "
            "accepted: codec='planes', by which they are compressed on disk, and memory=, to give them more of it"
        )


def decoding_threads(num_cpus: int, num_readers: int) -> int:
    """How many readers decode at a time while a forward pass waits for what they read, and so computes nothing."""
    return max(1, min(num_cpus, num_readers))


def computing_threads(num_cpus: int, num_readers: int) -> int:
    """How many threads compute where readers decode: half of the processors, or all but one for each reader where that
    is more.
    """
    return max(1, num_cpus // 2, num_cpus - num_readers)


def expected_gain(rates: CodecRates) -> float:
    """Seconds that loading a byte of weights takes with `none`, over those with `planes`, where reading and decoding
    overlap: the slower of the two counts. Of several threads one is left out: on a CPU computing takes its core.
    """
    decode_s = 1 / (rates.decode_nbytes_per_s * max(1, rates.num_threads - 1))
    return (1 / rates.disk_nbytes_per_s) / max(rates.ratio / rates.disk_nbytes_per_s, decode_s)


def choose_codec(rates: CodecRates) -> CodecChoice:
    """`planes` where loads are expected to be at least a tenth faster with it than with `none`, and decoding takes no
    more of the processors than reading saves: where reads hide behind computing, that is what computing loses.
    """
    for name in ("ratio", "disk_nbytes_per_s", "decode_nbytes_per_s", "num_threads"):
        value = getattr(rates, name)
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name}={value}: must be a number above 0")
    gain = expected_gain(rates)
    saved_s = (1 - rates.ratio) / rates.disk_nbytes_per_s
    is_cheap = saved_s * rates.decode_nbytes_per_s * rates.num_threads >= 1
    codec = "planes" if gain >= LEAST_GAIN and is_cheap else "none"
    threads = "1 thread decodes" if rates.num_threads == 1 else f"{rates.num_threads} threads decode"
    facts = (
        f"weights take {rates.ratio:.2f} of their size in planes, the disk reads "
        f"{rates.disk_nbytes_per_s / 1e9:.2f} GB/s, {threads} "
        f"{rates.decode_nbytes_per_s * rates.num_threads / 1e9:.2f} GB/s of weights"
    )
    if codec == "planes":
        return CodecChoice(codec, f"{facts}: loads take {1 / gain:.2f} of the time")
    verdict = f"loads with planes take {1 / gain:.2f} of the time, and must take {1 / LEAST_GAIN:.2f} at the most"
    if gain >= LEAST_GAIN:
        verdict = f"loads with planes take {1 / gain:.2f} of the time, but more of the processors than reading saves"
    return CodecChoice(codec, f"{facts}: {verdict}")


def too_small(nbytes: int) -> CodecChoice | None:
    """`none` for a model of so few bytes of experts that measuring would take longer than reading them; else None."""
    if nbytes >= MIN_MEASURED_NBYTES:
        return None
    return CodecChoice("none", f"{nbytes / (1 << 20):.1f} MiB of experts are too few for measuring to pay")
