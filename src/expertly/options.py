"""Everything that a user can say about how a model is loaded: name, type, default, check and help, once.

`expertly.load`, the commands that run a model and the server read it. No torch here: `--help` needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expertly.core.costs import refuse_compressed
from expertly.core.errors import ConfigError
from expertly.scheduler.presets import AUTO_SYSTEM, SYSTEMS

if TYPE_CHECKING:
    from expertly.policies.allocation.moepic import SplitPlan

AUTO = "auto"
MATCHERS = ("auto", "thread", "inline")
VERIFY = ("first", "never")


def option(default: Any, help: str, *, metavar: str | None = None, least: int | None = None) -> Any:
    """A field of LoadOptions. `help` is a sentence without its end; with a `metavar` the command line has the option,
    too. `least`: of a whole number.
    """
    return field(default=default, metadata={"help": help, "metavar": metavar, "least": least})


@dataclass(frozen=True)
class LoadOptions:
    """The options of `expertly.load` beside the model. Raises ConfigError naming the option, its value and what is
    accepted, as far as that depends on nothing else.
    """

    memory: str | int | None = option(
        AUTO,
        'all expert slots on the device: a share of the experts ("25%"), an amount ("1.5GiB", bytes) or "auto", what '
        "is free after the dense part and the KV cache of `context` tokens",
        metavar="SIZE",
    )
    total_memory: str | int | None = option(
        None,
        "instead of memory: everything, that is the process, the dense part, the KV cache of `context` tokens, and "
        'experts in what is left ("8GiB", a share of the free memory, or "auto"); of an accelerator, what is on it',
        metavar="SIZE",
    )
    system: str = option(
        AUTO_SYSTEM,
        "a preset, what is installed, or one of them with other parts, name:key=value (see `expertly systems`); auto: "
        "what `expertly tune` chose for this model at the nearest memory, else expertly, or lru where experts are tiny",
        metavar="NAME",
    )
    segments: int | None = option(
        None, "P, the parts an expert is cut into (default: the system's)", metavar="P", least=1
    )
    dtype: Any = option(
        None, "bfloat16, float16 or float32, or torch's name for it (default: the checkpoint's)", metavar="NAME"
    )
    codec: str = option(
        AUTO,
        "how experts are stored on disk: none (as they are computed with), planes (compressed, bit for bit the same) "
        "or auto, as they are stored already, else what is faster by measuring",
        metavar="NAME",
    )
    device: str | None = option(
        None, "where the model runs: cpu or cuda:N (default: the accelerator, where there is one)", metavar="NAME"
    )
    devices: str | Sequence[str] | None = option(
        None,
        "experts over several devices, cuda:0,cuda:1, or logical ones, cpu:0,cpu:1; `memory` is their sum then, "
        "`ring` that of each",
        metavar="A,B",
    )
    maps: str | Path | None = option(
        AUTO,
        "what a system learns while it runs (expert maps, activation matrices, reuse), which it starts from and adds "
        'to about every minute and at the end: a file, "auto" (beside the packed store) or "off"; reuse is kept of '
        "one device, and not with `decisions`",
        metavar="FILE",
    )
    predictor: str | Path | None = option(
        AUTO,
        'weights that a system with a learned predictor takes: a file made by `expertly train-predictor`, "auto" '
        '(beside the packed store, or those of the demo model) or "off"',
        metavar="FILE",
    )
    plan: str | Path | SplitPlan | None = option(
        None,
        "splits that a system with split caching begins with, of this model, this P and no more memory: `expertly "
        "configure` makes the file",
        metavar="FILE",
    )
    matcher: Literal["auto", "thread", "inline"] = option(
        AUTO,
        "where a system predicts: thread (beside the forward pass), inline (within it, so that a run can be repeated "
        "exactly) or auto, inline where the system waits for its predictions, else thread",
        metavar="NAME",
    )
    verify: Literal["first", "never"] = option(
        "first",
        "when bytes of the store are compared with their checksums: first (config and dense part while loading, each "
        "part of an expert when it is first read) or never; compressed experts are compared at every read",
        metavar="WHEN",
    )
    compressed: Any = option(None, "has gone: any value is refused")
    ring: int | None = option(
        None,
        "staging slots, through which a layer streams what it does not keep (default: one token's experts, and all "
        "where the system keeps none)",
    )
    order: str | None = option(
        None, "instead of the system's: resident computes what is here first, id by rising number"
    )
    context: int | Callable[[Any], int] | None = option(
        None,
        "tokens of prompts and answers that there must be room for; experts get what that leaves, unless memory is "
        "stated (default: 4096, where experts get what is left). Or a function that tells it, given the tokenizer",
    )
    host_memory: str | int = option(AUTO, "RAM for experts behind an accelerator")
    decisions: str | Path | None = option(
        None, "a file that takes every observation and decision of the scheduler, for `expertly trace replay`"
    )

    def __post_init__(self) -> None:
        refuse_compressed(self.compressed)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.matcher not in MATCHERS:
            raise ConfigError(f"matcher={self.matcher!r}: unknown; accepted: {', '.join(MATCHERS)}")
        if self.verify not in VERIFY:
            raise ConfigError(f"verify={self.verify!r}: unknown; accepted: {', '.join(VERIFY)}")
        if self.total_memory is not None and self.memory not in (None, AUTO):
            raise ConfigError(
                f"memory={self.memory!r} and total_memory={self.total_memory!r}: accepted: one of the two"
            )
        for one in fields(self):
            value, least = getattr(self, one.name), one.metadata["least"]
            if least is not None and value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"{one.name}={value!r}: must be a whole number from {least}")


def dtype_name(dtype: Any) -> str | None:
    """ "float32" of torch.float32, numpy.float32 or its name; what else a text says is looked at where it is used."""
    if dtype is None or isinstance(dtype, str):
        return None if dtype is None else dtype.removeprefix("torch.")
    name = getattr(dtype, "__name__", None) or str(dtype)
    return name.removeprefix("torch.")


LOAD_OPTIONS: dict[str, Field[Any]] = {one.name: one for one in fields(LoadOptions)}


def command_line_options() -> list[Field[Any]]:
    """Those that the commands which run a model have."""
    return [one for one in fields(LoadOptions) if one.metadata["metavar"] is not None]


def systems_that_run() -> list[str]:
    """The presets that an engine can run."""
    return [name for name, system in SYSTEMS.built_in.items() if "future" not in system.needs]


def described() -> str:
    """The options as a docstring has them."""
    return "\n".join(f"    {one.name}: {one.metadata['help']}." for one in fields(LoadOptions))
