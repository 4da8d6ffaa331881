"""How fast layers follow each other and bytes come, from the times at which they did."""

from __future__ import annotations

_NEWEST = 1 / 16
"""What the newest time weighs."""
_MOST = 4.0
"""Times the average that one is taken for at most: a pause says little about the next."""


class Average:
    """Of the newest values, none counted as more than 4 times what came before; None before the first."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        if self.value is None:
            self.value = value
        else:
            self.value += (min(value, _MOST * self.value) - self.value) * _NEWEST


class Pace:
    """Times in nanoseconds. By `size`, tokens of a pass in powers of two.

    After the last of what a layer waited for has come, and all along where it waits for nothing, the link is free until
    the next router speaks: what is loaded ahead has that time.
    """

    def __init__(self) -> None:
        self._free_ns: dict[tuple[int, bool], Average] = {}  # by size, and whether the layer had waited
        self._all_free_ns: dict[int, Average] = {}
        self._ns_a_byte = Average()
        self._router_ns: int | None = None  # when the last one spoke; None: in no pass, or in an earlier one
        self._free_from_ns = 0
        self._awaited_nbytes = 0
        self._has_waited = False
        self._size = 0

    def begin_pass(self) -> None:
        """The time since the last router is no layer's."""
        self._router_ns = None
        self._awaited_nbytes = 0

    def router_ran(self, now_ns: int, size: int) -> None:
        """A router has spoken."""
        if self._router_ns is not None and size == self._size and not self._awaited_nbytes:
            free_ns = now_ns - self._free_from_ns
            self._free_ns.setdefault((size, self._has_waited), Average()).add(free_ns)
            self._all_free_ns.setdefault(size, Average()).add(free_ns)
        self._router_ns = self._free_from_ns = now_ns
        self._size, self._awaited_nbytes, self._has_waited = size, 0, False

    def asked(self, nbytes: int) -> None:
        """The layer waits for so many bytes."""
        self._awaited_nbytes = nbytes

    def came(self, now_ns: int) -> None:
        """They are all here."""
        if self._awaited_nbytes and self._router_ns is not None:
            self._ns_a_byte.add((now_ns - self._router_ns) / self._awaited_nbytes)
            self._has_waited = True
        self._free_from_ns, self._awaited_nbytes = now_ns, 0

    def load_ns(self, nbytes: int) -> float | None:
        """How long loading so much takes; None: nobody knows yet."""
        return None if self._ns_a_byte.value is None else self._ns_a_byte.value * nbytes

    def free_ns(self, now_ns: int, num_layers: int) -> float | None:
        """How long the link is free from now until the router speaks that is so many after the last one; None: nobody
        knows yet.
        """
        of_layer = self._free_ns.get((self._size, self._has_waited or self._awaited_nbytes > 0))
        of_any = self._all_free_ns.get(self._size)
        if of_layer is None or of_any is None or of_layer.value is None or of_any.value is None:
            return None
        gone_ns = 0 if self._awaited_nbytes else now_ns - self._free_from_ns
        return max(0.0, of_layer.value - gone_ns) + (num_layers - 1) * of_any.value
