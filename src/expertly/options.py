"""Everything that a user can say about how a model is loaded: name, type, default, check and help, once.

`expertly.load`, the commands that run a model and the server read it. No torch here: `--help` needs none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expertly.core.costs import CODECS
from expertly.core.errors import ConfigError
from expertly.formats import ROUNDED_TO, rounding_format
from expertly.scheduler.presets import AUTO_SYSTEM, SYSTEMS
from expertly.scheduler.system import ORDERS

if TYPE_CHECKING:
    from expertly.policies.allocation.moepic import SplitPlan

AUTO = "auto"
HASH = "hash"
PREDICT = ("auto", "thread", "inline")
VERIFY = ("sampled", "always", "never")
CPU_MISSES = ("auto", "never", "always")
GRAPHS = ("auto", "never")


ADVANCED, RESEARCH = "Advanced", "Research"
"""Panels of options that --help leaves to --help-all."""


@dataclass(frozen=True)
class OptionInfo:
    """A field as an option, or an argument, of a command."""

    help: str
    metavar: str | None
    type: Any  # bool, int, float, str, Path, or a function of the text whose ValueError says what is accepted
    least: int | None
    panel: str | None
    choices: Sequence[str] | Callable[[], Sequence[str]] | None  # all that is accepted, or a function: the known ones
    is_argument: bool
    is_several: bool
    was: str | None  # its old name, which is still accepted

    @property
    def is_parsed(self) -> bool:
        return self.type not in (bool, str, Path) or (self.choices is not None and not callable(self.choices))

    def known(self) -> Sequence[str]:
        """The values that the shell completes."""
        return self.choices() if callable(self.choices) else self.choices or ()

    def parse(self, text: str) -> Any:
        """Raises ValueError with what is accepted."""
        if self.choices is not None and not callable(self.choices):
            if text not in self.choices:
                raise ValueError(" or ".join(self.choices))
            return text
        if self.type is not int:
            return self.type(text)
        least = self.least or 0
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise ValueError(f"a whole number from {least}")
        return value


MODEL_HELP = "a folder, a GGUF file, a packed store or a hub id (default: the demo model)"
REQUIRED = MISSING
"""The default of an option that the command line must give."""


def option(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    type: Any = None,
    least: int | None = None,
    panel: str | None = None,
    choices: Sequence[str] | Callable[[], Sequence[str]] | None = None,
    is_argument: bool = False,
    is_several: bool = False,
    was: str | None = None,
) -> Any:
    """A field of a dataclass of options: an option of the command line, --name-of-the-field.

    `type`: the default's, else str; or a function of the text whose ValueError says what is accepted. `least`: it is a
    whole number from there. `panel`: the group under which --help-all shows it. `choices`: all accepted values; or a
    function that gives those to complete, where others are accepted, too. `was`: its old name.
    """
    usual = int if least is not None else str if default is None or default is REQUIRED else default.__class__
    kind = type or usual
    told = OptionInfo(
        help, metavar or ("N" if kind is int else None), kind, least, panel, choices, is_argument, is_several, was
    )
    return field(default=default, metadata={"option": told})


def argument(
    default: Any, help: str, *, metavar: str, type: Any = None, is_several: bool = False, was: str | None = None
) -> Any:
    """A field that the command line takes by its place. `is_several`: one or more, as a list. `was`: the name of the
    option that it used to be.
    """
    return option(default, help, metavar=metavar, type=type, is_argument=True, is_several=is_several, was=was)


def path_option(default: Any, help: str, metavar: str = "FILE", **more: Any) -> Any:
    """An option that names a file, or a folder."""
    return option(default, help, metavar=metavar, type=Path, **more)


def json_flag() -> Any:
    """The field `json` of a command's options."""
    return option(False, "print one JSON object on stdout, messages on stderr")


def jobs_option(what: str) -> Any:
    """The field `jobs` of a command's options."""
    least = "by default as many as there are processors"
    return option(None, f"how many {what} run at once, each in its own process; {least}", least=1, panel=ADVANCED)


