"""How two series go together, without keeping them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Correlation:
    """Means and sums of products of deviations (Welford; Chan et al. for merging): nothing cancels in long runs."""

    count: int = 0
    mean_x: float = 0.0
    mean_y: float = 0.0
    sum_xx: float = 0.0
    sum_yy: float = 0.0
    sum_xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """One more pair."""
        self.count += 1
        from_x, from_y = x - self.mean_x, y - self.mean_y
        self.mean_x += from_x / self.count
        self.mean_y += from_y / self.count
        self.sum_xx += from_x * (x - self.mean_x)
        self.sum_yy += from_y * (y - self.mean_y)
        self.sum_xy += from_x * (y - self.mean_y)

    def merge(self, other: Correlation) -> None:
        """All pairs of the other."""
        if not other.count:
            return
        count = self.count + other.count
        share = other.count / count
        apart_x, apart_y = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        self.mean_x += apart_x * share
        self.mean_y += apart_y * share
        self.sum_xx += other.sum_xx + apart_x * apart_x * self.count * share
        self.sum_yy += other.sum_yy + apart_y * apart_y * self.count * share
        self.sum_xy += other.sum_xy + apart_x * apart_y * self.count * share
        self.count = count

    def pearson(self) -> float | None:
        """From -1 to 1; None where either series has not varied."""
        product = self.sum_xx * self.sum_yy
        if self.count < 2 or product <= 0:
            return None
        return max(-1.0, min(1.0, self.sum_xy / math.sqrt(product)))
