"""The plots: the numbers that they are drawn from, and that nothing in them hides another thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from measured import SETTINGS as MEASURED
from measured import simulate

from dspark.decode.records import RequestRecord
from dspark.metrics.cell import CellSummary
from dspark.metrics.timing import distribution_ms, latency_s, output_tok_s, ttft_s
from dspark.report import figures
from dspark.report.style import SETTINGS

LONG = "_with_a_name_that_says_all_that_was_varied_threshold_0.95_$x$"


@pytest.fixture
def cells(cell: Callable[..., CellSummary]) -> list[CellSummary]:
    """A dataset with three runs whose histograms fit their shares."""
    made = [
        cell("gsm8k", run, tok_s, k)
        for run, tok_s, k in (("baseline", 100, 0), ("dspark_k3", 125, 3), ("dspark_k7", 110, 7))
    ]
    for one in made[1:]:
        shares = [1.0, *one.accept_p, 0.0]
        steps = [one.complete_steps * share for share in shares]
        one.accept_histogram = [round(a - b) for a, b in pairwise(steps)]
    return made


@pytest.fixture
def records() -> dict[str, list[RequestRecord]]:
    runs = {"baseline": 0, "dspark_k3": 3, "dspark_k7": 7}
    return {run: simulate("gsm8k", run, k) for run, k in runs.items()}


def drawn(draw: Callable[..., Figure], *args: Any) -> Figure:
    with matplotlib.rc_context(SETTINGS):
        figure = draw(*args)
        figure.draw_without_rendering()
    return figure


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


# ---------------------------------------------------------------------------- numbers


def test_speedup_shows_value_and_interval_of_every_arm(cells: list[CellSummary]) -> None:
    figure = drawn(figures.speedup, {"gsm8k": cells, "mbpp": cells[:2]})
    [panel] = figure.axes
    bars = [container.lines for container in panel.containers]
    assert [float(line.get_xdata()[0]) for line, _, _ in bars] == [1.25, 1.1, 1.25]
    intervals = [line.get_segments()[0][:, 0] for _, _, [line] in bars]
    assert np.allclose(intervals, [[1.1875, 1.3125], [1.045, 1.155], [1.1875, 1.3125]])
    assert [text.get_text() for text in panel.texts] == ["1.250x", "1.100x", "1.250x"]
    assert [tick.get_text() for tick in panel.get_yticklabels()] == ["gsm8k", "mbpp"]
    assert labels(figure) == ["dspark_k3", "dspark_k7"]


def test_an_unpaired_speedup_has_no_interval_and_is_marked(cells: list[CellSummary]) -> None:
    figure = drawn(figures.speedup, {"gsm8k": cells}, {("gsm8k", "dspark_k7")})
    [panel] = figure.axes
    assert [bool(container.has_xerr) for container in panel.containers] == [True, False]
    assert [text.get_text() for text in panel.texts] == ["1.250x", "1.100x †"]
    assert "† not measured as baseline was" in panel.get_xlabel()


def test_acceptance_of_all_steps_and_of_those_that_got_there(cells: list[CellSummary]) -> None:
    figure = drawn(figures.acceptance, "gsm8k", cells)
    left, right = figure.axes
    for panel, wanted in (
        (left, [cell.accept_p for cell in cells[1:]]),
        # halves, but for integer counts; 400 * p5 = 12 steps are too few to tell of position 6
        (right, [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5, 0.48, float("nan"), float("nan")]]),
    ):
        for line, shares in zip(panel.lines, wanted, strict=True):
            assert np.allclose(line.get_ydata(), shares, atol=1e-9, equal_nan=True)
            assert np.array_equal(np.round(line.get_xdata()), range(1, len(shares) + 1))
    assert left.get_ylim() == right.get_ylim() == (-0.02, 1.02)


def test_accept_length_bars_are_shares_of_steps(cells: list[CellSummary]) -> None:
    [panel] = drawn(figures.accept_length, "gsm8k", cells).axes
    for bars, cell in zip(panel.containers, cells[1:], strict=True):
        heights = [bar.get_height() for bar in bars]
        assert sum(heights) == pytest.approx(1)
        tokens = np.round([bar.get_x() + bar.get_width() / 2 for bar in bars])
        assert np.dot(tokens, heights) == pytest.approx(cell.accept_len)


@pytest.mark.parametrize(
    ("draw", "seconds", "name"),
    [(figures.latency, latency_s, "latency"), (figures.ttft, ttft_s, "ttft")],
)
def test_the_tables_percentiles_lie_on_the_distribution(
    cells: list[CellSummary],
    records: dict[str, list[RequestRecord]],
    draw: Callable[..., Figure],
    seconds: Callable[[RequestRecord], float],
    name: str,
) -> None:
    figure = drawn(draw, "gsm8k", cells, records)
    [panel] = figure.axes
    curves = [line for line in panel.lines if len(line.get_xdata()) > 2]
    for curve, cell, label in zip(curves, cells, labels(figure), strict=True):
        stats = distribution_ms(name, map(seconds, records[cell.run]))
        p50, p95 = stats[f"{name}_ms_p50"], stats[f"{name}_ms_p95"]
        assert np.interp([p50, p95], curve.get_xdata(), curve.get_ydata()) == pytest.approx(
            [0.5, 0.95]
        )
        assert label == f"{cell.run}: {p50:,.0f} / {p95:,.0f}"
    assert panel.get_xlim()[0] == 0


def test_a_long_distribution_is_drawn_with_few_points(cells: list[CellSummary]) -> None:
    many = {cells[0].run: simulate("gsm8k", "baseline", 0, requests=1000, tokens=2)}
    [panel] = drawn(figures.latency, "gsm8k", cells[:1], many).axes
    assert max(len(line.get_xdata()) for line in panel.lines) == figures.LEVELS


def test_tokens_over_time_by_hand(records: dict[str, list[RequestRecord]]) -> None:
    """Window 0 begins at 7 s and takes 3 s; window 1, at 90 s, and shard 2 follow it at once."""
    one = replace(
        records["baseline"][0],
        window=0,
        t_submit=7.0,
        t_first=8.0,
        t_last=10.0,
        step_t=[9.0, 10.0],
        step_emitted=[3, 2],
    )
    later = replace(one, window=1, t_submit=90.0, t_first=91.0, t_last=92.0, step_t=[92.0])
    later.step_emitted = [4]
    other = replace(later, shard=2, window=0)
    moments, tokens, length = figures.tokens_over_time([later, other, one])
    assert length == 3 + 2 + 2
    assert sorted(zip(moments, tokens, strict=True)) == [
        (1, 1),
        (2, 3),
        (3, 2),
        (4, 1),
        (5, 4),
        (6, 1),
        (7, 4),
    ]


def test_throughput_adds_up_to_all_tokens(
    cells: list[CellSummary], records: dict[str, list[RequestRecord]]
) -> None:
    for run, mine in records.items():
        edges, rates = figures.rate_over_time(mine)
        assert np.dot(rates, np.diff(edges)) == pytest.approx(sum(r.output_tokens for r in mine))
        assert edges[-1] == pytest.approx(sum(r.output_tokens for r in mine) / output_tok_s(mine))
        assert len(rates) > 1, run
    panels = drawn(figures.throughput, "gsm8k", cells, records).axes
    assert [panel.get_title(loc="left") for panel in panels] == [
        "baseline: 100.00 tok/s in all",
        "dspark_k3: 125.00 tok/s in all",
        "dspark_k7: 110.00 tok/s in all",
    ]
    for panel, mine in zip(panels, records.values(), strict=True):
        assert panel.get_ylim()[0] == 0
        assert panel.get_ylim()[1] >= max(figures.rate_over_time(mine)[1])


def test_speedup_by_concurrency_joins_the_points_of_an_arm(cells: list[CellSummary]) -> None:
    swept = [
        replace(cell, dataset=dataset, concurrency=concurrency, speedup=cell.speedup / concurrency)
        for dataset in ("a", "b", "c", "d")
        for concurrency in (16, 1, 4)
        for cell in cells
    ]
    figure = drawn(figures.speedup_by_concurrency, swept)
    panels = [panel for panel in figure.axes if panel.get_title(loc="left")]
    assert [panel.get_title(loc="left") for panel in panels] == ["a", "b", "c", "d"]
    for panel in panels:
        for container, speedup in zip(panel.containers, (1.25, 1.1), strict=True):
            line = container.lines[0]
            assert np.allclose(line.get_xdata(), [1, 4, 16], rtol=0.1)
            assert np.allclose(line.get_ydata(), [speedup, speedup / 4, speedup / 16])
    assert labels(figure) == ["dspark_k3", "dspark_k7"]


# ---------------------------------------------------------------------------- how it reads


def every_kind(
    name: str, cells: list[CellSummary], records: dict[str, list[RequestRecord]]
) -> dict[str, tuple[Any, ...]]:
    return {
        "speedup": ({name: cells, "other": cells}, {("other", cells[-1].run)}),
        "acceptance": (name, cells),
        "accept_length": (name, cells),
        "latency": (name, cells, records),
        "ttft": (name, cells, records),
        "throughput": (name, cells, records),
        "speedup_by_concurrency": ([replace(c, concurrency=n) for n in (1, 8) for c in cells],),
    }


KINDS = [
    "speedup",
    "acceptance",
    "accept_length",
    "latency",
    "ttft",
    "throughput",
    "speedup_by_concurrency",
]


@pytest.mark.parametrize("size", ["usual", "long names", "many runs"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_overlaps_or_leaves_the_figure(
    cells: list[CellSummary], records: dict[str, list[RequestRecord]], kind: str, size: str
) -> None:
    name = "gsm8k"
    if size == "long names":
        name = f"gsm8k{LONG}"
        settings = {**MEASURED, "target": f"someone/target{LONG}", "device": f"card{LONG}"}
        cells = [replace(cell, run=longer(cell.run), settings=settings) for cell in cells]
        records = {longer(run): mine for run, mine in records.items()}
    if size == "many runs":
        more = [replace(cells[2], run=f"dspark_{number}") for number in range(9)]
        cells = [*cells, *more]
        records = records | {cell.run: records["dspark_k7"] for cell in more}
    figure = drawn(getattr(figures, kind), *every_kind(name, cells, records)[kind])
    boxes = {text: text.get_window_extent() for text in shown(figure)}
    for text, box in boxes.items():
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 + 1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 + 1, text
    for (one, box), (other, next_box) in combinations(boxes.items(), 2):
        assert not overlap(box, next_box), (one, other)
    if figure.legends:
        legend = figure.legends[0].get_window_extent()
        assert all(legend.y0 >= panel.get_window_extent().y1 for panel in figure.axes)


def longer(run: str) -> str:
    return run if run == "baseline" else run + LONG


def shown(figure: Figure) -> list[Any]:
    """All texts that are drawn: an axis keeps labels beyond its limits, too, which are not."""
    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    ticks = [tick for axis in axes for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]]
    unsure = {label for tick in ticks for label in (tick.label1, tick.label2)}
    texts = [text for text in figure.findobj(matplotlib.text.Text) if text not in unsure]
    for axis in axes:
        low, high = sorted(axis.get_view_interval())
        texts += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def overlap(one: Any, other: Any) -> bool:
    slack = 1.0  # pixels
    return bool(
        one.x0 + slack < other.x1
        and other.x0 + slack < one.x1
        and one.y0 + slack < other.y1
        and other.y0 + slack < one.y1
    )


def test_an_arm_without_a_complete_step_is_left_out(cells: list[CellSummary]) -> None:
    cells[1] = replace(cells[1], accept_p=[], accept_histogram=[0] * 4, accept_len=None)
    for panel in drawn(figures.acceptance, "gsm8k", cells).axes:
        assert [len(line.get_ydata()) for line in panel.lines] == [0, 7]
    assert labels(drawn(figures.accept_length, "gsm8k", cells)) == ["dspark_k7: 1.990"]


def test_shares_of_too_few_steps_are_not_drawn_and_the_panel_says_so(
    cells: list[CellSummary],
) -> None:
    few = [replace(cell, complete_steps=figures.FEWEST_STEPS - 1) for cell in cells]
    left, right = drawn(figures.acceptance, "gsm8k", few).axes
    assert [text.get_text() for text in left.texts] == []
    assert [text.get_text() for text in right.texts] == ["fewer than 20 steps"]


@pytest.mark.parametrize("kind", ["speedup", "acceptance", "accept_length"])
def test_an_experiment_without_arms_says_so(cells: list[CellSummary], kind: str) -> None:
    figure = drawn(getattr(figures, kind), *every_kind("gsm8k", cells[:1], {})[kind])
    assert any(text.get_text().startswith("no ") for text in figure.findobj(matplotlib.text.Text))


def test_one_request_alone_can_be_drawn(
    cells: list[CellSummary], records: dict[str, list[RequestRecord]]
) -> None:
    one = {run: mine[:1] for run, mine in records.items()}
    for draw in (figures.latency, figures.ttft, figures.throughput):
        assert drawn(draw, "gsm8k", cells, one).axes


def test_what_the_numbers_hold_for_stands_at_the_foot(cells: list[CellSummary]) -> None:
    figure = drawn(figures.acceptance, "gsm8k", cells)
    foot = "cpu, float32, concurrency 4, target tiny, drafter tiny-dspark"
    assert figure.get_supxlabel() == foot
    swept = drawn(
        figures.speedup_by_concurrency, [replace(c, concurrency=n) for n in (1, 8) for c in cells]
    )
    assert swept.get_supxlabel() == foot.replace(", concurrency 4", "")
