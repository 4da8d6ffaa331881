"""`expertly systems`: every system, its parts and how they are combined."""

from __future__ import annotations

import re

from expertly.scheduler.systems import SYSTEMS, get_system
from tests.cli.asking import Captured, answer, told


def test_json_has_every_system_part_and_option(capsys: Captured) -> None:
    result = answer(capsys, "systems")
    listed = {system["name"]: system for system in result["systems"]}
    assert listed.keys() == SYSTEMS.keys() >= {"on-demand", "lru", "lfu", "lcp", "static", "resident"}
    assert listed["lfu"].keys() == {
        "name", "summary", "eviction", "scope", "allocation", "prediction", "prefetch", "distance",
        "admission", "ahead", "host", "prefill", "loop", "segments",
    }  # fmt: skip
    assert (listed["lfu"]["ahead"], listed["promoe"]["segments"], listed["moepic"]["ahead"]) == (None, 4, "staging")
    assert "proximity" in result["parts"]["prefetch"] and "fmoe" in result["parts"]["eviction"]
    assert "semantic" in result["options"]["prediction=fmoe"] and result["options"]["prediction=learned"] == ["width"]


def test_people_read_every_system_its_parts_and_what_it_has_unlike_others(capsys: Captured) -> None:
    out = told(capsys, "systems")
    lines = out.splitlines()
    for system in SYSTEMS.values():
        assert any(line.split()[:3] == [system.name, system.eviction, system.scope] for line in lines)
    assert max(map(len, lines[: lines.index("")])) <= 80
    assert f"promoe: {SYSTEMS['promoe'].summary} [prefetch=fifo, prefill=evict, segments=4]" in lines
    assert f"expertly-ahead: {SYSTEMS['expertly-ahead'].summary} [admission=best, ahead=staging]" in lines
    assert f"lru: {SYSTEMS['lru'].summary}" in lines
    specs = re.findall(r"--system ([^\s,]+)", out)
    assert len(specs) >= 3 and all(get_system(spec).name == spec for spec in specs)
    for part, accepted in answer(capsys, "systems")["parts"].items():
        assert f"{part}: {', '.join(accepted) if accepted else 'a whole number from 1'}" in lines
