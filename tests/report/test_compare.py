"""Two experiments side by side: differences and intervals by hand, and what may not be compared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from measured import write_results

from dspark.errors import UserError
from dspark.metrics.cell import read_summary, write_summary
from dspark.metrics.rows import TableRow
from dspark.report.compare import (
    Measured,
    Side,
    published_side,
    ratio_interval,
    read_side,
    render_comparison,
)
from dspark.report.table import parse_table


def rows_of(text: str, title: str) -> dict[tuple[str, str], list[str]]:
    """The cells of the table that has a column `title`, by dataset and run."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and title in line)
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        dataset, run, *cells = line.strip("| ").split(" | ")
        found[dataset, run] = cells
    return found


def change(path: Path, **settings: Any) -> None:
    cell = read_summary(path)
    cell.settings |= settings
    write_summary(path, cell)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[list[Path], list[Path]]:
    return write_results(tmp_path / "one"), write_results(tmp_path / "two")


def compared(first: list[Path], second: list[Path]) -> str:
    return render_comparison(read_side("one", first), read_side("two", second))


def test_the_same_results_do_not_differ(pair: tuple[list[Path], list[Path]]) -> None:
    text = compared(*pair)
    assert "- both state the same conditions" in text
    assert "both ran on cpu." in text and "only in" not in text
    cells = [*rows_of(text, "Speedup").values(), *rows_of(text, "TTFT mean ms").values()]
    for cell in (cell for row in cells for cell in row if cell != "—"):
        assert "(+0.0 %" in cell or "(+0.00 points)" in cell, cell
    assert ("gsm8k", "baseline") not in rows_of(text, "Speedup")  # 1 by definition
    assert ("gsm8k", "baseline") in rows_of(text, "Output tok/s")


def side(name: str, interval: tuple[float, float] | None, **values: float | None) -> Side:
    measured = Measured(values, {"device": "cpu"}, interval)
    return Side(name, {("gsm8k", "dspark_k3"): measured})


def test_differences_by_hand() -> None:
    one = side("one", (0.9, 1.1), speedup=1.0, accept_rate=0.2, accept_len=1.5, output_tok_s=40.0)
    two = side("two", (1.0, 1.5), speedup=1.2, accept_rate=0.25, accept_len=1.2, output_tok_s=50.0)
    text = render_comparison(one, two)
    low, high = (100 * (end - 1) for end in ratio_interval(1.0, (0.9, 1.1), 1.2, (1.0, 1.5)))
    assert rows_of(text, "Speedup")["gsm8k", "dspark_k3"] == [
        f"1.000x → 1.200x (+20.0 %, 95 % interval {low:+.1f} % to {high:+.1f} %)",
        "20.00% → 25.00% (+5.00 points)",
        "1.500 → 1.200 (-20.0 %)",
    ]
    assert rows_of(text, "Output tok/s")["gsm8k", "dspark_k3"] == [
        "40.00 → 50.00 (+25.0 %)",
        *["—"] * 3,  # no side has them
    ]


def test_what_one_side_lacks_has_no_difference() -> None:
    one = side("one", None, speedup=1.0, accept_rate=None, accept_len=0.0)
    two = side("two", (1.0, 1.5), speedup=1.2, accept_rate=0.25, accept_len=1.2)
    assert rows_of(render_comparison(one, two), "Speedup")["gsm8k", "dspark_k3"] == [
        "1.000x → 1.200x (+20.0 %)",
        "— → 25.00%",
        "0.000 → 1.200",
    ]


def test_an_interval_of_a_ratio_covers_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    spread_one, spread_two, true = 0.05, 0.08, math.log(1.3)
    inside = 0
    for _ in range(2000):
        one = generator.normal(0, spread_one)
        two = generator.normal(true, spread_two)
        around = [
            (math.exp(value - 1.96 * spread), math.exp(value + 1.96 * spread))
            for value, spread in ((one, spread_one), (two, spread_two))
        ]
        low, high = ratio_interval(math.exp(one), around[0], math.exp(two), around[1])
        inside += low <= 1.3 <= high
    assert 0.935 < inside / 2000 < 0.965


def test_a_certain_side_adds_nothing_to_the_interval() -> None:
    low, high = ratio_interval(1.0, (1.0, 1.0), 1.5, (1.2, 2.0))
    assert (low, high) == pytest.approx((1.2, 2.0))


