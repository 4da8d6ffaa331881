"""Policies and systems by name: what ships, what installed distributions bring, and what can be imported
(docs/extending.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from expertly.core.errors import ConfigError
from expertly.policies.allocation import Allocation, Uniform
from expertly.policies.base import Policy
from expertly.policies.eviction import EvictionPolicy
from expertly.policies.fmoe import FMoE, FMoEEviction
from expertly.policies.lcp import LCP
from expertly.policies.lfu import LFU
from expertly.policies.lookahead import Lookahead
from expertly.policies.lru import LRU
from expertly.policies.moe_infinity import EAM, EAMEviction
from expertly.policies.moepic import MoEpic, Speculative, SplitExperts
from expertly.policies.prediction import Predictor
from expertly.policies.promoe import Learned
from expertly.policies.reuse import Reuse
from expertly.policies.static import Static

T = TypeVar("T")
P = TypeVar("P", bound=Policy)

_SEPARATORS = ",:="
"""Characters that end a name in `name:key=value,name`."""


class Registry(Mapping[str, T], Generic[T]):
    """Parts of one kind by name. A name is looked up among what ships, then among the entry points of installed
    distributions in `group`, which are read when first needed; a name with dots is then imported as the path of an
    object. So nothing installed changes the meaning of a name that ships. Iterating goes over what ships and the entry
    points that load.

    Looking up a name that exists but cannot be loaded raises ConfigError with the reason, also with `in`; an unknown
    name is a KeyError.
    """

    def __init__(
        self,
        part: str,
        group: str,
        built_in: Mapping[str, T],
        accepts: Callable[[object], bool],
        accepted: str,
        adopt: Callable[[T, str], T] = lambda part, name: part,
    ) -> None:
        """`part` begins messages; `accepted` describes what `accepts` takes; `adopt(object, name)` is what becomes of
        an object that does not ship.
        """
        self.built_in = dict(built_in)
        self._part, self._group = part, group
        self._accepts, self._accepted, self._adopt = accepts, accepted, adopt

    def __getitem__(self, name: str) -> T:
        if name in self.built_in:
            return self.built_in[name]
        if name in self._installed:
            entry, beginning = self._installed[name]
            loaded = _guarded(entry.load, beginning, "cannot be loaded")
        elif self.is_path(name):
            beginning = f"{self._part}={name!r:.200}"
            loaded = self._import(name, beginning)
        else:
            raise KeyError(name)
        if not self._accepts(loaded):
            kind = f"the class {loaded.__name__}" if isinstance(loaded, type) else f"of type {type(loaded).__name__}"
            raise ConfigError(f"{beginning}: is {kind}; accepted: {self._accepted}")
        return self._adopt(loaded, name)

    def is_path(self, name: str) -> bool:
        """Whether looking up the name imports a module."""
        if name in self.built_in or name in self._installed:
            return False
        return "." in name and all(step.isidentifier() for step in name.split("."))

    def __iter__(self) -> Iterator[str]:
        yield from self.built_in
        for name in self._installed:
            with suppress(ConfigError):
                self[name]
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def problems(self) -> list[str]:
        """For each entry point that cannot be loaded, why."""
        problems = list(self._entries[1])
        for name in self._installed:
            try:
                self[name]
            except ConfigError as error:
                problems.append(str(error))
        return problems

    @property
    def _installed(self) -> dict[str, tuple[EntryPoint, str]]:
        return self._entries[0]

    @cached_property
    def _entries(self) -> tuple[dict[str, tuple[EntryPoint, str]], list[str]]:
        """Entry points by name, each with how messages name it, and problems of those that no name refers to."""
        entries: dict[str, tuple[EntryPoint, str]] = {}
        try:
            installed = sorted(entry_points(group=self._group), key=lambda entry: (_distribution(entry), entry.name))
        except Exception as error:  # metadata of any distribution
            return {}, [f"entry points {self._group!r}: cannot be read ({_reason(error)})"]
        problems = []
        for entry in installed:
            words = f"{self._part}={entry.name!r} ({entry.value} of {_distribution(entry)})"
            if entry.name in self.built_in:
                problems.append(f"{words}: expertly has one of that name, which is used")
            elif entry.name in entries:
                first = _distribution(entries[entry.name][0])
                problems.append(f"{words}: {first} has one of that name, which is used")
            elif not entry.name or any(letter in _SEPARATORS or letter.isspace() for letter in entry.name):
                problems.append(f"{words}: a name cannot hold blanks or any of {' '.join(_SEPARATORS)}")
            else:
                entries[entry.name] = entry, words
        return entries, problems

    def _import(self, path: str, beginning: str) -> Any:
        module_name, _, name = path.rpartition(".")
        module = _guarded(partial(import_module, module_name), beginning, f"{module_name!r:.200} cannot be imported")
        if not hasattr(module, name):
            has = ", ".join(part for part, value in vars(module).items() if self._accepts(value))
            file = getattr(module, "__file__", None) or "built in"
            lack = f"{module_name!r} ({file}) has no {name!r}; it has {has or 'nothing of the kind'}"
            raise ConfigError(f"{beginning}: {lack}")
        return getattr(module, name)


def _guarded(load: Callable[[], Any], beginning: str, failure: str) -> Any:
    """What foreign code loads. Raises ConfigError whatever that raises."""
    try:
        return load()
    except ConfigError as error:
        raise error if str(error).startswith(beginning) else ConfigError(f"{beginning}: {error}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{beginning}: {failure} ({_reason(error)})") from error


def _distribution(entry: EntryPoint) -> str:
    return "an unknown distribution" if entry.dist is None else entry.dist.metadata["Name"]


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__


def _of_policies(base: Any, group: str, built_in: Sequence[type[P]]) -> Registry[type[P]]:
    """The policies of one family: classes that extend `base`, by name."""

    def accepts(loaded: object) -> bool:
        is_policy = isinstance(loaded, type) and issubclass(loaded, base) and not inspect.isabstract(loaded)
        return is_policy and is_dataclass(getattr(loaded, "options", None))

    accepted = f"a class that extends {base.__name__}, whose options are a dataclass"
    return Registry(base.family, group, {policy.name: policy for policy in built_in}, accepts, accepted)


class OrNone(Collection[str]):
    """The names of a registry, and "none" before them."""

    def __init__(self, registry: Registry[T]) -> None:
        self._registry: Mapping[str, object] = registry

    def __contains__(self, name: object) -> bool:
        return name == "none" or name in self._registry

    def __iter__(self) -> Iterator[str]:
        return iter(("none", *self._registry))

    def __len__(self) -> int:
        return 1 + len(self._registry)


EVICTIONS: Registry[type[EvictionPolicy]] = _of_policies(
    EvictionPolicy, "expertly.evictions", (LRU, LFU, LCP, Static, FMoEEviction, EAMEviction, Reuse)
)
PREDICTORS: Registry[type[Predictor]] = _of_policies(
    Predictor, "expertly.predictors", (Lookahead, Speculative, Learned, FMoE, EAM)
)
ALLOCATIONS: Registry[type[Allocation]] = _of_policies(
    Allocation, "expertly.allocations", (Uniform, SplitExperts, MoEpic)
)
