"""When a simulated machine computed: passes and layers, with the times that nothing was computed."""

from __future__ import annotations

from expertly.core.messages import Span


class Watch:
    """Sees one run. Times in nanoseconds."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        """Of each pass."""
        self.computing: list[int] = []
        """Of each pass: not waiting for loads or predictions; asking for pieces counts."""
        self.layers: list[list[int]] = []
        """Of each pass: when its layers began, and when the last had been computed."""
        self.predicting: dict[str, int] = {}
        """Time of the predictor's thread by what it read: "begin", "router", "update"."""
        self.asking = 0
        """Time that the computing thread spent on asking for pieces and taking them."""
        self.loading = 0
        """Time that the link was busy."""
        self._computing = 0
        self._begins: list[int] = []

    def computed(self, what: str, layer: int, begin_ns: int, end_ns: int) -> None:
        self._computing += end_ns - begin_ns
        if what == "dense":
            self._begins.append(begin_ns)
        elif what == "head":
            self.ends.append(end_ns)
            self.computing.append(self._computing)
            self.layers.append([*self._begins, begin_ns])
            self._begins, self._computing = [], 0

    def moved(self, where: str, piece: Span, begin_ns: int, end_ns: int) -> None:
        if where == "link":
            self.loading += end_ns - begin_ns

    def spent(self, what: str, begin_ns: int, end_ns: int) -> None:
        self.asking += end_ns - begin_ns
        self._computing += end_ns - begin_ns

    def predicted(self, what: str, begin_ns: int, end_ns: int) -> None:
        self.predicting[what] = self.predicting.get(what, 0) + end_ns - begin_ns


class LastRun:
    """Stands where timelines would be: what the last run did; of none, nothing."""

    def __init__(self) -> None:
        self.watch = Watch()

    def begin_run(self, name: str) -> Watch:
        self.watch = Watch()
        return self.watch