def test_cells_that_one_side_lacks_are_named(tmp_path: Path) -> None:
    one = write_results(tmp_path / "one", ["gsm8k", "mbpp"], ks=(0, 3))
    two = write_results(tmp_path / "two", ["gsm8k"], ks=(0, 3, 7))
    text = compared(one, two)
    assert "- only in one: mbpp/baseline, mbpp/dspark_k3\n- only in two: gsm8k/dspark_k7\n" in text
    assert set(rows_of(text, "Output tok/s")) == {("gsm8k", "baseline"), ("gsm8k", "dspark_k3")}


def test_nothing_in_common_is_refused(tmp_path: Path) -> None:
    one = write_results(tmp_path / "one", ["gsm8k"], ks=(0,))
    two = write_results(tmp_path / "two", ["mbpp"], ks=(0,))
    with pytest.raises(UserError) as caught:
        compared(one, two)
    assert str(caught.value) == (
        "one and two have no dataset and run in common: one has gsm8k/baseline; two has mbpp/baseline"
    )


def test_other_conditions_and_machines_are_told(pair: tuple[list[Path], list[Path]]) -> None:
    for path in pair[1]:
        change(path, device="NVIDIA H200")
    for path in pair[1][3:]:
        change(path, max_new_tokens=64)
    text = compared(*pair)
    assert '- device "cpu" against "NVIDIA H200"\n' in text
    assert (
        "- max_new_tokens 128 against 64 (mt_bench/baseline, mt_bench/dspark_k3, "
        "mt_bench/dspark_k7)\n"
    ) in text
    assert (
        "Comparable on one machine only, tok/s and ms: one ran on cpu, two on NVIDIA H200. Read no "
        "difference of software out of this table."
    ) in text
    portable, local = text.index("Comparable across machines"), text.index("on one machine only")
    assert portable < text.index("Accept len") < local < text.index("TTFT mean ms")


def test_an_unpaired_speedup_is_not_compared(pair: tuple[list[Path], list[Path]]) -> None:
    change(pair[1][1], device="NVIDIA H200")
    text = compared(*pair)
    speedup, _, length = rows_of(text, "Speedup")["gsm8k", "dspark_k3"]
    assert speedup == f"{read_summary(pair[0][1]).speedup:.3f}x → —"
    assert "(+0.0 %)" in length


def test_points_of_sweeps_are_compared_with_their_like(tmp_path: Path) -> None:
    def sweep(name: str, values: tuple[str, ...]) -> list[Path]:
        points = [tmp_path / name / f"sampling.temperature={value}" for value in values]
        return [path for point in points for path in write_results(point, ["gsm8k"], ks=(0, 3))]

    text = compared(sweep("one", ("0.0", "0.5")), sweep("two", ("0.5", "1.0")))
    assert set(rows_of(text, "Accept len")) == {("gsm8k (sampling.temperature=0.5)", "dspark_k3")}
    assert "only in two: gsm8k (sampling.temperature=1.0)/baseline" in text
    one_point = sorted((tmp_path / "one" / "sampling.temperature=0.5").glob("*/*/summary.json"))
    alone = write_results(tmp_path / "alone", ["gsm8k"], ks=(0, 3))
    assert ("gsm8k", "dspark_k3") in rows_of(compared(one_point, alone), "Accept len")


# ---------------------------------------------------------------------------- the published table


def test_the_shipped_figures_are_the_published_table(published_text: str) -> None:
    rows = {(row.dataset, row.run): row for row in parse_table(published_text)}
    shipped = published_side().cells
    assert list(shipped) == list(rows)
    for key, cell in shipped.items():
        row = rows[key]
        for name in TableRow.__dataclass_fields__:
            if name in ("dataset", "run", "k", "fixed_k", "accept_p"):
                continue
            if (name, key[1]) == ("speedup", "baseline"):
                continue
            value = getattr(row, name)
            assert cell.values[name] == (None if value is None else pytest.approx(value)), name
        shares = [cell.values[f"accept_p{place}"] for place in (1, 2, 3)]
        assert shares == [None if p is None else pytest.approx(p) for p in row.accept_p]


def test_an_experiment_beside_the_published_table(tmp_path: Path) -> None:
    paths = write_results(tmp_path / "one", ["gsm8k"], ks=(0, 3))
    text = render_comparison(read_side("results/one", paths), published_side())
    assert text.startswith("results/one → the published table (difference)\n")
    [speedup, rate, length] = rows_of(text, "Speedup")["gsm8k", "dspark_k3"]
    assert "→ 1.092x (" in speedup and "interval" not in speedup
    assert "→ 27.04% (" in rate and "→ 1.811 (" in length
    assert "- requests 6 against 1319" in text
    assert '- target "tiny" against "T5Gemma 2 1B-1B"' in text
    assert "the published table on a device that it does not state" in text
    assert "only in the published table: math500/baseline" in text
