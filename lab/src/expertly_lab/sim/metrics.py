"""The metrics of a simulation, as formulas over the times of its iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expertly_lab.sim.workload import Iteration


@dataclass(slots=True)
class _RequestTimes:
    """Times in nanoseconds; one that has not happened is -1."""

    arrival_ns: int
    begin_ns: int
    first_token_ns: int = -1  # the end of its last prefill
    end_ns: int = -1
    hits: int = 0  # in decode, of iterations that it had for itself
    demands: int = 0
    decode_ns: int = 0
    num_decode_iterations: int = 0


class Metrics:
    """Sums over iterations, and the times of each request; nothing is stored for each token."""

    def __init__(self) -> None:
        self.busy_ns = 0  # iterations, from their begin to their end
        self.stall_ns = 0
        self.decode_ns = 0
        self.decode_stall_ns = 0
        self.num_decode_iterations = 0
        self.num_tokens = 0
        self._requests: dict[int, _RequestTimes] = {}

    def add(
        self, iteration: Iteration, begin_ns: int, end_ns: int, stall_ns: int, num_hits: int = 0, num_demands: int = 0
    ) -> None:
        """An iteration ran from `begin_ns` to `end_ns`, of which it waited `stall_ns` for transfers. Hits and demands
        are those of decode.
        """
        takes_ns = end_ns - begin_ns
        is_prefill, is_alone = iteration.is_prefill, len(iteration.requests) == 1
        self.busy_ns += takes_ns
        self.stall_ns += stall_ns
        self.num_tokens += iteration.num_tokens
        if not is_prefill:
            self.num_decode_iterations += 1
            self.decode_ns += takes_ns
            self.decode_stall_ns += stall_ns
        for number in iteration.requests:
            request = self._requests.get(number)
            if request is None:
                request = self._requests[number] = _RequestTimes(min(iteration.arrival_ns, begin_ns), begin_ns)
            request.end_ns = end_ns
            if not is_prefill:
                request.decode_ns += takes_ns
                request.num_decode_iterations += 1
            if is_alone:
                request.hits += num_hits
                request.demands += num_demands
        for number in iteration.prefilling:
            self._requests[number].first_token_ns = end_ns

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a decode iteration, stalls included; None where nothing was decoded."""
        return self.decode_ns / self.num_decode_iterations / 1e9 if self.num_decode_iterations else None

    @property
    def stall_share(self) -> float | None:
        return self.stall_ns / self.busy_ns if self.busy_ns else None

    def ttft_s(self, is_queued: bool) -> float | None:
        """Mean time from a request's arrival (with a queue) or begin to the end of its prompt; None without prompts."""
        times = [
            request.first_token_ns - (request.arrival_ns if is_queued else request.begin_ns)
            for request in self._requests.values()
            if request.first_token_ns >= 0
        ]
        return sum(times) / len(times) / 1e9 if times else None

    def hits_by_request(self) -> list[tuple[int, int]]:
        """(hits, demands) of each request's decode, in the order in which they began; batches are left out."""
        return [(request.hits, request.demands) for request in self._requests.values()]

    def times_by_request(self, is_queued: bool) -> list[dict[str, Any]]:
        """`ttft_s`, `tpot_s` and `latency_s` of each request, in the order in which they began, from its arrival (with
        a queue) or begin; None where it has no prompt, or decodes nothing.
        """
        times = []
        for request in self._requests.values():
            start_ns = request.arrival_ns if is_queued else request.begin_ns
            num = request.num_decode_iterations
            ttft_s = (request.first_token_ns - start_ns) / 1e9 if request.first_token_ns >= 0 else None
            tpot_s = request.decode_ns / num / 1e9 if num else None
            times.append({"ttft_s": ttft_s, "tpot_s": tpot_s, "latency_s": (request.end_ns - start_ns) / 1e9})
        return times


def percentile(rising: Sequence[float], percent: int) -> float | None:
    """The least value that is at least as high as `percent` percent of the values; None where there are none."""
    if not rising:
        return None
    return rising[max(0, -(-percent * len(rising) // 100) - 1)]
