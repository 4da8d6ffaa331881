"""Claims of the papers that numbers can contradict: a run that says the opposite fails each, noise decides none."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from expertly.lab.papers import fmoe, moe_infinity, moepic, promoe
from expertly.lab.papers.findings import FAILS, HOLDS, UNTOLD, Check, Finding, Result, show
from expertly.lab.papers.measured import Estimate
from expertly.lab.papers.metrics import TPOT, of_hits, of_prompts, of_steps, of_time
from expertly.lab.papers.runner import find_experiment, markdown, text
from expertly.lab.papers.runs import FASTER_LINK, Lab, experts_needed, with_link
from expertly.trace.reader import Trace


def about(value: float, apart: float = 0.001) -> Estimate:
    """The mean of ten requests that differ by so much."""
    return Estimate.mean(np.array([value - apart, value + apart] * 5))


def one(check: Check | list[Check], number: int = 0) -> Check:
    return check[number] if isinstance(check, list) else check


def layers(slow: float) -> Check:
    """Layer 0 takes three times as long as the others by construction; `slow`: so do three others, so many times."""
    times = [about(3.0)] + [about(slow if layer in (3, 5, 8) else 1.0) for layer in range(1, 12)]
    return moepic.some_are_slow(times, "alike")


def prompts(*times: float, noise: float = 0.001) -> list[Check]:
    return promoe.in_prompts([about(time, noise) for time in times], "why")


def lost(first: float, last: float) -> Check:
    """Of three draws."""
    return moe_infinity.is_back([[first + noise, 0.05, last, last, last] for noise in (0.0, 0.001, 0.002)], "why")


CLAIMS: dict[str, tuple[Callable[[float], Check], float, float]] = {
    "fmoe:8, r": (lambda r: fmoe.correlates("trajectory", about(r), ""), 0.8, 0.4),
    "fmoe:15, 5 %": (lambda share: fmoe.adds_little(about(share), 0.0, ""), 0.03, 0.4),
    "fmoe:15, nothing there to ask for": (lambda share: fmoe.adds_little(0.0, about(share), ""), 0.03, 0.06),
    "moe-infinity:4, groups at all": (
        lambda near: one(moe_infinity.grouping(about(15), about(0.2), about(near), about(0.9), "")),
        0.6,
        0.89,
    ),
    "moe-infinity:4, their number": (
        lambda num: one(moe_infinity.grouping(about(num), about(0.2), about(0.5), about(0.9), ""), 1),
        15,
        4,
    ),
    "moe-infinity:4, the largest": (
        lambda share: one(moe_infinity.grouping(about(15), about(share), about(0.5), about(0.9), ""), 2),
        0.2,
        0.6,
    ),
    "promoe:3, blocked": (lambda share: promoe.mostly_blocked(about(share), ""), 0.6, 0.3),
    "promoe:3, even": (lambda quarter: promoe.evenly(about(quarter), 32, ""), 0.3, 0.6),
    "promoe:8, learned": (
        lambda last: promoe.keeps_accuracy({1: about(0.9), 8: about(last)}, {1: about(0.9), 8: about(0.55)}, ""),
        0.8,
        0.5,
    ),
    "promoe:8, GOODPRED at the same k": (
        lambda good: promoe.good_prediction({1: about(0.3), 4: about(good)}, {1: about(0.3), 4: about(0.2)})[0],
        0.4,
        0.1,
    ),
    "promoe:8, GOODPRED farther ahead": (
        lambda good: promoe.good_prediction({1: about(0.3), 4: about(good)}, {1: about(0.35), 4: about(0.2)})[1],
        0.4,
        0.3,
    ),
    "promoe:13, prefetching alone": (lambda time: prompts(1.0, time, 0.9, 0.4)[0], 1.1, 0.8),
    "promoe:13, most of it": (lambda time: prompts(1.0, 1.0, time, 0.4)[1], 0.9, 0.5),
    "promoe:13, size": (lambda time: prompts(1.0, 1.0, 1.0, time)[2], 0.5, 0.7),
    "moepic:4a": (layers, 1.3, 1.0),
    "moe-infinity:table-3, back": (lambda last: lost(0.1, last), 0.01, 0.05),
    "moe-infinity:table-3, something lost": (lambda first: lost(first, 0.0), 0.1, -0.1),
    "moepic:2, size": (lambda times: moepic.slower_by_misses(about(times), ""), 3.8, 1.6),
}


@pytest.mark.parametrize(("claim", "holds", "fails"), CLAIMS.values(), ids=CLAIMS)
def test_a_claim_holds_or_fails_by_its_number_and_says_the_papers(
    claim: Callable[[float], Check], holds: float, fails: float
) -> None:
    assert claim(holds).verdict == HOLDS
    assert claim(fails).verdict == FAILS
    assert claim(holds).measured.count("[") and claim(holds).paper


@pytest.mark.parametrize(("read", "verdict"), [(1.0, HOLDS), (1.26, FAILS)])
def test_promoe_13_nothing_is_read_twice_is_of_reads_and_not_of_lru(read: float, verdict: str) -> None:
    check = promoe.reads_once(about(read), "why")
    assert check.verdict == verdict and "once and 5.0%" in check.rule


def test_noise_decides_no_claim() -> None:
    assert promoe.reads_once(about(1.04, 0.1), "").verdict == UNTOLD
    assert moe_infinity.is_back([[0.3, 0.0, 0.0, 0.0], [-0.2, 0.0, 0.0, 0.0]], "").verdict == UNTOLD
    assert moe_infinity.is_back([[0.3, 0.0, 0.0, 0.0]], "").verdict == UNTOLD, "one draw"
    assert fmoe.correlates("semantic", about(0.75, 0.2), "").verdict == UNTOLD
    assert promoe.mostly_blocked(about(0.52, 0.3), "").verdict == UNTOLD
    assert prompts(1.0, 1.0, 0.7, 0.4, noise=0.3)[1].verdict == UNTOLD


def test_the_time_at_a_hit_rate_of_40_percent_is_between_its_neighbours() -> None:
    assert moepic.time_at([(0.1, 5.0), (0.3, 4.0), (0.5, 2.0), (0.9, 1.0)]) == pytest.approx(3.0)
    assert moepic.time_at([(0.5, 2.0), (0.6, 1.8)]) == pytest.approx(2.2), "beyond the ends: on their line"


def test_groups_are_near_where_they_were_planted_and_not_where_layers_were_shuffled() -> None:
    dice = np.random.default_rng(0)
    kinds = dice.random((4, 6, 8))
    points = kinds[np.arange(80) % 4] + dice.random((80, 6, 8)) / 10
    near = moe_infinity.nearness(points.reshape(80, -1), 4, 0)
    far = moe_infinity.nearness(moe_infinity.apart(points, 0), 4, 0)
    assert near < 0.1 and far > 0.5 and near.interval is not None


# -- whole experiments, told other numbers ---------------------------------------------------------------------------


def test_a_reason_that_blames_the_link_is_tried_on_a_faster_one(lab: Lab) -> None:
    rows = lab.runs("rtx3090").rows(("on-demand", "oracle"))
    slow, fast = rows.values()
    assert slow.on_faster_link is not None and fast.on_faster_link is not None
    tried = slow.on_faster_link()
    assert tried.tpot_s < slow.tpot_s and tried["bytes_loaded"] == slow["bytes_loaded"]
    said = f"it takes {show(tried.tpot_s / fast.on_faster_link().tpot_s, 'x')} of oracle's TPOT, where it took"
    assert said in of_time(slow, fast)
    assert f"link {FASTER_LINK} times as fast, on-demand {show(tried.hit_rate, 'share')}" in of_hits(slow, fast)
    computes = show(tried.tpot_s * (1 - tried.waiting(True)), "ms")
    assert f"{FASTER_LINK} times as fast, on-demand (25%) computes {computes}, waits " in of_steps(slow, fast)
    computes = show(tried.ttft_s * (1 - tried.waiting(False)), "ms")
    assert f"{FASTER_LINK} times as fast, on-demand computes {computes} and waits " in of_prompts(slow, fast)


def verdicts(finding: Finding, *words: str) -> set[str]:
    """Of the claims with these words."""
    found = {check.verdict for check in finding.checks if all(word in check.claim for word in words)}
    assert found
    return found


def test_fmoe_4_maps_must_hit_more_than_counts_and_fall_with_the_distance(told: Callable[..., Finding]) -> None:
    def hits(system: str, maps: float, by_distance: float, largest: float = 0.0) -> float:
        found = re.search("distance=([0-9]+)", system)
        own = largest if "capacity=8000" in system else maps if system.startswith("fmoe:distance=") else 0.5
        return own - by_distance * (int(found[1]) if found else 0)

    assert verdicts(told("fmoe:4", hits=lambda system: hits(system, 0.6, 0.02))) == {HOLDS}
    assert verdicts(told("fmoe:4", hits=lambda system: hits(system, 0.4, 0.02)), "every distance") == {FAILS}
    both_rise = told("fmoe:4", hits=lambda system: hits(system, 0.3, -0.02))
    assert verdicts(both_rise, "falls") == verdicts(both_rise, "every distance") == {FAILS}


def test_fmoe_4_names_the_part_that_a_loss_is_due_to(told: Callable[..., Finding]) -> None:
    def why(largest: float) -> str:
        def hits(system: str) -> float:
            if "capacity=8000" in system:
                return largest
            return 0.3 if system.startswith("fmoe") else 0.2 if system == "on-demand" else 0.5

        found = told("fmoe:4", hits=hits)
        checks = [one for one in found.checks if "hits at d = 3" in one.claim]
        assert {one.claim.rpartition(" ")[2]: one.verdict for one in checks}["on-demand"] == HOLDS
        (lost,) = (one for one in checks if one.claim.endswith("mixtral-offloading"))
        assert lost.verdict == FAILS and lost.paper == "11.0% more"
        assert lost.why.startswith("fmoe (d = 3) predicts"), "as its table calls it"
        (coarse,) = (one for one in found.checks if "activation matrices" in one.claim)
        assert coarse.verdict == FAILS and coarse.why.startswith("at d=1") and coarse.why.endswith(lost.why[-40:])
        return lost.why

    assert why(0.6).endswith("tried with 8000 maps, fMoE hits 60.0%, which is more: that is the reason")
    assert why(0.4).endswith("tried with 8000 maps, fMoE hits 40.0%, which is less, too")


def test_fmoe_9_a_quarter_of_a_percent_is_no_gain(told: Callable[..., Finding]) -> None:
    much = told("fmoe:9", lambda system, machine: 1.0 if system.startswith("fmoe") else 2.5)
    assert verdicts(much, "TTFT is less") == verdicts(much, "TPOT is less") == {HOLDS}
    assert {check.paper for check in much.checks if "TTFT is less" in check.claim} == {
        f"{share}% less" for share in ("44.0", "35.0", "33.0", "30.0")
    }
    little = told("fmoe:9", lambda system, machine: 0.9975 if system.startswith("fmoe") else 1.0)
    assert verdicts(little, "TTFT is less") == verdicts(little, "TPOT is less") == {FAILS}


def test_fmoe_13_a_distance_of_3_must_be_better_than_1_and_6(told: Callable[..., Finding]) -> None:
    def slower(system: str, best: int) -> float:
        return 1 + 0.1 * abs(int(system.partition("distance=")[2]) - best)

    assert verdicts(told("fmoe:13", lambda system, machine: slower(system, 3))) == {HOLDS}
    assert verdicts(told("fmoe:13", lambda system, machine: slower(system, 1)), "d = 1") == {FAILS}
    assert verdicts(told("fmoe:13", lambda system, machine: slower(system, 6)), "d = 6") == {FAILS}
    assert verdicts(told("fmoe:13", lambda system, machine: 1.0), "d = ") == {FAILS}, "all alike is no U"


def test_fmoe_8_says_nothing_of_embeddings_that_were_made_up(
    told: Callable[..., Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown() -> tuple[bool, bool]:
        found = told("fmoe:8")
        in_table = any("made up" in str(cell) for row in found.tables[0].rows for cell in row)
        return any("semantic" in check.claim for check in found.checks), in_table

    assert shown() == (True, False)
    monkeypatch.setattr(Trace, "is_real", lambda self, name: name != "embedding")
    assert shown() == (False, True)


def test_fmoe_12a_alike_is_not_less(told: Callable[..., Finding]) -> None:
    def hits(system: str, apart: float) -> float:
        if "counts" in system or "lookahead" in system:
            return 0.2
        return 0.5 if "semantic=no" in system else 0.5 + apart if "top-k" in system else 0.5 + 2 * apart

    assert verdicts(told("fmoe:12a", hits=lambda system: hits(system, 0.01)), "T < T+S") == {HOLDS}
    for apart in (0.0, -0.0001):
        assert verdicts(told("fmoe:12a", hits=lambda system: hits(system, apart)), "T < T+S") == {FAILS}  # noqa: B023


def test_moepic_3_4_a_few_requests_tell_nothing_of_the_slowest() -> None:
    def holds(*ratios: float) -> bool | None:
        units = np.arange(len(ratios))
        return moepic.costs_little(moepic.slowest(np.array(ratios), units)).holds

    assert holds(1.0, 1.1, 1.05, 1.0, 1.1, float("nan")) is True
    assert holds(1.0, 1.1, 1.05, 1.0) is None
    assert holds(1.3, 1.3, 1.3, 1.3, 1.3) is False


def test_moepic_2c_says_nothing_of_a_lookahead_that_was_put_in(lab: Lab, bare: Lab) -> None:
    def claims(one: Lab) -> list[str]:
        return [check.claim[:2] for check in find_experiment("moepic:2").run(one).checks]

    assert "2c" in claims(lab) and "2c" not in claims(bare)


def why(finding: Finding, *words: str) -> str:
    """The reason of the one claim with these words that does not hold."""
    (found,) = (one for one in finding.checks if one.verdict == FAILS and all(word in one.claim for word in words))
    return found.why


def test_what_blames_cheap_misses_is_tried_with_a_slower_link(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moepic, "SLOWER", 1000.0)  # more than any machine here
    (said,) = re.findall(r"link 2 times as slow, a token takes ([0-9.]+)x", why(find_experiment("moepic:2").run(lab)))
    machine = with_link(lab.machine("a6000"), 1 / 2)
    runs = lab.runs_of(lab.schedules(), machine)
    slower = [runs.row("lfu", memory).tpot_s / runs.row("resident", "100%").tpot_s for memory in ("10%", "75%")]
    assert slower[1] < float(said) < slower[0]


def test_what_says_that_layers_are_alike_is_tried_without_prefetching(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moepic, "UNEVEN", 100.0)
    row = lab.runs("a6000").row(f"{moepic.HALVES}:prediction=none")
    others = sorted(float(row.layer_s(layer)) for layer in range(1, row.layers_s.shape[1]))
    ratio = np.mean(others[-3:]) / np.median(others)
    said = why(find_experiment("moepic:4a").run(lab))
    assert f"tried without prefetching, the slowest three take {show(float(ratio), 'x')} [" in said


def test_what_blames_matching_is_tried_with_matching_that_takes_no_time(lab: Lab) -> None:
    near = lab.runs("rtx3090").row("fmoe:distance=1")
    at_once = lab.runs_of(lab.schedules(), "rtx3090", predicting="inline").row(near.system)
    assert at_once.tpot_s < near.tpot_s
    said = f"tried with matching that takes no time, d = 1 has {show(at_once.tpot_s / near.tpot_s, 'x')} of its TPOT"
    assert said in why(find_experiment("fmoe:13").run(lab), "U")


def test_what_blames_one_cache_is_tried_with_a_cache_for_each_layer(told: Callable[..., Finding]) -> None:
    index = moe_infinity.INDEXED

    def squeezed(system: str, memory: str) -> float:
        grows = {index: 3.0, f"{index}:scope=layer": 2.0}.get(system, 1.5)
        return grows if memory == [*moe_infinity.CONTEXTS.values()][-1] else 1.0

    said = why(told("moe-infinity:8", squeezed=squeezed), "DeepSpeed")
    assert "for each layer, from 50.0% to 50.0%, and it grows 2.00x" in said


def test_what_blames_shared_experts_counts_them(told: Callable[..., Finding], lab: Lab) -> None:
    shares = [experts_needed(lab, promoe.on(lab, "llama.cpp"), size, decode=True) for size in (1, 4)]
    assert lab.top_k / lab.num_experts == pytest.approx(shares[0]) and shares[1] > 1.5 * shares[0]
    said = why(told("promoe:18"), "throughput of decode hardly grows", "llama.cpp")
    assert f"of four {show(shares[1], 'share')}, which is {show(shares[1] / shares[0], 'x')}" in said


def test_a_loss_to_modelled_guesses_is_tried_with_less_right_ones(bare: Lab) -> None:
    """How right they are is an assumption."""
    ours, other = bare.runs("rtx3090").rows(("fmoe", "mixtral-offloading")).values()
    assert other.as_right_as is not None and ours.as_right_as is None
    tried = other.as_right_as(float(ours["prediction_accuracy"]))
    assert float(tried["prediction_accuracy"]) == pytest.approx(float(ours["prediction_accuracy"]), abs=0.02)
    assert tried.hit_rate < other.hit_rate
    said = "predictions of mixtral-offloading that have the accuracy of fmoe, "
    assert f"{said}{show(tried.hit_rate, 'share')} are hits" in of_hits(ours, other)
    assert f"{said}fmoe takes {show(ours.tpot_s / tried.tpot_s, 'x')} of its TPOT" in of_time(ours, other)


def test_a_verdict_of_modelled_predictions_says_so(bare: Lab, lab: Lab) -> None:
    rows = bare.runs("a6000").rows(["lru", "promoe", "static"])
    assert TPOT.best("", rows, "promoe").is_modelled and TPOT.told(rows, "lru").is_modelled
    assert not TPOT.better("", rows, "lru", "static").is_modelled
    assert not TPOT.everywhere("", {"": lab.runs("a6000").rows(["lru", "mixtral-offloading"])}, "lru").is_modelled
    checks = [TPOT.everywhere("claim", {"here": rows}, "lru")]
    result = Result("moepic:7", (bare.finding("", [], checks),), (), 0.0)
    pages = markdown("results", "", [], [result])
    for page in (pages["results.md"], pages["results/moepic.md"], text(result, lambda headers, rows: "")):
        assert " (modelled)" in page
