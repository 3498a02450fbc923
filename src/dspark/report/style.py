"""The look that all plots share: to be read in grey, by colour-blind eyes, and without the text
around them.

Drawn through matplotlib's objects alone: no window, no state shared with other figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from dspark.files import written_aside
from dspark.metrics.cell import BASELINE

DPI = 160
FONT_PT = 8.0
FONT = FontProperties(size=FONT_PT)
TITLE_FONT = FontProperties(size=FONT_PT + 1, weight="bold")
# Text stays text in the SVG, and the same plot gives the same file.
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dspark",
    "text.parse_math": False,  # a name may hold dollar signs
    "font.size": FONT_PT,
    "figure.labelsize": 9.0,
    "axes.titlesize": FONT_PT,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.linewidth": 0.6,
    "grid.color": "0.88",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.6,
}
GUIDE: dict[str, Any] = {
    "color": "0.55",
    "linewidth": 0.8,
    "linestyle": (0, (1, 2)),
}  # a line to compare with

LINE_IN = 0.165  # a line of text
MARGIN_IN = 0.08  # around a legend
_HANDLE_IN = 0.65  # what stands before a label in a legend


@dataclass(frozen=True)
class Look:
    """Told apart without colour by shape, filling, line, hatch and lightness."""

    color: str
    marker: str
    filled: bool
    linestyle: Any
    hatch: str = ""

    @property
    def face(self) -> str:
        """What fills the marker."""
        return self.color if self.filled else "white"

    @property
    def bar(self) -> dict[str, Any]:
        """Arguments of `Axes.bar`."""
        return {
            "edgecolor": self.color,
            "facecolor": "white" if self.filled else "0.85",
            "hatch": self.hatch,
        }

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of `Axes.plot`."""
        return {
            "color": self.color,
            "linestyle": self.linestyle,
            "marker": self.marker,
            "markerfacecolor": self.face,
            "markeredgecolor": self.color,
        }


BASELINE_LOOK = Look("0.25", "o", False, (0, (1, 1)))
# Okabe and Ito's colours, some darker so that neighbours are far apart in lightness.
_LOOKS = (
    Look("#0072b2", "s", True, "solid", "///"),
    Look("#e69f00", "^", True, (0, (5, 1.5)), "..."),
    Look("#7a2d5f", "D", True, (0, (5, 1.5, 1, 1.5)), "xxx"),
    Look("#56b4e9", "v", True, (0, (3, 1, 1, 1, 1, 1)), "---"),
    Look("#d55e00", "P", True, (0, (8, 2)), "\\\\\\"),
    Look("#00573f", "X", True, (0, (2, 1)), "+++"),
)


def looks_of(runs: Sequence[str]) -> dict[str, Look]:
    """A look for each run, by its place among the arms; from the seventh arm on they come again,
    hollow."""
    arms = [run for run in runs if run != BASELINE]
    looks = {
        run: replace(_LOOKS[place % len(_LOOKS)], filled=place < len(_LOOKS))
        for place, run in enumerate(arms)
    }
    return {run: BASELINE_LOOK if run == BASELINE else looks[run] for run in runs}


def width_in(text: str, font: FontProperties = FONT) -> float:
    """How wide the longest line of the text stands, inches."""
    return max(
        text_to_path.get_text_width_height_descent(line, font, ismath=False)[0] / 72
        for line in text.split("\n")
    )


def wrapped(text: str, inches: float, font: FontProperties = FONT) -> str:
    """The text in lines that stand in so many inches; a long name is broken, not shortened."""
    lines = [""]
    for word in re.findall(r"[^\s_/.,-]*[\s_/.,-]*", text):
        for piece in [word] if width_in(word, font) <= inches else word:
            if lines[-1] and width_in(lines[-1] + piece, font) > inches:
                lines.append("")
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def write_figure(draw: Callable[[], Figure], path_png: str | Path) -> None:
    """Write the figure as `path_png` and, beside it, as SVG with the suffix .svg.

    Raises:
        UserError: a file cannot be written.
    """
    path = Path(path_png)
    with matplotlib.rc_context(SETTINGS):
        figure = draw()
        for kind, metadata in (("png", None), ("svg", {"Date": None})):
            with written_aside(path.with_suffix(f".{kind}")) as aside:
                figure.savefig(aside, format=kind, dpi=DPI, metadata=metadata)


def legend_above(figure: Figure, handles: Mapping[str, Any], title: str = "") -> None:
    """A legend over the whole figure, in as many columns as fit; the figure grows by its height."""
    width, height = figure.get_size_inches()
    labels = [wrapped(label, width - _HANDLE_IN - 2 * MARGIN_IN) for label in handles]
    title = wrapped(title, width - 2 * MARGIN_IN, TITLE_FONT)
    widest = max((width_in(label) for label in labels), default=0) + _HANDLE_IN
    columns = max(1, min(len(labels), int((width - 2 * MARGIN_IN) / widest)))
    rows = math.ceil(len(labels) / columns)  # filled column by column
    lines = sum(max(label.count("\n") + 1 for label in labels[row::rows]) for row in range(rows))
    lines += title.count("\n") + 1 if title else 0
    figure.set_size_inches(width, height + lines * LINE_IN)
    figure.legend(
        list(handles.values()),
        labels,
        title=title or None,
        title_fontproperties=TITLE_FONT,
        alignment="left",
        loc="outside upper left",
        ncols=columns,
        handlelength=3,
        frameon=False,
    )
