"""Policies and systems by name: what ships, what installed distributions bring, and what can be imported
(docs/extending.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from expertly.core.errors import ConfigError
from expertly.policies.base import Policy

T = TypeVar("T")
P = TypeVar("P", bound=Policy)

_SEPARATORS = ",:="
"""Characters that end a name in `name:key=value,name`."""


class Registry(Mapping[str, T], Generic[T]):
    """Parts of one kind by name. A name is looked up among what ships, then among the entry points of installed
    distributions in `group`; a name with dots is then imported as the path of an object. So nothing installed changes
    the meaning of a name that ships. Iterating goes over what ships and the entry points that load. Entry points are
    read when first needed.

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
        adopt: Callable[[T, str], T] = lambda one, name: one,
    ) -> None:
        """`part` begins messages; `accepted` describes what `accepts` takes; `adopt` is applied to objects of
        others.
        """
        self.built_in = dict(built_in)
        self._part = part
        self._group = group
        self._accepts = accepts
        self._accepted = accepted
        self._adopt = adopt
        self._entries: dict[str, EntryPoint] | None = None
        self._loaded: dict[str, T | ConfigError] = {}
        self._unreachable: list[str] = []  # problems of entry points that no name refers to

    def __getitem__(self, name: str) -> T:
        if name in self.built_in:
            return self.built_in[name]
        if name in self._installed():
            found = self._load(name)
            if isinstance(found, ConfigError):
                raise ConfigError(str(found))
            return found
        if self.is_path(name):
            return self._import(name)
        raise KeyError(name)

    def is_path(self, name: str) -> bool:
        """Whether looking up the name imports a module."""
        if name in self.built_in or name in self._installed():
            return False
        return "." in name and all(step.isidentifier() for step in name.split("."))

    def __iter__(self) -> Iterator[str]:
        yield from self.built_in
        for name in self._installed():
            if not isinstance(self._load(name), ConfigError):
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def problems(self) -> list[str]:
        """For each entry point that cannot be loaded, why."""
        failed = [found for name in self._installed() if isinstance(found := self._load(name), ConfigError)]
        return [*self._unreachable, *map(str, failed)]

    def _installed(self) -> dict[str, EntryPoint]:
        if self._entries is None:
            self._entries = {}
            try:
                found = sorted(entry_points(group=self._group), key=lambda entry: (_distribution(entry), entry.name))
            except Exception as error:  # metadata of any distribution
                found = []
                self._unreachable.append(f"entry points {self._group!r}: cannot be read ({_reason(error)})")
            for entry in found:
                problem = None
                if entry.name in self.built_in:
                    problem = "expertly has one of that name, which is used"
                elif entry.name in self._entries:
                    problem = f"{_distribution(self._entries[entry.name])} has one of that name, which is used"
                elif not entry.name or any(letter in _SEPARATORS or letter.isspace() for letter in entry.name):
                    problem = f"a name cannot hold blanks or any of {' '.join(_SEPARATORS)}"
                if problem is None:
                    self._entries[entry.name] = entry
                else:
                    self._unreachable.append(f"{self._where(entry)}: {problem}")
        return self._entries

    def _load(self, name: str) -> T | ConfigError:
        """The object of an entry point, or why it cannot be loaded; tried once."""
        if name not in self._loaded:
            entry = self._installed()[name]
            try:
                self._loaded[name] = self._checked(entry.load(), name, self._where(entry))
            except ConfigError as error:
                self._loaded[name] = _about(error, self._where(entry))
            except (Exception, SystemExit) as error:  # foreign code must not stop the rest
                self._loaded[name] = ConfigError(f"{self._where(entry)}: cannot be loaded ({_reason(error)})")
        return self._loaded[name]

    def _import(self, path: str) -> T:
        module_name, _, name = path.rpartition(".")
        where = f"{self._part}={path!r:.200}"
        try:
            module = import_module(module_name)
        except ConfigError as error:
            raise _about(error, where) from None
        except (Exception, SystemExit) as error:  # foreign code: whatever it raises is the reason
            raise ConfigError(f"{where}: {module_name!r:.200} cannot be imported ({_reason(error)})") from error
        if not hasattr(module, name):
            others = [other for other, value in vars(module).items() if self._accepts(value)]
            file = getattr(module, "__file__", None) or "built in"
            has = ", ".join(others) or "nothing of the kind"
            raise ConfigError(f"{where}: {module_name!r} ({file}) has no {name!r}; it has {has}")
        return self._checked(getattr(module, name), path, where)

    def _checked(self, found: object, name: str, where: str) -> T:
        if not self._accepts(found):
            kind = f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"
            raise ConfigError(f"{where}: is {kind}; accepted: {self._accepted}")
        return self._adopt(found, name)  # type: ignore[arg-type]

    def _where(self, entry: EntryPoint) -> str:
        return f"{self._part}={entry.name!r} ({entry.value} of {_distribution(entry)})"


class PolicyRegistry(Registry[type[P]], Generic[P]):
    """The policies of one family: classes that extend `base` (Any, as it is abstract in most), by name."""

    def __init__(self, base: Any, group: str, built_in: Sequence[type[P]]) -> None:
        def accepts(one: object) -> bool:
            is_policy = isinstance(one, type) and issubclass(one, base) and not inspect.isabstract(one)
            return is_policy and is_dataclass(getattr(one, "options", None))

        accepted = f"a class that extends {base.__name__}, whose options are a dataclass"
        super().__init__(base.family, group, {one.name: one for one in built_in}, accepts, accepted)


class OrNone(Collection[str]):
    """The names of a registry, and "none" before them."""

    def __init__(self, registry: Registry[T]) -> None:
        self._registry: Mapping[str, object] = registry

    def __contains__(self, name: object) -> bool:
        return name == "none" or name in self._registry

    def __iter__(self) -> Iterator[str]:
        yield "none"
        yield from self._registry

    def __len__(self) -> int:
        return 1 + len(self._registry)


def _distribution(entry: EntryPoint) -> str:
    distribution = entry.dist
    return "an unknown distribution" if distribution is None else distribution.metadata["Name"]


def _about(error: ConfigError, where: str) -> ConfigError:
    return error if str(error).startswith(where) else ConfigError(f"{where}: {error}")


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__
