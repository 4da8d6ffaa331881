"""Everything that a user can say about how a model is loaded: name, type, default, check and help, once.

`expertly.load`, the commands that run a model and the server read it. No torch here: `--help` needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from expertly.core.errors import ConfigError
from expertly.formats import ROUNDED_TO, rounding_format
from expertly.scheduler.systems import AUTO_SYSTEM

T = TypeVar("T")

AUTO = "auto"
Verify = Literal["sampled", "always", "never"]
ADVANCED, RESEARCH = "Advanced", "Research"
"""Panels of options that --help leaves to --help-all."""
MODEL_HELP = "a folder, a GGUF file, a packed store or a hub id (owner/NAME:Q4_K_M too; default: the demo model)"
REQUIRED = MISSING
"""The default of an option that the command line must give."""


# Types of command-line values: functions of the text whose ValueError says what is accepted.


def checked(convert: Callable[[str], T], accepted: str, accepts: Callable[[T], bool]) -> Callable[[str], T]:
    """A type for values that `accepts` is true of; `accepted` is that condition in words."""

    def parse(text: str) -> T:
        with suppress(ValueError):
            if accepts(value := convert(text)):
                return value
        raise ValueError(accepted)

    return parse


def whole_number(least: int) -> Callable[[str], int]:
    return checked(int, f"a whole number from {least}", lambda value: value >= least)


def one_of(*names: str) -> Callable[[str], str]:
    return checked(str, " or ".join(names), lambda text: text in names)


def path_name(text: str) -> Path:
    if not text:  # as of a shell's variable that is not set: it would mean this folder
        raise ValueError("the name of a file or a folder")
    return Path(text)


temperature = checked(float, "0 (greedy), or from 0.0001", lambda value: value == 0 or 1e-4 <= value < float("inf"))
probability = checked(float, "above 0 and at most 1", lambda value: 0 < value <= 1)
seed = checked(int, "a whole number from 0 to 2^63 - 1", lambda value: 0 <= value < 1 << 63)


@dataclass(frozen=True)
class OptionInfo:
    """A field as an option, or an argument, of a command."""

    help: str
    metavar: str
    parse: Callable[[str], Any]  # whose ValueError says what is accepted
    is_flag: bool
    panel: str | None
    is_argument: bool
    is_several: bool


def option(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    type: Any = None,
    least: int | None = None,
    panel: str | None = None,
    is_argument: bool = False,
    is_several: bool = False,
) -> Any:
    """A field of a dataclass of options: an option of the command line, --name-of-the-field.

    `type`: the default's, else str; or a function of the text whose ValueError says what is accepted. `least`: it is a
    whole number from there. `panel`: the group under which --help-all shows it.
    """
    usual = int if least is not None else str if default is None or default is REQUIRED else default.__class__
    kind = type or usual
    parse = {int: whole_number(least or 0), Path: path_name}.get(kind, kind)
    metavar = metavar or ("N" if kind is int else "TEXT")
    info = OptionInfo(help, metavar, parse, kind is bool, panel, is_argument, is_several)
    return field(default=default, metadata={"option": info})


def argument(default: Any, help: str, *, metavar: str, type: Any = None, is_several: bool = False) -> Any:
    """A field that the command line takes by its place. `is_several`: one or more, as a list."""
    return option(default, help, metavar=metavar, type=type, is_argument=True, is_several=is_several)


def path_option(default: Any, help: str, metavar: str = "FILE", **more: Any) -> Any:
    """An option that names a file, or a folder."""
    return option(default, help, metavar=metavar, type=Path, **more)


def json_flag() -> Any:
    """The field `json` of a command's options."""
    return option(False, "print one JSON object on stdout, messages on stderr")


def jobs_option(tasks: str) -> Any:
    """The field `jobs` of a command's options."""
    least = "by default as many as there are processors"
    return option(None, f"how many {tasks} run at once, each in its own process; {least}", least=1, panel=ADVANCED)


