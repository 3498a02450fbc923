"""What all plots share: looks that differ without colour, names that are broken and never cut."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import matplotlib
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from dspark.errors import UserError
from dspark.report.style import (
    SETTINGS,
    legend_above,
    looks_of,
    width_in,
    wrapped,
    write_figure,
)

ARMS = [f"arm{number}" for number in range(12)]


def test_looks_differ_without_colour() -> None:
    looks = list(looks_of(["baseline", *ARMS]).values())
    assert len({(look.marker, look.filled) for look in looks}) == len(looks)
    bars = [look.bar for look in looks[1:]]
    assert len({(bar["hatch"], bar["facecolor"]) for bar in bars}) == len(bars)


def test_neighbouring_arms_differ_in_lightness() -> None:
    looks = list(looks_of(ARMS[:6]).values())
    grey = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b in (to_rgb(x.color) for x in looks)]
    assert all(abs(one - other) > 0.1 for one, other in pairwise(grey))
    assert len({str(look.linestyle) for look in looks}) == len(looks)


def test_a_run_looks_the_same_whatever_stands_before_it_in_the_list() -> None:
    assert looks_of(["baseline", "a", "b"])["b"] == looks_of(["a", "b", "baseline"])["b"]
    assert looks_of(["a", "baseline"])["baseline"] == looks_of(["baseline"])["baseline"]


@pytest.mark.parametrize(
    "text",
    ["short", "dspark_k7_threshold_0.95_with_schedule", "W" * 60, "a b_c.d-e/f" * 9, "$x_0$ 100%"],
)
def test_wrapped_lines_fit_and_lose_nothing(text: str) -> None:
    lines = wrapped(text, 1.0).split("\n")
    assert all(width_in(line) <= 1.0 for line in lines)
    assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", text)


def test_a_name_is_broken_where_it_has_a_joint() -> None:
    assert wrapped("dspark_k7_threshold", width_in("dspark_k7_")) == "dspark_k7_\nthreshold"
    assert wrapped("dspark_k7", 5.0) == "dspark_k7"


def draw(labels: list[str], title: str) -> Figure:
    figure = Figure(figsize=(4, 2), layout="constrained")
    panel = figure.subplots()
    legend_above(figure, {label: panel.plot([0, 1])[0] for label in labels}, title)
    return figure


@pytest.mark.parametrize("title", ["", "a dataset with a name that is longer than the figure " * 2])
@pytest.mark.parametrize("labels", [ARMS, ["x" * 200, "y"], []])
def test_a_legend_stands_above_the_panel_within_the_figure(labels: list[str], title: str) -> None:
    with matplotlib.rc_context(SETTINGS):
        figure = draw(labels, title)
        figure.draw_without_rendering()
    legend, panel = figure.legends[0].get_window_extent(), figure.axes[0].get_window_extent()
    assert legend.y0 >= panel.y1
    assert legend.x1 <= figure.bbox.x1 and legend.y1 <= figure.bbox.y1
    assert panel.height > 100  # of 200: the figure grew for the legend


def test_signs_of_formulas_are_text(tmp_path: Path) -> None:
    write_figure(lambda: draw(["cost_$5_and_$6"], ""), tmp_path / "a.b.png")
    root = ElementTree.parse(tmp_path / "a.b.svg").getroot()
    said = ["".join(e.itertext()) for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "cost_$5_and_$6" in said


def test_a_drawing_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> Figure:
        raise UserError("no numbers")

    with pytest.raises(UserError, match="no numbers"):
        write_figure(fail, tmp_path / "plot.png")
    assert list(tmp_path.iterdir()) == []
