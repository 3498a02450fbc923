"""Colours of the cells' curves."""

from __future__ import annotations

from matplotlib.colors import to_hex

from dspark.report.style import looks_of
from dspark.tracking.pages import colors_of

RUNS = ["baseline", "dspark_k3", "dspark_k7", "dspark_sched"]


def test_the_first_dataset_has_the_colours_of_the_plots() -> None:
    looks = looks_of(RUNS)
    colors = colors_of([("gsm8k", run) for run in RUNS])
    assert colors == [to_hex(looks[run].color) for run in RUNS]


def test_all_cells_of_a_table_have_different_colours() -> None:
    cells = [(f"dataset{number}", run) for number in range(6) for run in RUNS]
    assert len(set(colors_of(cells))) == len(cells)
    assert "#ffffff" not in colors_of(cells)
