"""One decoded token under one system: what computed, what was loaded, and where the device waited, over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from expertly.lab.compare.svg import Scale, drawing, element, round_ticks, titled
from expertly.lab.compare.units import format_seconds

WIDTH, LEFT, RIGHT = 960.0, 84.0, 12.0
LANE, GAP, TOP, BOTTOM = 30.0, 8.0, 8.0, 36.0

LANES = {"device": "computing", "link": "link", "disk": "disk", "predictor": "predicting"}

KINDS = {
    "dense": "attention, router, head",
    "expert": "an expert",
    "control": "asking for loads, taking them",
    "wait": "waiting for loads",
    "demand": "loaded when needed",
    "ahead": "loaded ahead",
    "predict": "predicting",
}
"""Of what is drawn, in words; the class of each is k-KIND."""

_LEAST = 0.8  # of a bar's width, so that it is seen
_LEAST_WAIT_NS = 1000


def gantt(timeline: Mapping[str, Any], length_ns: int) -> str:
    """`timeline` as TokenTimeline has it; the axis is so long, which makes several comparable."""
    bars = [*_waits(timeline), *_bars(timeline["events"])]
    lanes = [lane for lane in LANES if any(bar["lane"] == lane for bar in bars)]
    height = TOP + len(lanes) * (LANE + GAP) + BOTTOM
    x = Scale(0, length_ns, LEFT, WIDTH - RIGHT)
    parts = _axis(x, length_ns, height)
    for number, lane in enumerate(lanes):
        y = TOP + number * (LANE + GAP)
        parts.append(element("text", LANES[lane], x=LEFT - 8, y=y + LANE / 2 + 4, class_="tick end"))
        parts += [_drawn(bar, x, y, timeline["length_ns"]) for bar in bars if bar["lane"] == lane]
    end = x.at(timeline["length_ns"])
    parts.append(element("line", x1=end, x2=end, y1=TOP - 4, y2=height - BOTTOM, class_="axis"))
    loads = sum(bar["kind"] in ("demand", "ahead") for bar in bars)
    name = f"{timeline['system']}, {timeline['memory']}: one token, {format_seconds(timeline['length_ns'] / 1e9)}"
    return drawing(name, f"computing and {loads} loads over time", WIDTH, height, parts, "wide")


def legend(timelines: Iterable[Mapping[str, Any]]) -> str:
    """What the colours stand for, as far as they occur."""
    kinds = {bar["kind"] for one in timelines for bar in (*_waits(one), *_bars(one["events"]))}
    items = [
        element("li", element("i", " ", class_=f"k-{kind}") + " " + escape(said))
        for kind, said in KINDS.items()
        if kind in kinds
    ]
    return element("ul", "".join(items), class_="legend")


def _bars(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Events as what is drawn: loads are told apart by whether their layer's router had spoken when they began."""
    spoke, done = {}, {}
    for event in events:
        if event["lane"] == "device" and event["kind"] == "dense":
            spoke[event["layer"]] = event["end_ns"]
        if event["lane"] == "device" and event["kind"] == "expert":
            done[event["layer"]] = event["end_ns"]
    bars = []
    for event in events:
        kind = event["kind"]
        if kind == "load":
            layer = event["layer"]
            is_needed = spoke.get(layer, event["end_ns"]) <= event["begin_ns"] <= done.get(layer, event["begin_ns"])
            kind = "demand" if is_needed else "ahead"
        elif event["lane"] == "predictor":
            kind = "predict"
        elif kind == "head":
            kind = "dense"
        elif kind not in KINDS:
            kind = "control"
        bars.append({**event, "kind": kind, "said": _said(event)})
    return bars


def _waits(timeline: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Gaps of the device in which something is on its way to it."""
    device = [event for event in timeline["events"] if event["lane"] == "device"]
    gaps, now = [], 0
    for event in device:
        if event["begin_ns"] - now > _LEAST_WAIT_NS:
            gaps.append((now, event["begin_ns"]))
        now = max(now, event["end_ns"])
    wait = {"lane": "device", "kind": "wait", "said": "waiting for loads"}
    return [wait | {"begin_ns": begin, "end_ns": end} for begin, end in gaps]


def _said(event: Mapping[str, Any]) -> str:
    layer = "" if event["layer"] < 0 else f", layer {event['layer']}"
    if event["kind"] == "load":
        first, last = event["segment"], event["segment"] + event["num_segments"] - 1
        parts = f"segment {first}" if first == last else f"segments {first} to {last}"
        return f"load layer {event['layer']}, expert {event['expert']}, {parts}"
    if event["kind"] == "expert":
        return f"expert {event['expert']}{layer}"
    said = {"dense": "attention and router", "ask": "asking for loads", "take": "taking what came"}
    return f"{said.get(event['kind'], event['kind'])}{layer}"


def _drawn(bar: Mapping[str, Any], x: Scale, y: float, length_ns: int) -> str:
    begin, end = x.at(max(0, bar["begin_ns"])), x.at(min(length_ns, bar["end_ns"]))
    kind = bar["kind"]
    drawn = element("rect", x=begin, y=y, width=max(_LEAST, end - begin), height=LANE, class_=f"k-{kind}")
    text = f"{bar['layer']}.{bar['expert']}" if kind in ("demand", "ahead") else ""
    if text and end - begin > 6 * len(text):
        drawn += element("text", text, x=(begin + end) / 2, y=y + LANE / 2 + 4, class_="in-bar")
    when = f"{bar['begin_ns'] / 1e6:.3f} to {bar['end_ns'] / 1e6:.3f} ms"
    return titled(drawn, f"{bar['said']}: {when}")


def _axis(x: Scale, length_ns: int, height: float) -> list[str]:
    bottom = height - BOTTOM
    parts = [element("line", x1=x.begin, x2=x.end, y1=bottom, y2=bottom, class_="axis")]
    for tick in round_ticks(length_ns / 1e6, 8):
        if tick * 1e6 > length_ns:
            break
        place = x.at(tick * 1e6)
        parts.append(element("line", x1=place, x2=place, y1=TOP, y2=bottom + 4, class_="grid"))
        parts.append(element("text", f"{tick:g}", x=place, y=bottom + 17, class_="tick middle"))
    middle = (x.begin + x.end) / 2
    parts.append(element("text", "ms since the token before", x=middle, y=height - 5, class_="tick middle"))
    return parts
