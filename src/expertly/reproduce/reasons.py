"""Why a direction does not hold, worked out from the runs that decided."""

from __future__ import annotations

from expertly.reproduce.finding import show
from expertly.reproduce.lab import Lab, Row


def of_time(ours: Row, other: Row) -> str:
    """Why `ours` is not faster: bytes, wrong guesses, a busy link, lateness."""
    said = [
        f"{ours.system} loads {ours['bytes_loaded'] / max(1, other['bytes_loaded']):.2f}x the bytes of {other.system}"
    ]
    if ours["prefetched_bytes"]:
        wasted = ours["wasted_bytes"] / ours["prefetched_bytes"]
        said.append(f"{show(wasted, 'share')} of what it loads ahead is not needed")
    if ours["timeliness"] is not None:
        said.append(f"of what is, {show(ours['timeliness'], 'share')} comes in time")
    said.append(f"the link is busy {show(other.link_share, 'share')} of {other.system}'s time already")
    return "; ".join(said)


def of_hits(ours: Row, other: Row) -> str:
    """Why `ours` does not hit more: what it foretells, and what of it is there."""
    return "; ".join(
        f"{row.system} names {_share(row['recall'])} of what is needed, {_share(row['prediction_accuracy'])} of what "
        f"it names is right, {_share(row['fetch_rate'])} of it is there when the router speaks"
        if row["prediction_accuracy"] is not None
        else f"{row.system} foretells nothing"
        for row in (ours, other)
    )


def of_prompts(*rows: Row) -> str:
    """What a prompt of each goes to."""
    said = []
    for row in rows:
        waiting = (row.waiting(False) or 0.0) * row["ttft_s"]
        computing = row["ttft_s"] - waiting
        said.append(f"{row.system} computes {show(computing, 'ms')} and waits {show(waiting, 'ms')}")
    return f"of a prompt {', '.join(said)}"


def of_steps(*rows: Row) -> str:
    """What a decode pass of each goes to, and what it waits for."""
    said = []
    for row in rows:
        waiting = (row.waiting(True) or 0.0) * row.tpot_s
        nbytes = row["bytes_loaded"] / max(1, len(row.passes_s)) / 1e6
        said.append(
            f"{row.system} ({row['memory']}) computes {show(row.tpot_s - waiting, 'ms')}, waits {show(waiting, 'ms')}, "
            f"loads {nbytes:.1f} MB a pass and hits {_share(row['hit_rate'])}"
        )
    return "; ".join(said)


def of_categories(lab: Lab) -> str:
    """What the requests of a trace are of."""
    num = len({request.category for request in lab.trace.requests})
    return "one category" if num == 1 else f"{num} categories"


def _share(value: float | None) -> str:
    return show(value, "share")
