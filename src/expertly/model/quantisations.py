"""Which GGUF files of a repository are which quantisation of its model, by their names: nothing else says it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from expertly.core.errors import CheckpointError
from expertly.store.gguf import SPLIT, SUFFIX

_TAG = re.compile(
    r"(?<![a-z0-9])(?:(?:ud|i1)-)?(?:[it]?q\d(?:_[a-z0-9_]+)?|mxfp4(?:_moe)?|nvfp4|bf16|fp?16|fp?32)(?![a-z0-9_])"
)
"""In a name in small letters; where there are several, the last."""

_NO_MODEL = re.compile(r"mmproj|imatrix(?!.*[-._]i?q\d)")
"""In the names of files beside a model: an encoder of images, what quantising was guided by."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A GGUF file, or the parts of one that is split. `name`: what it is called behind the repository's."""

    name: str
    files: Mapping[str, int]  # bytes by path, parts in order
    problem: str = ""  # why it cannot be used

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def quantisations(files: Mapping[str, int]) -> list[Quantisation]:
    """Of a repository's files with their bytes, from the smallest. It is called Q4_K_M or alike, or as its first file
    where that names none, or another has the same.
    """
    parts: dict[tuple[str, int], dict[int, str]] = {}
    for path in files:
        if path.endswith(SUFFIX) and not _NO_MODEL.search(path.rpartition("/")[2].lower()):
            match = SPLIT.search(path)
            number, num = (int(match[1]), int(match[2])) if match else (1, 1)
            stem = path[: match.start()] if match else path.removesuffix(SUFFIX)
            parts.setdefault((stem, num), {})[number] = path
    tags = {key: [tag[0].upper() for tag in _TAG.finditer(key[0].lower())][-1:] for key in parts}
    uses = Counter(tag for of_key in tags.values() for tag in of_key)
    made = []
    for (stem, num), paths in parts.items():
        tag = tags[stem, num]
        missing = [number for number in range(1, num + 1) if number not in paths]
        made.append(
            Quantisation(
                tag[0] if tag and uses[tag[0]] == 1 else min(paths.values()),
                {paths[number]: files[paths[number]] for number in sorted(paths)},
                f"part {missing[0]} of {num} is not there" if missing else "",
            )
        )
    return sorted(made, key=lambda quantisation: (quantisation.nbytes, quantisation.name))


def is_named(path: str, tag: str) -> bool:
    """Whether a file's path has `tag`, in small or capital letters, as words of its own."""
    return bool(re.search(rf"(?<![a-z0-9]){re.escape(tag.lower())}(?![a-z0-9_])", path.lower()))


def find_quantisation(model: str, files: Mapping[str, int], tag: str) -> Quantisation:
    """The one that `tag` names. Raises CheckpointError listing those that are there."""
    there = quantisations(files)
    usable = ", ".join(quantisation.name for quantisation in there if not quantisation.problem)
    matching = [each for each in there if each.name.lower() == tag.lower()]
    matching = matching or [each for each in there if tag and is_named(min(each.files), tag)]
    if len(matching) == 1 and not matching[0].problem:
        return matching[0]
    problem = "no such quantisation" if tag else "GGUF files: name a quantisation behind it"
    if len(matching) > 1:
        problem, usable = "several have that", ", ".join(quantisation.name for quantisation in matching)
    elif matching:
        problem = matching[0].problem
    raise CheckpointError(f"model={model!r:.200}: {problem}; accepted behind a colon: {usable or 'none'}")
