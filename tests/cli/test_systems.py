from __future__ import annotations

import json
import re
import sys

from rich.cells import cell_len

from expertly.cli.main import main
from expertly.scheduler.systems import SYSTEMS, get_system
from tests.cli.asking import answer, told


def test_json_has_the_same(capsys):
    assert main(["systems", "--json"]) == 0
    out, err = capsys.readouterr()
    listed = {one["name"]: one for one in json.loads(out)["systems"]}
    assert err == ""
    assert listed.keys() == SYSTEMS.keys()
    assert {"on-demand", "lru", "lfu", "lcp", "static", "resident"} <= listed.keys()
    assert listed["lfu"].keys() == {
        "name", "summary", "eviction", "scope", "allocation", "prediction", "prefetch", "distance",
        "admission", "ahead", "prefill", "loop", "segments",
    }  # fmt: skip
    assert (listed["lfu"]["ahead"], listed["promoe"]["segments"], listed["moepic"]["ahead"]) == (None, 4, "staging")


def test_people_read_every_system_its_parts_and_what_it_has_unlike_others(capsys):
    lines = told(capsys, "systems").splitlines()
    for system in SYSTEMS.values():
        assert any(line.split()[:3] == [system.name, system.eviction, system.scope] for line in lines)
    assert any("fmoe proximity 3" in " ".join(line.split()) for line in lines)
    assert f"promoe: {SYSTEMS['promoe'].summary} [prefill=evict, segments=4]" in lines
    assert f"expertly-ahead: {SYSTEMS['expertly-ahead'].summary} [admission=best, ahead=staging]" in lines
    assert f"lru: {SYSTEMS['lru'].summary}" in lines


def test_fits_a_terminal_of_80_columns(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    lines = told(capsys, "systems").splitlines()
    assert max(map(cell_len, lines)) <= 80
    for system in SYSTEMS.values():
        assert any(line.split()[:1] == [system.name] for line in lines), system.name
    assert "[allocation=moepic, prefill=evict" in " ".join(lines), "what has no column stands behind the summary"


def test_says_how_systems_are_combined_and_what_it_names_exists(capsys):
    out = told(capsys, "systems")
    specs = re.findall(r"--system ([^\s,]+)", out)
    assert len(specs) >= 3 and all(get_system(spec).name == spec for spec in specs)
    listed = answer(capsys, "systems")
    for key, accepted in listed["parts"].items():
        assert f"{key}: {', '.join(accepted) if accepted else 'a whole number from 1'}" in out
    assert "proximity" in listed["parts"]["prefetch"] and "fmoe" in listed["parts"]["eviction"]
    assert "semantic" in listed["options"]["prediction=fmoe"]
    assert listed["options"]["prediction=learned"] == ["width"]