@dataclass(frozen=True)
class LoadOptions:
    """The options of `expertly.load` beside the model. Raises ConfigError naming the option, its value and what is
    accepted, where that does not depend on model or machine.
    """

    memory: str | int | None = option(
        AUTO,
        'for experts on the device: a share of them ("25%"), an amount ("1.5GiB") or "auto": what is free beside the '
        "dense part and the KV cache of `context` tokens",
        metavar="SIZE",
    )
    total_memory: str | int | None = option(
        None,
        "instead of memory: for everything, that is process, dense part, KV cache of `context` tokens and experts "
        '("8GiB", a share of what is free, or "auto"); of an accelerator, its own memory',
        metavar="SIZE",
    )
    system: str = option(
        AUTO_SYSTEM,
        "what decides which experts stay in memory, see `expertly systems`; auto: what "
        "`expertly bench --save` found fastest in about this memory, else expertly, or expertly-ahead if "
        "much is missing",
        metavar="NAME",
    )
    device: str | None = option(
        None,
        "where the model runs: cpu or cuda:N (default: the accelerator, where there is one)",
        metavar="NAME",
        panel=ADVANCED,
    )
    workers: str | int | None = option(
        None,
        "other machines that share the experts with this one and compute them in their memory: the address of a Ray "
        "cluster (one worker on each of its other machines), or how many to start on this one. Each has `memory` for "
        "experts, too; auto, or beside total_memory, nine tenths of what is free there",
        metavar="ADDRESS|N",
        panel=ADVANCED,
    )
    dtype: Any = option(
        None,
        "bfloat16, float16 or float32, or torch's name for it (default: the checkpoint's)",
        metavar="NAME",
        panel=ADVANCED,
    )
    quantize: str | None = option(
        None,
        f"round the experts of a model that is not quantised to {' or '.join(ROUNDED_TO)}: smaller, faster, and with "
        "other tokens than the model's",
        metavar="NAME",
        panel=ADVANCED,
    )
    context: int | Callable[[Any], int] | None = option(
        None,
        "how many tokens of prompt and answer there must be room for; experts get the memory that leaves, unless "
        "memory is stated (default: 4096). From Python also a function that takes the tokenizer and returns it",
        least=1,
        panel=ADVANCED,
    )
    kv: Literal["8bit"] | None = option(
        None,
        "8bit: keep the KV cache in 8 bits, about half as large, and with other tokens than the model's; how far they "
        "are from these is measured on a short text when a model is first loaded so, and said (default: as it is)",
        metavar="NAME",
        panel=ADVANCED,
    )
    table_memory: str | int | None = option(
        None,
        "for rows of tables of embeddings above 256 MiB, which stay on the disk and are read by row: those that were "
        "used last are kept (default: none)",
        metavar="SIZE",
        panel=ADVANCED,
    )
    host_memory: str | int = option(AUTO, "RAM for experts behind an accelerator", metavar="SIZE", panel=ADVANCED)
    predictor: str | Path | None = option(
        AUTO,
        "trained weights for a system with a learned predictor: a file of `expertly lab train`, "
        '"auto" (beside the packed store, or those of the demo model) or "off"',
        metavar="FILE",
        panel=ADVANCED,
    )
    verify: Verify = option(
        "sampled",
        "which reads are compared with the store's checksums: sampled (config and dense part while loading, each part "
        "of an expert when it is first read, and then one in 64 reads of it), always (every read) or never",
        metavar="WHEN",
        panel=ADVANCED,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.verify not in get_args(Verify):
            raise ConfigError(f"verify={self.verify!r}: unknown; accepted: {', '.join(get_args(Verify))}")
        if self.kv not in (None, "8bit"):
            raise ConfigError(f"kv={self.kv!r}: unknown; accepted: 8bit")
        if self.quantize is not None:
            rounding_format(self.quantize)
        check_one_memory(self.memory, self.total_memory)
        context = self.context
        if context is not None and not callable(context) and (type(context) is not int or context < 1):
            raise ConfigError(f"context={context!r}: must be a whole number from 1")


def dtype_name(dtype: Any) -> str | None:
    """ "float32" for torch.float32, numpy.float32 or the text; whether it is a dtype is checked where it is used."""
    if dtype is None:
        return None
    name: str = getattr(dtype, "__name__", None) or str(dtype)
    return name.removeprefix("torch.")


LOAD_OPTIONS: dict[str, Field[Any]] = {entry.name: entry for entry in fields(LoadOptions)}


def load_option(name: str, **changed: Any) -> Any:
    """The option of `load` with this name, as a field of another command's options. `changed`: its default here, or
    what else of its OptionInfo is different.
    """
    default = changed.pop("default", LOAD_OPTIONS[name].default)
    return field(default=default, metadata={"option": replace(LOAD_OPTIONS[name].metadata["option"], **changed)})


def check_one_memory(memory: object, total_memory: object) -> None:
    """Raises ConfigError where both say how much."""
    if total_memory is not None and memory not in (None, AUTO):
        raise ConfigError(f"memory={memory!r} and total_memory={total_memory!r}: accepted: one of the two")


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def described() -> str:
    """The options for a docstring."""
    return "\n".join(f"    {name}: {entry.metadata['option'].help}." for name, entry in LOAD_OPTIONS.items())


def names(field: str, text: str) -> list[str]:
    """The names in `lru,lfu`, in order and each once. Raises ConfigError naming `field`: the text may be a default,
    which no parser has seen.
    """
    listed = [name.strip() for name in text.split(",")]
    if not all(listed):
        raise ConfigError(f"{field}={text!r}: must be one or more, with commas between them")
    return list(dict.fromkeys(listed))
