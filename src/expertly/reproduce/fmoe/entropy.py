"""Figure 3: how predictable routing is, of one iteration and of a whole request."""

from __future__ import annotations

import numpy as np

from expertly.lab.trace_entropy import EntropyMeter
from expertly.reproduce import rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Finding, FindingTable
from expertly.reproduce.lab import CannotRun, Lab
from expertly.trace.schema import max_experts

_BLOCK_ROWS = 1024
_TOKENS = 64
"""Of a request, at least; growth is shown up to there, so that each point is of the same requests."""


def _run(lab: Lab) -> Finding:
    trace, layers = lab.trace, lab.trace.manifest.layers
    has_probs = trace.has("probs")
    fields = ["request", "experts", "weights", *["probs"] * has_probs]
    meter = EntropyMeter(len(layers), max_experts(layers), [one.num_rows for one in trace.requests])
    num_rows = num_requests = active = 0
    for request in [one for one in trace.requests if one.num_rows >= _TOKENS]:
        if num_rows >= 16 * lab.num_tokens:
            break
        used = np.zeros((len(layers), max_experts(layers)), bool)
        for block in trace.blocks(fields, request.first_row, request.first_row + request.num_rows, _BLOCK_ROWS):
            columns = block.columns
            meter.add(columns["request"], columns["experts"], columns["weights"], columns.get("probs"))
            for layer in range(len(layers)):
                used[layer, np.minimum(columns["experts"][:, layer].ravel(), max_experts(layers) - 1)] = True
        active += int(used.sum())
        num_rows, num_requests = num_rows + request.num_rows, num_requests + 1
    if not num_requests:
        raise CannotRun(f"no request of at least {_TOKENS} tokens")
    token = float((meter.token_bits / meter.num_tokens).mean())
    request_bits = float((meter.request_bits / meter.num_requests).mean())
    growth = {
        str(tokens): float((bits / np.maximum(meter.growth_requests[tokens], 1)).mean())
        for tokens, bits in sorted(meter.growth_bits.items())
        if tokens <= _TOKENS
    }
    kind = "all experts' probabilities" if has_probs else "the chosen experts' weights"
    used_share = active / num_requests / (len(layers) * lab.num_experts)
    rows = [
        ("one iteration", token, lab.top_k / lab.num_experts),
        ("a whole request", request_bits, used_share),
        ("the most there can be", float(np.log2(lab.num_experts)), 1.0),
    ]
    tables = [
        FindingTable.of("3a, 3b: mean of layers", {"": "", "entropy, bits": "bits", "experts used": "share"}, rows),
        FindingTable.of(
            "3c: of a request's first tokens", {"tokens": "", "entropy, bits": "bits"}, list(growth.items())
        ),
    ]
    checks = [
        rules.compared(
            "3b: the entropy of an iteration is below that of a request",
            ("iteration", token),
            ("request", request_bits),
            above=False,
            unit="bits",
            why=f"a request uses {used_share:.1%} of the experts, an iteration {lab.top_k / lab.num_experts:.1%}",
        ),
        rules.monotonic(
            "3c: entropy grows over iterations",
            growth,
            rises=True,
            unit="bits",
            why=lambda: (
                f"it grows to {max(growth.values()):.2f} bits and falls as requests settle on a narrow task: the later "
                f"tokens of these {num_requests} requests use fewer kinds of experts than the first did"
            ),
        ),
    ]
    return lab.finding(
        f"{num_requests} requests of {_TOKENS} tokens and more, {num_rows} tokens; of {kind}, divided by their sum",
        tables,
        checks,
    )


EXPERIMENT = Experiment(
    "fmoe",
    ("3", "3a", "3b", "3c"),
    "Entropy of expert patterns, of iterations and of requests",
    "Request-level patterns have significantly higher entropy than iteration-level ones (3b, six pairs of model and "
    "data set, axis 0 to 4 bits); the mean entropy per layer grows as iterations are aggregated (3c, 0 to 50 "
    "iterations).",
    _run,
    most=4,
)
