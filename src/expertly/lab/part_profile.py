"""What computing an expert in parts costs, from how long two ways to cut it take."""

from __future__ import annotations

import statistics


def parts_and_part(in_parts: dict[int, list[int]]) -> tuple[int, int]:
    """Nanoseconds of all neurons of an expert that is computed in parts, and of each part besides."""
    (few, of_few), *rest = sorted((n, round(statistics.median(times))) for n, times in in_parts.items() if n > 1)
    if not rest:
        return max(1, of_few), 0
    many, of_many = rest[0]
    part = max(0, of_many - of_few) // (many - few)
    return max(1, of_few - few * part), part


def cuts(intermediate_size: int) -> tuple[int, int]:
    """Two numbers of parts, the first dividing the second, the second dividing the intermediate size."""
    for few, many in ((2, 4), (3, 6), (2, 2), (3, 3)):
        if intermediate_size % many == 0:
            return few, many
    smallest = next((p for p in range(5, intermediate_size + 1) if intermediate_size % p == 0), 1)
    return smallest, smallest
