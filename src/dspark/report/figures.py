"""The plots themselves: cells and request records in, a figure out; nothing is read or written."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray

from dspark.decode.records import RequestRecord
from dspark.metrics.cell import BASELINE, CellSummary
from dspark.metrics.rows import LENGTH_DIGITS, SPEEDUP_DIGITS, TOK_S_DIGITS
from dspark.metrics.timing import laid_end_to_end, latency_s, ttft_s
from dspark.report.style import GUIDE, LINE_IN, Look, legend_above, looks_of, wrapped
from dspark.report.table import UNPAIRED

WIDTH_IN = 5.6
PANEL_HEIGHT_IN = 2.7
ROW_IN = 0.2  # an arm of the speedup plot
NAME_IN = 1.6  # room for a dataset's name
SMALL_FONT = FontProperties(size=6.5)
FEWEST_STEPS = 20  # that a share is worth drawing of
ASIDE = 0.07  # of the way to the next place
STRIP_IN = 0.75  # an arm of the plot over time
COLUMNS = 3  # panels side by side, at most
LEVELS = 401  # points that a distribution is drawn with, at most
BINS = 40  # of the time axis, at most
TOKENS_A_BIN = 25  # at least, so that a bin shows the rate and not single steps

# The cells of each dataset, by the name that the plot gives it.
Datasets = Mapping[str, Sequence[CellSummary]]
Records = Mapping[str, Sequence[RequestRecord]]  # of one dataset, by run


def speedup(datasets: Datasets, unpaired: Collection[tuple[str, str]] = ()) -> Figure:
    """Output tok/s of each arm relative to the baseline's, with 95 % intervals, by dataset.

    The speedups of `unpaired`, by dataset and run, have no interval and are marked.
    """
    looks = looks_of(_runs(datasets))
    rows = sum(len(_arms(cells)) for cells in datasets.values())
    figure = _figure(WIDTH_IN, max(1, rows + len(datasets)) * ROW_IN + 0.9)
    panel = figure.subplots()
    handles: dict[str, Any] = {}
    y, ticks = 0.0, []
    for number, (name, cells) in enumerate(datasets.items()):
        arms = _arms(cells)
        for place, cell in enumerate(arms):
            marked = (name, cell.run) in unpaired
            handles[cell.run] = _interval(panel, cell, y + place, looks[cell.run], marked)
        last = y + max(len(arms) - 1, 0)
        if number % 2 == 0:
            panel.axhspan(y - 1, last + 1, color="0.96", linewidth=0)
        ticks.append(((y + last) / 2, wrapped(name, NAME_IN)))
        y = last + 2
    panel.axvline(1, **GUIDE)
    panel.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(y - 1, -1)
    panel.margins(x=0.06)
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:.2f}x"))
    panel.grid(axis="x")
    note = f"\n{UNPAIRED} not measured as {BASELINE} was" if unpaired else ""
    panel.set_xlabel(f"Speedup: output tok/s relative to {BASELINE}, with 95 % interval{note}")
    if not handles:
        _say(panel, "no run beside the baseline")
    _finish(figure, _flat(datasets), handles)
    return figure


def _interval(panel: Axes, cell: CellSummary, y: float, look: Look, marked: bool) -> Any:
    around = [[cell.speedup - cell.speedup_ci95_low], [cell.speedup_ci95_high - cell.speedup]]
    drawn = panel.errorbar(
        cell.speedup,
        y,
        xerr=None if marked else np.maximum(around, 0),
        color=look.color,
        marker=look.marker,
        markerfacecolor=look.face,
        linestyle="none",
        capsize=2,
    )
    panel.text(
        1.01,
        y,
        f"{cell.speedup:.{SPEEDUP_DIGITS}f}x{f' {UNPAIRED}' if marked else ''}",
        transform=panel.get_yaxis_transform(),
        va="center",
    )
    return drawn


def acceptance(name: str, cells: Sequence[CellSummary]) -> Figure:
    """How often each draft position is accepted: of all steps, and of those that came so far."""
    figure = _figure(WIDTH_IN, PANEL_HEIGHT_IN)
    panels = figure.subplots(1, 2, sharey=True)
    looks = looks_of([cell.run for cell in cells])
    handles: dict[str, Any] = {}
    arms = _arms(cells)
    longest = max([1, *(len(cell.accept_p) for cell in arms)])
    for cell, aside in zip(arms, _asides(len(arms)), strict=True):
        positions = np.arange(1, len(cell.accept_p) + 1) + aside
        line = looks[cell.run].line
        for panel, shares in zip(panels, (cell.accept_p, _conditional(cell)), strict=True):
            [handles[cell.run]] = panel.plot(positions, shares, **line)
    panels[0].set(title="Accepted, of all steps", xlabel="Draft position")
    panels[1].set(
        title="Accepted, of the steps that got there",
        xlabel=f"Draft position ({FEWEST_STEPS} steps or more got there)",
    )
    for panel in panels:
        panel.set(xticks=range(1, longest + 1), xlim=(0.6, longest + 0.4), ylim=(-0.02, 1.02))
        panel.yaxis.set_major_formatter(PercentFormatter(1))
        panel.grid(axis="y")
        if not any(cell.accept_p for cell in arms):
            _say(panel, "no complete step of a draft")
        elif not np.isfinite(np.concatenate([line.get_ydata() for line in panel.lines])).any():
            _say(panel, f"fewer than {FEWEST_STEPS} steps")
    panels[0].set_ylabel("Share of complete steps")
    _finish(figure, cells, handles, name)
    return figure


def _conditional(cell: CellSummary) -> list[float]:
    """Share of the steps that accepted all positions before; NaN where too few did to tell."""
    return [
        after / so_far if so_far * cell.complete_steps >= FEWEST_STEPS else math.nan
        for so_far, after in pairwise([1.0, *cell.accept_p])
    ]


def accept_length(name: str, cells: Sequence[CellSummary]) -> Figure:
    """How many tokens a verification step gives, the bonus token included."""
    figure = _figure(WIDTH_IN, PANEL_HEIGHT_IN)
    panel = figure.subplots()
    looks = looks_of([cell.run for cell in cells])
    arms = [cell for cell in _arms(cells) if sum(cell.accept_histogram)]
    handles: dict[str, Any] = {}
    longest = 1
    thickness = 0.8 / max(len(arms), 1)
    for place, cell in enumerate(arms):
        shares = np.array(cell.accept_histogram) / sum(cell.accept_histogram)
        tokens = np.arange(1, len(shares) + 1)
        longest = max(longest, len(shares))
        label = f"{cell.run}: {cell.accept_len:.{LENGTH_DIGITS}f}"
        handles[label] = panel.bar(
            tokens + (place - (len(arms) - 1) / 2) * thickness,
            shares,
            width=thickness,
            linewidth=0.8,
            **looks[cell.run].bar,
        )
    panel.set(
        xlabel="Tokens that a step gives, the bonus token included",
        ylabel="Share of complete steps",
        xticks=range(1, longest + 1),
        xlim=(0.4, longest + 0.6),
    )
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panel.grid(axis="y")
    if not arms:
        _say(panel, "no complete step of a draft")
    _finish(figure, cells, handles, f"{name}: accept len")
    return figure


def latency(name: str, cells: Sequence[CellSummary], records: Records) -> Figure:
    """Latency of the requests of each arm, as a distribution."""
    label = "Latency: submit to last token, ms"
    return _distribution(name, cells, records, latency_s, label)


def ttft(name: str, cells: Sequence[CellSummary], records: Records) -> Figure:
    """Time to first token of the requests of each arm, as a distribution."""
    label = "TTFT: submit to first token, ms"
    return _distribution(name, cells, records, ttft_s, label)


def _distribution(
    name: str,
    cells: Sequence[CellSummary],
    records: Records,
    seconds: Callable[[RequestRecord], float],
    label: str,
) -> Figure:
    figure = _figure(WIDTH_IN, PANEL_HEIGHT_IN)
    panel = figure.subplots()
    looks = looks_of([cell.run for cell in cells])
    handles: dict[str, Any] = {}
    longest = 0.0
    for cell in cells:
        times = 1000 * np.array([seconds(record) for record in records[cell.run]])
        longest = max(longest, float(times.max()))
        levels = np.linspace(0, 1, max(2, min(len(times), LEVELS)))
        marks = [0.5, 0.95]
        line = looks[cell.run].line
        # linear interpolation, as in the summaries: the table's p95 lies on the line
        panel.plot(np.quantile(times, levels), levels, **{**line, "marker": ""})
        p50, p95 = np.quantile(times, marks)
        panel.plot([p50, p95], marks, **{**line, "linestyle": "none"})
        legend = f"{cell.run}: {p50:,.0f} / {p95:,.0f}"
        [handles[legend]] = panel.plot([], [], **line)
    for level in (0.5, 0.95):
        panel.axhline(level, zorder=0, **GUIDE)
    panel.set(xlabel=label, ylabel="Share of requests", ylim=(0, 1.02))
    panel.set_xlim(0, 1.04 * longest)
    panel.set_yticks([0, 0.25, 0.5, 0.75, 0.95])
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panel.grid(axis="x")
    _finish(figure, cells, handles, f"{name}: median / p95 in ms")
    return figure


def throughput(name: str, cells: Sequence[CellSummary], records: Records) -> Figure:
    """Output tok/s of each arm while it was measured: does it stay what it was?

    The time axis of an arm is its measured windows, one after the other: what lies between them is
    the other arms' turn. Where a dataset is cut into shards, these follow one another too.
    """
    titles = [
        wrapped(f"{cell.run}: {cell.output_tok_s:.{TOK_S_DIGITS}f} tok/s in all", WIDTH_IN - 1)
        for cell in cells
    ]
    more_lines = sum(title.count("\n") for title in titles)
    figure = _figure(WIDTH_IN, len(cells) * STRIP_IN + more_lines * LINE_IN + 0.5)
    panels = figure.subplots(len(cells), 1, sharex=True, sharey=True, squeeze=False).ravel()
    looks = looks_of([cell.run for cell in cells])
    for cell, title, panel in zip(cells, titles, panels, strict=True):
        edges, rates = rate_over_time(records[cell.run])
        panel.stairs(rates, edges, color=looks[cell.run].color, fill=True, alpha=0.3)
        panel.stairs(rates, edges, color=looks[cell.run].color, linewidth=1)
        panel.axhline(cell.output_tok_s, **GUIDE)
        panel.set_title(title, pad=3)
        panel.grid()
    panels[0].set_xlim(left=0)  # of all panels
    panels[0].set_ylim(bottom=0)
    figure.supylabel("Output tok/s")
    panels[-1].set_xlabel("Measured time of the run, s")
    _finish(figure, cells, {}, name)
    return figure


def rate_over_time(
    records: Sequence[RequestRecord],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Output tokens a second in equal parts of an arm's measured time.

    Returns:
        [bins + 1] edges in seconds, and [bins] tok/s.
    """
    moments, tokens, length = tokens_over_time(records)
    bins = max(1, min(BINS, int(tokens.sum()) // TOKENS_A_BIN))
    # rounding may put the last token beyond the last edge
    counts, edges = np.histogram(np.minimum(moments, length), bins, (0, length), weights=tokens)
    return edges, counts / (length / bins)


def tokens_over_time(
    records: Sequence[RequestRecord],
) -> tuple[NDArray[np.float64], NDArray[np.int64], float]:
    """When output tokens came, and how many: the measured windows are laid end to end, and those of
    a shard after those of the shard before it.

    Returns:
        [N] seconds and [N] tokens, in no order, and the seconds of all windows together.
    """
    moments: list[float] = []
    tokens: list[int] = []
    shifted, length = laid_end_to_end(records)
    for record, shift in shifted:
        moments += [t + shift for t in (record.t_first, *record.step_t)]
        tokens += [1, *record.step_emitted]
    return np.array(moments), np.array(tokens, dtype=np.int64), length


def speedup_by_concurrency(cells: Sequence[CellSummary]) -> Figure:
    """Speedup against the requests in flight, one panel a dataset: where it stops to pay."""
    names = list(dict.fromkeys(cell.dataset for cell in cells))
    looks = looks_of(list(dict.fromkeys(cell.run for cell in cells)))
    columns = min(COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    figure = _figure(
        max(WIDTH_IN, 2.4 * columns), rows * PANEL_HEIGHT_IN * (0.85 if rows > 1 else 1)
    )
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    ticks = sorted({cell.concurrency for cell in cells})
    handles: dict[str, Any] = {}
    arms = [run for run in looks if run != BASELINE]
    for name, panel in zip(names, panels, strict=False):
        for run, aside in zip(arms, _asides(len(arms)), strict=True):
            mine = [cell for cell in cells if (cell.dataset, cell.run) == (name, run)]
            handles[run] = _over_concurrency(panel, mine, looks[run], 2**aside)
        panel.axhline(1, **GUIDE)
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.minorticks_off()
        panel.set_title(wrapped(name, WIDTH_IN / columns - 0.5))
        panel.grid(axis="y")
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    for panel in panels[len(names) - columns : len(names)]:
        panel.tick_params(labelbottom=True)  # also above a place that stays empty
        panel.set_xlabel("Requests in flight")
    figure.supylabel("Speedup, with 95 % interval")
    _finish(figure, cells, handles, swept=True)
    return figure


def _over_concurrency(panel: Axes, cells: Sequence[CellSummary], look: Look, aside: float) -> Any:
    cells = sorted(cells, key=lambda cell: cell.concurrency)
    around = [
        [cell.speedup - cell.speedup_ci95_low for cell in cells],
        [cell.speedup_ci95_high - cell.speedup for cell in cells],
    ]
    return panel.errorbar(
        [cell.concurrency * aside for cell in cells],
        [cell.speedup for cell in cells],
        yerr=np.maximum(around, 0),
        capsize=2,
        **look.line,
    )


# --------------------------------------------------------------------------- what all share


def _figure(width_in: float, height_in: float) -> Figure:
    return Figure(figsize=(width_in, height_in), layout="constrained")


def _finish(
    figure: Figure,
    cells: Sequence[CellSummary],
    handles: Mapping[str, Any],
    title: str = "",
    swept: bool = False,
) -> None:
    """The legend, the title above it, and at the foot what the numbers hold for.

    `swept` says that the figure is about several concurrencies.
    """
    legend_above(figure, handles, title)
    texts = dict.fromkeys(_conditions(cell, swept) for cell in cells)
    # small letters are drawn somewhat wider than they measure
    room = 0.92 * figure.get_size_inches()[0]
    conditions = wrapped("; ".join(texts), room, SMALL_FONT)
    figure.supxlabel(conditions, x=0.01, ha="left", fontproperties=SMALL_FONT, color="0.4")


def _conditions(cell: CellSummary, swept: bool) -> str:
    known = cell.settings
    parts = [
        known.get("device"),
        cell.precision,
        None if swept else f"concurrency {cell.concurrency}",
        f"target {known['target']}" if "target" in known else None,
        f"drafter {known['drafter']}" if "drafter" in known else None,
    ]
    return ", ".join(str(part) for part in parts if part)


def _asides(count: int) -> NDArray[np.float64]:
    """How far beside its place each of so many arms is drawn, so that none hides another."""
    return np.float64(ASIDE) * (np.arange(count) - (count - 1) / 2)


def _say(panel: Axes, text: str) -> None:
    panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", va="center", color="0.4")


def _arms(cells: Sequence[CellSummary]) -> list[CellSummary]:
    return [cell for cell in cells if cell.run != BASELINE]


def _flat(datasets: Datasets) -> list[CellSummary]:
    return [cell for cells in datasets.values() for cell in cells]


def _runs(datasets: Datasets) -> list[str]:
    return list(dict.fromkeys(cell.run for cell in _flat(datasets)))
