"""What to expect of released models on this machine, from their config.json alone, as `expertly doctor MODEL` does.

    python bench/expected.py --out bench/results/expected.json

`bench/models` holds what their config.json says of sizes, and of the weight format that they are released in, which is
kept. `bf16_gib`: what the experts would be in bfloat16.
"""

from __future__ import annotations

from typing import Any

from common import ROOT, options, print_report

from expertly.hardware.machine import Effort, available_host_nbytes, examine
from expertly.lab.forecast import forecast, measured_hardware
from expertly.model.needs import needs_of
from expertly.store.cache import cache_folder


def main() -> None:
    args = options(__doc__, out=None)
    profile, _ = examine(cache_folder(), Effort())
    hardware = measured_hardware(profile)
    rows: list[dict[str, Any]] = []
    for config in sorted((ROOT / "bench" / "models").glob("*/config.json"), key=lambda path: path.parent.name.lower()):
        needs = needs_of(str(config))
        found = forecast(needs, profile, hardware, available_host_nbytes())
        row: dict[str, Any] = {
            "model": config.parent.name,
            "stored_as": needs.stored_as,
            "experts_gib": found.experts_nbytes / (1 << 30),
            "bf16_gib": sum(layer.unquantised().nbytes for layer in needs.layers) / (1 << 30),
            "dense_gib": found.dense_nbytes / (1 << 30),
            "least_gib": found.least_nbytes / (1 << 30),
        }
        for one in found.speeds:
            name = f"{one.share:.0%}"
            row |= {f"low {name}": one.tokens_per_s[0], f"high {name}": one.tokens_per_s[1], f"fits {name}": one.fits}
        rows.append(row)
    print_report("expected", rows, {"models": "bench/models"}, args.out)


if __name__ == "__main__":
    main()