@dataclass(frozen=True)
class LoadOptions:
    """The options of `expertly.load` beside the model. Raises ConfigError naming the option, its value and what is
    accepted, where that does not depend on model or machine.
    """

    memory: str | int | None = option(
        AUTO,
        'for experts on the device: a share of them ("25%"), an amount ("1.5GiB") or "auto": what'
        " is free beside the dense part and the KV cache of `context` tokens",
        metavar="SIZE",
    )
    total_memory: str | int | None = option(
        None,
        "instead of memory: for everything, that is process, dense part, KV cache of `context` "
        'tokens and experts ("8GiB", a share of what is free, or "auto"); of an accelerator, its '
        "own memory",
        metavar="SIZE",
    )
    system: str = option(
        AUTO_SYSTEM,
        "what decides which experts stay in memory, see `expertly lab systems`; auto: what "
        "`expertly tune` chose for the nearest memory, else expertly-ahead, or lru where experts "
        "are tiny",
        metavar="NAME",
        choices=lambda: [AUTO_SYSTEM, *systems_that_run()],
    )
    device: str | None = option(
        None,
        "where the model runs: cpu or cuda:N (default: the accelerator, where there is one)",
        metavar="NAME",
        panel=ADVANCED,
    )
    devices: str | Sequence[str] | None = option(
        None,
        "several devices that share the experts, cuda:0,cuda:1, or logical ones, cpu:0,cpu:1; "
        "`memory` is then for all of them together, `staging_slots` for each",
        metavar="A,B",
        panel=ADVANCED,
    )
    workers: str | int | None = option(
        None,
        "other machines that share the experts with this one and compute them in their memory: the address of a Ray "
        "cluster (one worker on each of its other machines), or how many to start on this one",
        metavar="ADDRESS|N",
        panel=ADVANCED,
    )
    worker_memory: str | int = option(
        AUTO,
        "for experts in each worker: a share of all, an amount or auto (nine tenths of what is free there)",
        metavar="SIZE",
        panel=ADVANCED,
    )
    worker_deadline: float = option(
        30.0,
        "after so many seconds without the answer for a layer a worker is dropped, and its experts are computed here",
        metavar="SECONDS",
        panel=RESEARCH,
    )
    placement: str | Path = option(
        HASH,
        "which worker has which experts: by a hash, or a folder with recorded routing of the model (`expertly lab "
        "trace record`), by which experts chosen together lie apart and memory that is left holds copies",
        metavar="hash|TRACE",
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
        "other tokens than the model's; what that costs is measured once and told",
        metavar="NAME",
        panel=ADVANCED,
        choices=lambda: tuple(ROUNDED_TO),
    )
    codec: str = option(
        AUTO,
        "how experts are stored on disk: none (as they are computed with), planes (compressed "
        "without loss) or auto: as they are stored already, else what measuring shows to be "
        "faster",
        metavar="NAME",
        panel=ADVANCED,
        choices=lambda: (AUTO, *CODECS),
    )
    context: int | Callable[[Any], int] | None = option(
        None,
        "how many tokens of prompt and answer there must be room for; experts get the memory that"
        " leaves, unless memory is stated (default: 4096). From Python also a function that takes"
        " the tokenizer and returns it",
        least=1,
        panel=ADVANCED,
    )
    host_memory: str | int = option(AUTO, "RAM for experts behind an accelerator", metavar="SIZE", panel=ADVANCED)
    cpu_misses: Literal["auto", "never", "always"] = option(
        AUTO,
        "experts that an accelerator's memory lacks and the host's has: computed by the processor where that is faster "
        "than copying, as measured while loading (auto), never, or always; tokens do not depend on it",
        metavar="WHEN",
        panel=ADVANCED,
        choices=lambda: CPU_MISSES,
    )
    graphs: Literal["auto", "never"] = option(
        AUTO,
        "an accelerator's dense part of a single token as CUDA graphs: where they give the same numbers, to the bit, "
        "for the first tokens, and with one device (auto); or never",
        metavar="WHEN",
        panel=ADVANCED,
        choices=lambda: GRAPHS,
    )
    learned: str | Path | None = option(
        AUTO,
        "where a system keeps what it learns while it runs (expert maps, activation matrices, "
        'reuse weights): a file, "auto" (beside the packed store) or "off". It begins with that '
        "and saves it about every minute and at the end; reuse weights only with one device and "
        "without `decisions`",
        metavar="FILE",
        panel=ADVANCED,
        was="maps",
    )
    predictor: str | Path | None = option(
        AUTO,
        "trained weights for a system with a learned predictor: a file of `expertly lab train`, "
        '"auto" (beside the packed store, or those of the demo model) or "off"',
        metavar="FILE",
        panel=ADVANCED,
    )
    segments: int | None = option(
        None,
        "P, the number of segments an expert is cut into (default: the system's)",
        metavar="P",
        least=1,
        panel=RESEARCH,
    )
    plan: str | Path | SplitPlan | None = option(
        None,
        "a plan that a system with split caching begins with, for this model, this P and no more "
        "memory; `expertly lab configure` makes it",
        metavar="FILE",
        panel=RESEARCH,
    )
    predict: Literal["auto", "thread", "inline"] = option(
        AUTO,
        "where a system predicts: thread (beside the forward pass), inline (within it, so that a "
        "run repeats exactly) or auto: inline where the system waits for its predictions, else "
        "thread",
        metavar="NAME",
        panel=RESEARCH,
        choices=lambda: PREDICT,
        was="matcher",
    )
    verify: Literal["sampled", "always", "never"] = option(
        "sampled",
        "which reads are compared with the store's checksums: sampled (config and dense part while loading, each part "
        "of an expert when it is first read, and then one in 64 reads of it), always (every read) or never; compressed "
        "experts are compared at every read",
        metavar="WHEN",
        panel=ADVANCED,
        choices=lambda: VERIFY,
    )
    staging_slots: int | None = option(
        None,
        "slots through which a layer streams experts that the cache does not keep (default: for "
        "one token's experts; for all where the system keeps none)",
        metavar="N",
        type=int,
        panel=RESEARCH,
        was="ring",
    )
    order: str | None = option(
        None,
        "in which order a layer computes its experts, instead of the system's own: resident "
        "(those in memory first) or id",
        metavar="NAME",
        panel=RESEARCH,
        choices=lambda: ORDERS,
    )
    decisions: str | Path | None = option(
        None,
        "a file for every observation and decision of the scheduler, which `expertly lab trace replay` reads",
        metavar="FILE",
        panel=RESEARCH,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.verify == "first":  # its name until reads were sampled
            object.__setattr__(self, "verify", "sampled")
        for name, accepted in (
            ("predict", PREDICT),
            ("verify", VERIFY),
            ("cpu_misses", CPU_MISSES),
            ("graphs", GRAPHS),
        ):
            if (value := getattr(self, name)) not in accepted:
                raise ConfigError(f"{name}={value!r}: unknown; accepted: {', '.join(accepted)}")
        if self.quantize is not None:
            rounding_format(self.quantize)
        check_one_memory(self.memory, self.total_memory)
        for name in ("placement", "worker_memory", "worker_deadline"):
            value = getattr(self, name)
            if self.workers is None and value != LOAD_OPTIONS[name].default:
                raise ConfigError(f"{name}={str(value)!r}: only with the option `workers`")
        if not (isinstance(self.worker_deadline, int | float) and 0 < self.worker_deadline < math.inf):
            raise ConfigError(f"worker_deadline={self.worker_deadline!r}: must be a number of seconds above 0")
        for one in LOAD_OPTIONS.values():
            value, told = getattr(self, one.name), one.metadata["option"]
            if told.least is None or value is None or callable(value):
                continue
            if type(value) is not int or value < told.least:
                raise ConfigError(f"{one.name}={value!r}: must be a whole number from {told.least}")


def dtype_name(dtype: Any) -> str | None:
    """ "float32" for torch.float32, numpy.float32 or the text. Whether the name is a dtype is
    checked where it is used.
    """
    if dtype is None or isinstance(dtype, str):
        return None if dtype is None else dtype.removeprefix("torch.")
    name = getattr(dtype, "__name__", None) or str(dtype)
    return name.removeprefix("torch.")


LOAD_OPTIONS: dict[str, Field[Any]] = {one.name: one for one in fields(LoadOptions) if "option" in one.metadata}


def load_option(name: str, **changed: Any) -> Any:
    """The option of `load` with this name, as a field of another command's options. `changed`: its default here, or
    what else of its OptionInfo is different.
    """
    one = LOAD_OPTIONS[name]
    default = changed.pop("default", one.default)
    return field(default=default, metadata={"option": replace(one.metadata["option"], **changed)})


def check_one_memory(memory: object, total_memory: object) -> None:
    """Raises ConfigError where both say how much."""
    if total_memory is not None and memory not in (None, AUTO):
        raise ConfigError(f"memory={memory!r} and total_memory={total_memory!r}: accepted: one of the two")


def _refuse_compressed(value: object) -> None:
    if value not in (None, 0, "0", AUTO):
        raise ConfigError(
            f"compressed={value!r:.80}: experts do not stay compressed in memory any more, and no device decodes them; "
            "accepted: codec='planes', by which they are compressed on disk, and memory=, to give them more of it"
        )


GONE: dict[str, Callable[[object], None]] = {"compressed": _refuse_compressed}
"""Options that no longer exist, each with a function that raises ConfigError if its value asks for something."""


def names_of_today(told: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `load` with old names replaced. Raises ConfigError for an option that no longer exists, or that is
    given under both names.
    """
    was = {one.metadata["option"].was: name for name, one in LOAD_OPTIONS.items()}
    found: dict[str, Any] = {}
    for name, value in told.items():
        if name in GONE:
            GONE[name](value)
            continue
        now = was.get(name, name)
        if now != name and now in told:
            raise ConfigError(f"{name}={value!r}: is called {now} now, and that is given too")
        found[now] = value
    return found


def words_of_today(words: Sequence[str], options: Mapping[str, OptionInfo]) -> list[str]:
    """A command line of these options with old names replaced. Raises ConfigError for one that no longer exists."""
    now = {flag_of(told.was): "" if told.is_argument else flag_of(name) for name, told in options.items() if told.was}
    gone = {flag_of(name): refuse for name, refuse in GONE.items()}
    found: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*found, word, *left]
        flag, equals, value = word.partition("=")
        if flag in gone:
            gone[flag](value if equals or not left else left.pop(0))
        elif flag not in now:
            found.append(word)
        elif now[flag]:
            found.append(now[flag] + equals + value)
        elif equals:
            found.append(value)
    return found


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def load_arguments(options: LoadOptions) -> dict[str, Any]:
    """The arguments of `expertly.load` in a command's options."""
    return {name: getattr(options, name) for name in LOAD_OPTIONS}


def systems_that_run() -> list[str]:
    """The presets that an engine can run."""
    return [name for name, system in SYSTEMS.built_in.items() if "future" not in system.needs]


def described() -> str:
    """The options for a docstring."""
    return "\n".join(f"    {name}: {one.metadata['option'].help}." for name, one in LOAD_OPTIONS.items())
