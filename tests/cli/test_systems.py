from __future__ import annotations

import json

from expertly.cli.main import main
from expertly.systems import SYSTEMS


def test_lists_every_system_with_its_parts(capsys):
    assert main(["systems"]) == 0
    out = capsys.readouterr().out
    for system in SYSTEMS.values():
        assert any(line.split()[:3] == [system.name, system.eviction, system.scope] for line in out.splitlines())
        assert f"{system.name}: {system.summary}" in out


def test_json_has_the_same(capsys):
    assert main(["systems", "--json"]) == 0
    out, err = capsys.readouterr()
    listed = {one["name"]: one for one in json.loads(out)["systems"]}
    assert err == ""
    assert listed.keys() == SYSTEMS.keys()
    assert {"on-demand", "lru", "lfu", "lcp", "random", "static", "resident"} <= listed.keys()
    assert listed["lfu"].keys() == {
        "name", "summary", "eviction", "scope", "allocation", "prediction", "transfer",
    }  # fmt: skip
