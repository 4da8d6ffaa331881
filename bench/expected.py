"""What to expect of released models on this machine, from their config.json alone, as `expertly doctor MODEL` does.

    python bench/expected.py --out bench/results/expected.json
    python bench/expected.py --workers 1,3,7 --hardware laptop-nvme --total-memory 64GiB --out FILE

`bench/models` holds what their config.json says of sizes, and of the weight format that they are released in, which is
kept. `bf16_gib`: what the experts would be in bfloat16. With `--workers`: on so many machines more, over each network.
"""

from __future__ import annotations

from typing import Any

from common import GIB, ROOT, options, print_report

from expertly.hardware.machine import Effort, available_host_nbytes, examine
from expertly.lab.forecast import ModelForecast, forecast, measured_hardware
from expertly.model.needs import needs_of
from expertly.sim.hardware import NETWORK_NAMES, ClusterNetwork, Hardware
from expertly.store.cache import cache_folder


def with_workers(model: str, found: ModelForecast) -> list[dict[str, Any]]:
    """A row for each number of machines: tokens per second, and the network's share of the time."""
    rows: dict[int, dict[str, Any]] = {}
    for one in ([one for one in found.speeds if one.fits][-1], *found.with_workers):
        row = rows.setdefault(one.num_workers, {"model": model, "machines": 1 + one.num_workers})
        row |= {"in_memory": one.share, f"low {one.network}": one.tokens_per_s[0]}
        row |= {f"high {one.network}": one.tokens_per_s[1], f"time {one.network}": sum(one.network_time) / 2}
    return list(rows.values())


def main() -> None:
    args = options(__doc__, out=None, workers="", hardware=None, total_memory=None)
    networks = [ClusterNetwork.read(name) for name in NETWORK_NAMES]
    workers = [(int(num), network) for num in args.workers.split(",") if num for network in networks]
    profile, _ = examine(cache_folder(), Effort())
    named = Hardware.read(args.hardware) if args.hardware else None
    rates: dict[str, float | None] = {}
    available = available_host_nbytes()
    rows: list[dict[str, Any]] = []
    for config in sorted((ROOT / "bench" / "models").glob("*/config.json"), key=lambda path: path.parent.name.lower()):
        needs = needs_of(str(config))
        hardware = named or measured_hardware(profile, needs=needs)
        rates[config.parent.name] = hardware.format_nbytes_per_s
        found = forecast(needs, profile, hardware, available, None, args.total_memory, workers)
        if workers:
            rows += with_workers(config.parent.name, found)
            continue
        row: dict[str, Any] = {
            "model": config.parent.name,
            "stored_as": needs.stored_as,
            "experts_gib": found.experts_nbytes / GIB,
            "bf16_gib": sum(layer.unquantised().nbytes for layer in needs.layers) / GIB,
            "dense_gib": found.dense_nbytes / GIB,
            "least_gib": found.least_nbytes / GIB,
        }
        for one in found.speeds:
            name = f"{one.share:.0%}"
            row |= {f"low {name}": one.tokens_per_s[0], f"high {name}": one.tokens_per_s[1], f"fits {name}": one.fits}
        rows.append(row)
    told = {"models": "bench/models", "hardware": hardware.as_dict(), "available_bytes": available}
    told |= {"experts_nbytes_per_s": rates}
    told["networks"] = list(NETWORK_NAMES) if workers else []
    print_report("expected", rows, vars(args) | told, args.out)


if __name__ == "__main__":
    main()
