"""The picture of `expertly lab configure --plot`: of each layer the budget, the split and the expected exposed time."""

from __future__ import annotations

from typing import Any

from expertly.cli.figures import new_figure

_WIDTH = 0.4  # of one of two bars side by side


def draw(result: dict[str, Any]) -> Any:
    """A figure; a row of panels for each memory."""
    found = result["results"]
    num_layers = len(result["rates"])
    figure = new_figure(max(12.0, min(30.0, 0.9 * num_layers)), 3.6 * len(found) + 0.6)
    for axes, one in zip(figure.subplots(len(found), 3, squeeze=False), found, strict=True):
        _draw_budgets(axes[0], one)
        _draw_splits(axes[1], one, result["segments"])
        _draw_exposed(axes[2], one)
        for axis in axes:
            axis.set_xlabel("layer")
            axis.set_xlim(-0.6, num_layers - 0.4)
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.set_axisbelow(True)
    tokens = f"{result['tokens']} decoded tokens"
    figure.suptitle(f"{result['model']}: configured from {tokens}; times: {result['times']}")
    return figure


def _draw_budgets(axis: Any, found: dict[str, Any]) -> None:
    layers = found["layers"]
    numbers = [one["layer"] for one in layers]
    budgets = [one["budget_experts"] for one in layers]
    axis.bar(numbers, budgets, color="C0", label="budget V")
    axis.axhline(sum(budgets) / len(budgets), color="0.35", linestyle="--", linewidth=1.2, label="equal budgets")
    kept = [one["kept_experts"] for one in layers]
    axis.plot(numbers, kept, color="C1", marker="o", markersize=5, linestyle="", label="kept experts, C")
    axis.set_title(f"memory {found['memory']}: budgets, in experts")
    _with_legend(axis, max(*kept, *budgets))


def _draw_splits(axis: Any, found: dict[str, Any], num_segments: int) -> None:
    layers = found["layers"]
    axis.bar([one["layer"] for one in layers], [one["theta"] for one in layers], color="C2")
    axis.axhline(0.5, color="0.35", linestyle="--", linewidth=1.2)
    axis.set_title(f"theta: what stays of each (P = {num_segments})")
    axis.set_ylim(0, 1.05)
    axis.grid(alpha=0.3, axis="y")


def _draw_exposed(axis: Any, found: dict[str, Any]) -> None:
    layers = found["layers"]
    for key, offset, color, name in (
        ("uniform_exposed_s", -_WIDTH / 2, "0.65", "uniform, theta 0.5"),
        ("exposed_s", _WIDTH / 2, "C3", "configured"),
    ):
        label = f"{name}: {found[key] * 1e3:.3g} ms"
        places = [one["layer"] + offset for one in layers]
        axis.bar(places, [one[key] * 1e3 for one in layers], width=_WIDTH, color=color, label=label)
    axis.set_title("predicted exposed loading a token (ms)")
    _with_legend(axis, max(one[key] * 1e3 for one in layers for key in ("uniform_exposed_s", "exposed_s")))


def _with_legend(axis: Any, most: float) -> None:
    """Above everything that is drawn, which reaches up to `most`."""
    axis.set_ylim(0, 1.4 * most or 1.0)
    axis.grid(alpha=0.3, axis="y")
    axis.legend(frameon=False, fontsize="small", loc="upper right")
