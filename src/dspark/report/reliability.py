"""The reliability plot of a calibrated confidence head: confidence against what really survived."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspark.errors import UserError
from dspark.models.calibration import Calibration, Curve
from dspark.report.style import Look, write_figure

COLUMNS = 4  # at most
PANEL_IN = 2.2  # width and height of a panel, inches
LARGEST_PT2 = 110.0  # area of the marker of a bin that holds all blocks, square points
SMALLEST_PT2 = 6.0
JOINED = 0.01  # share of blocks from which a bin is on the line; the rest is noise

BEFORE = Look("#e07b00", "o", False, (0, (3, 1.5)))
AFTER = Look("#00457c", "s", True, "solid")


def plot_reliability(calibration: Calibration, path_png: str | Path) -> None:
    """Write the plot as `path_png` and, beside it, as SVG with the suffix .svg.

    One panel a position: a point a bin of confidence, before and after calibration, its area the
    share of blocks in the bin; on the diagonal confidence is right. Lines join neighbouring bins that
    hold at least 1 % of the blocks.

    Raises:
        UserError: the calibration was not measured, or a file cannot be written.
    """
    measured = calibration.ece_before and calibration.ece_after
    if not (measured and calibration.curves_before and calibration.curves_after):
        raise UserError(
            "the calibration holds temperatures alone, no reliability curves: calibrate the drafter "
            "again to plot them"
        )
    write_figure(lambda: _figure(calibration), path_png)


def _figure(calibration: Calibration) -> Figure:
    positions = len(calibration.temperatures)
    rows = math.ceil(positions / COLUMNS)
    columns = math.ceil(positions / rows)
    wide = columns > 2  # for the legend to stand in one row
    size = (max(columns, 1.5) * PANEL_IN, rows * PANEL_IN + (0.9 if wide else 1.2))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for position, panel in enumerate(panels[:positions]):
        _draw(panel, calibration, position)
    for panel in panels[positions:]:
        panel.set_axis_off()
    for panel in panels[positions - columns : positions]:
        panel.tick_params(labelbottom=True)  # also above a place that stays empty
    figure.supxlabel("Confidence that the draft survives this far")
    figure.supylabel("Observed share that did")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        title="marker area: share of blocks",
        loc="outside upper center",
        ncols=3 if wide else 1,
        frameon=False,
    )
    return figure


def _draw(panel: Axes, calibration: Calibration, position: int) -> None:
    panel.plot([0, 1], [0, 1], color="0.65", linewidth=0.8, label="confidence is right")
    _draw_curve(panel, calibration.curves_before[position], "before calibration", BEFORE)
    _draw_curve(panel, calibration.curves_after[position], "after calibration", AFTER)
    panel.set(
        xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1], aspect=1
    )
    panel.set_title(
        f"Position {position + 1}: T = {calibration.temperatures[position]:.2f}", fontsize=8
    )
    before, after = calibration.ece_before[position], calibration.ece_after[position]
    errors = f"ECE {before:.1%}\n  to {after:.1%}"
    panel.text(0.03, 0.97, errors, va="top", transform=panel.transAxes)


def _draw_curve(panel: Axes, curve: Curve, label: str, look: Look) -> None:
    total = sum(curve.count)
    areas = [SMALLEST_PT2 + (LARGEST_PT2 - SMALLEST_PT2) * n / total for n in curve.count]
    line = [
        y if n >= JOINED * total else math.nan  # a gap
        for y, n in zip(curve.observed, curve.count, strict=True)
    ]
    panel.plot(curve.confidence, line, color=look.color, linewidth=1, linestyle=look.linestyle)
    panel.scatter(
        curve.confidence,
        curve.observed,
        s=areas,
        marker=look.marker,
        facecolor=look.face,
        edgecolor=look.color,
        linewidth=0.9,
        zorder=3,
        label=label,
    )
