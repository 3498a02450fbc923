"""The course of a training: lines that survive a kill and are never there twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.train.curve import Curve, read_curve


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "curve.jsonl"


def written(file: Path, steps: int) -> Curve:
    curve = Curve(file, 0)
    for step in range(1, steps + 1):
        curve.add(step, ce=1 / step, lr=0.1)
        if step % 2 == 0:
            curve.add(step, accept_len_k3=1.5)
    return curve


def steps_of(file: Path) -> list[float]:
    return [line["step"] for line in read_curve(file)]


def test_lines_come_back_as_they_were_added(file: Path) -> None:
    written(file, 3)
    assert read_curve(file) == [
        {"step": 1, "ce": 1.0, "lr": 0.1},
        {"step": 2, "ce": 0.5, "lr": 0.1},
        {"step": 2, "accept_len_k3": 1.5},
        {"step": 3, "ce": 1 / 3, "lr": 0.1},
    ]


def test_a_line_is_on_disk_as_soon_as_it_is_added(file: Path) -> None:
    curve = Curve(file, 0)
    for step in range(1, 4):
        curve.add(step, ce=0.5)
        assert steps_of(file) == list(range(1, step + 1))


def test_no_file_is_no_line(file: Path) -> None:
    assert read_curve(file) == []


def test_what_will_be_done_again_is_removed(file: Path) -> None:
    """Going on at step 2 keeps what belongs to it, its validation too."""
    written(file, 5)
    curve = Curve(file, 2)
    assert steps_of(file) == [1, 2, 2]
    curve.add(3, ce=0.25)
    assert steps_of(file) == [1, 2, 2, 3]


def test_a_new_training_begins_with_an_empty_file(file: Path) -> None:
    written(file, 3)
    Curve(file, 0)
    assert file.read_text() == ""


def test_a_last_line_cut_short_is_left_out_and_not_built_upon(file: Path) -> None:
    written(file, 3)
    text = file.read_text()
    whole = text[: text[:-1].rfind("\n") + 1]
    for length in range(len(whole), len(text)):
        file.write_text(text[:length])
        assert steps_of(file) == [1, 2, 2]
        Curve(file, 3).add(4, ce=0.25)
        assert steps_of(file) == [1, 2, 2, 4]
