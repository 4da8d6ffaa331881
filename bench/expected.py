"""What to expect of released models on this machine, from their config.json alone, as `expertly doctor MODEL` does.

    python bench/expected.py --out bench/results/expected.json
    python bench/expected.py --sizes --out bench/results/models.json

`bench/models` holds what their config.json says of sizes, and of the weight format that they are released in, which is
kept. `bf16_gib`: what the experts would be in bfloat16. `--sizes` measures nothing: only bytes, also of GGUF files in 4
and 2 bits, whose down-projections have another type where their rows are no whole blocks, as llama.cpp writes them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from common import GIB, ROOT, options, print_report

from expertly.formats import expert_format
from expertly.hardware.forecast import forecast, measured_speed
from expertly.hardware.machine import available_host_nbytes, examine
from expertly.model.needs import needs_of
from expertly.store.cache import cache_folder

CONFIGS = sorted((ROOT / "bench" / "models").glob("*/config.json"), key=lambda path: path.parent.name.lower())
FILES = {"q4_k": "q5_0", "q2_k": "iq4_nl", "iq2_xxs": "iq4_nl"}
"""Types of GGUF, and that of matrices that have no whole blocks of them."""


def sizes() -> list[dict[str, Any]]:
    """A row for each model."""
    rows = []
    for config in CONFIGS:
        needs = needs_of(str(config))
        row: dict[str, Any] = {"model": config.parent.name, "released": needs.stored_as}
        row |= {"released_gib": needs.experts_nbytes / GIB, "dense_gib": needs.dense_nbytes / GIB}
        row |= {"tables_gib": needs.tables_nbytes / GIB, "moe_layers": len(needs.layers)}
        row |= {"experts": needs.layers[0].num_experts, "top_k": needs.layers[0].top_k}
        for name, instead in FILES.items():
            nbytes = 0
            for layer in needs.layers:
                forms = (expert_format(each) for each in (name, f"{name}+{instead}", instead))
                form = next(form for form in forms if form.fits(layer))
                nbytes += form.geometry(layer.unquantised()).nbytes
            row[f"{name}_gib"] = nbytes / GIB
        rows.append(row)
    return rows


def main() -> None:
    args = options(__doc__, out=None, total_memory=None, sizes=False)
    if args.sizes:
        print_report("models", sizes(), {"models": "bench/models"}, args.out)
        return
    profile, _ = examine(cache_folder())
    rates: dict[str, float] = {}
    available = available_host_nbytes()
    rows: list[dict[str, Any]] = []
    for config in CONFIGS:
        needs = needs_of(str(config))
        speed = measured_speed(profile, needs)
        rates[config.parent.name] = speed.experts_nbytes_per_s
        found = forecast(needs, profile, speed, available, args.total_memory)
        row: dict[str, Any] = {
            "model": config.parent.name,
            "stored_as": needs.stored_as,
            "experts_gib": found.experts_nbytes / GIB,
            "bf16_gib": sum(layer.unquantised().nbytes for layer in needs.layers) / GIB,
            "dense_gib": needs.dense_nbytes / GIB,
            "least_gib": found.least_nbytes / GIB,
        }
        for one in found.speeds:
            name = f"{one.share:.0%}"
            row |= {f"low {name}": one.tokens_per_s[0], f"high {name}": one.tokens_per_s[1], f"fits {name}": one.fits}
        rows.append(row)
    told = {"models": "bench/models", "machine": asdict(profile), "available_bytes": available}
    told |= {"experts_nbytes_per_s": rates}
    print_report("expected", rows, vars(args) | told, args.out)


if __name__ == "__main__":
    main()
