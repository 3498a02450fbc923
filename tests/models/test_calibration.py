"""The calibration file beside a checkpoint, and applying its temperatures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.errors import UserError
from dspark.models.calibration import (
    Calibration,
    Curve,
    apply_temperatures,
    read_calibration,
    write_calibration,
)

MEASURED = Calibration(
    temperatures=[0.5, 1.75],
    ece_before=[0.057, 0.082],
    ece_after=[0.02, 0.017],
    blocks=40,
    curves_before=[Curve([0.2, 0.9], [0.1, 0.8], [10, 30]), Curve([0.5], [0.25], [40])],
    curves_after=[Curve([0.1], [0.1], [40]), Curve([0.25, 1.0], [0.3, 1.0], [39, 1])],
)


def put(folder: Path, value: Any) -> Path:
    text = value if isinstance(value, str) else json.dumps(value)
    (folder / "calibration.json").write_text(text)
    return folder


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_calibration(tmp_path / "drafter", MEASURED)
    assert read_calibration(tmp_path / "drafter", 2) == MEASURED
    assert read_calibration(tmp_path / "drafter") == MEASURED
    assert [file.name for file in (tmp_path / "drafter").iterdir()] == ["calibration.json"]


def test_a_checkpoint_without_the_file_has_no_calibration(tmp_path: Path) -> None:
    assert read_calibration(tmp_path) is None
    assert read_calibration(tmp_path / "absent", 7) is None


def test_temperatures_alone_are_enough(tmp_path: Path) -> None:
    put(tmp_path, {"temperatures": [1, 2.5, 0.75], "someone": {"elses": "key"}})
    assert read_calibration(tmp_path, 3) == Calibration(temperatures=[1.0, 2.5, 0.75])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"temperatures": [1.0', "cannot be read"),
        ("[1.0, 1.0]", "is not a JSON object"),
        ("{}", "holds no list of temperatures"),
        ('{"temperatures": []}', "holds no list of temperatures"),
        ('{"temperatures": 1.0}', "holds no list of temperatures"),
        ('{"temperatures": [1.0]}', "holds 1 temperatures and the drafter's block_size is 2"),
        ('{"temperatures": [1.0, 0]}', "gives 0 as temperature 2, which is no positive number"),
        ('{"temperatures": [-2.0, 1.0]}', "gives -2.0 as temperature 1"),
        ('{"temperatures": [NaN, 1.0]}', "gives nan as temperature 1"),
        ('{"temperatures": [1.0, Infinity]}', "gives inf as temperature 2"),
        ('{"temperatures": [1.0, 1' + 400 * "0" + "]}", "as temperature 2"),
        ('{"temperatures": [true, 1.0]}', "gives True as temperature 1"),
        ('{"temperatures": ["1", 1.0]}', "gives '1' as temperature 1"),
        ('{"temperatures": [1, 1], "blocks": -1}', "gives -1 as its number of blocks"),
        ('{"temperatures": [1, 1], "blocks": 2.5}', "gives 2.5 as its number of blocks"),
        ('{"temperatures": [1, 1], "ece_before": [0.1]}', "no list of 2 entries in 'ece_before'"),
        ('{"temperatures": [1, 1], "ece_after": 0.1}', "no list of 2 entries in 'ece_after'"),
        ('{"temperatures": [1, 1], "ece_after": [0.1, 1.5]}', "a value in 'ece_after'"),
        ('{"temperatures": [1, 1], "ece_after": [0.1, null]}', "a value in 'ece_after'"),
        ('{"temperatures": [1, 1], "curves_after": [{}, {}]}', "malformed curve in 'curves_after'"),
        ('{"temperatures": [1, 1], "curves_after": [1, 2]}', "malformed curve in 'curves_after'"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        read_calibration(put(tmp_path, content), 2)
    message = str(caught.value)
    assert says in message and "\n" not in message
    assert (
        str(tmp_path / "calibration.json") in message and "calibrate the drafter again" in message
    )


@pytest.mark.parametrize(
    "curve",
    [
        {"confidence": [0.5], "observed": [0.5], "count": [0]},
        {"confidence": [0.5], "observed": [0.5], "count": [1.5]},
        {"confidence": [0.5], "observed": [1.5], "count": [1]},
        {"confidence": [None], "observed": [0.5], "count": [1]},
        {"confidence": [0.5, 0.6], "observed": [0.5], "count": [1]},
        {"confidence": [], "observed": [], "count": []},
        {"confidence": 0.5, "observed": 0.5, "count": 1},
    ],
    ids=["no_block", "half_a_block", "share", "null", "lengths", "empty", "no_list"],
)
def test_a_malformed_curve_is_refused(tmp_path: Path, curve: dict[str, Any]) -> None:
    put(tmp_path, {"temperatures": [1.0], "curves_before": [curve]})
    with pytest.raises(UserError, match="malformed curve in 'curves_before'"):
        read_calibration(tmp_path)


def test_each_position_is_divided_by_its_own_temperature() -> None:
    logits = torch.tensor([[[1.0, 2.0], [3.0, -4.0]]])
    scaled = apply_temperatures(logits, [0.5, 4.0, 100.0])
    assert torch.equal(scaled, torch.tensor([[[2.0, 0.5], [6.0, -1.0]]]))
    assert scaled.dtype == torch.float32


def test_a_drafter_without_confidence_head_still_trusts_every_token() -> None:
    assert apply_temperatures(torch.full((2, 3), float("inf")), [0.5, 1.0, 8.0]).isposinf().all()


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=8))
def test_temperatures_of_one_change_no_bit(values: list[float]) -> None:
    logits = torch.tensor(values)
    assert torch.equal(apply_temperatures(logits, [1.0] * 8), logits)
