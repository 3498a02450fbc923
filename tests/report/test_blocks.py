"""A report's blocks, and the reports of a sweep put together."""

from __future__ import annotations

from dspark.report.blocks import blocks_of, cells_of, is_grid, swept

ONE = """\
| Dataset | Run |
| --- | --- |
| a | x |
| a | y |

- all the same
- of one

| Dataset | p4 |
| --- | --- |
| a | — |
"""
TWO = ONE.replace("| a | x |", "| a | z |").replace("of one", "of two")


def test_blocks_are_tables_and_lists() -> None:
    blocks = blocks_of(ONE)
    assert [is_grid(block) for block in blocks] == [True, False, True]
    assert cells_of(blocks[0][0]) == ["Dataset", "Run"]
    assert blocks[1] == ["- all the same", "- of one"]


def test_a_sweeps_tables_get_a_column_for_each_option() -> None:
    points = {(("k", "1"), ("t", "0.5")): ONE, (("k", "2"), ("t", "0.5")): TWO}
    assert (
        swept(points)
        == """\
| k | t | Dataset | Run |
| --- | --- | --- | --- |
| 1 | 0.5 | a | x |
| 1 | 0.5 | a | y |
| 2 | 0.5 | a | z |
| 2 | 0.5 | a | y |

- all the same
- k=1,t=0.5: of one
- k=2,t=0.5: of two

| k | t | Dataset | p4 |
| --- | --- | --- | --- |
| 1 | 0.5 | a | — |
| 2 | 0.5 | a | — |
"""
    )


def test_a_line_of_some_points_names_them() -> None:
    points = {(("k", str(k)),): TWO if k == 2 else ONE for k in (1, 2, 3)}
    assert "- k=1 and k=3: of one\n- k=2: of two\n" in swept(points)
