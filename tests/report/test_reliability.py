"""The reliability plot: two images that hold what they should, the same for the same numbers."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import pytest

from dspark.errors import UserError
from dspark.models.calibration import Calibration, Curve
from dspark.report.reliability import plot_reliability

SVG = "{http://www.w3.org/2000/svg}"


def measured(positions: int) -> Calibration:
    return Calibration(
        temperatures=[1.5 + t / 4 for t in range(positions)],
        ece_before=[0.123] * positions,
        ece_after=[0.017] * positions,
        blocks=1000,
        curves_before=[Curve([0.12, 0.5, 0.93], [0.2, 0.4, 0.7], [5, 395, 600])] * positions,
        curves_after=[Curve([0.31, 0.7], [0.3, 0.72], [500, 500])] * positions,
    )


def texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize("positions", [1, 5])
def test_both_images_are_whole_and_say_what_they_show(tmp_path: Path, positions: int) -> None:
    plot_reliability(measured(positions), tmp_path / "deep" / "reliability.png")
    folder = tmp_path / "deep"
    assert sorted(file.name for file in folder.iterdir()) == ["reliability.png", "reliability.svg"]
    width, height = png_size(folder / "reliability.png")
    assert width > 400 and height > 400
    said = texts(folder / "reliability.svg")
    for text in (
        "Confidence that the draft survives this far",
        "Observed share that did",
        "before calibration",
        "after calibration",
        "marker area: share of blocks",
    ):
        assert said.count(text) == 1
    titles = [text for text in said if text.startswith("Position")]
    assert titles == [f"Position {t + 1}: T = {1.5 + t / 4:.2f}" for t in range(positions)]
    assert sum(text.startswith("ECE 12.3%") for text in said) == positions


def test_a_larger_bin_has_a_larger_marker(tmp_path: Path) -> None:
    calibration = measured(1)
    calibration.curves_after = [Curve([0.31, 0.7], [0.3, 0.72], [50, 950])]
    plot_reliability(calibration, tmp_path / "plot.png")
    groups = ElementTree.parse(tmp_path / "plot.svg").getroot().iter(f"{SVG}g")
    [after] = [group for group in groups if group.get("id") == "PathCollection_2"]
    small, large = (widest(path.get("d", "")) for path in after.iter(f"{SVG}path"))
    assert 2 * small < large


def widest(outline: str) -> float:
    """Width of a marker's outline, `M x y L x y ...`."""
    x = [float(word) for word in outline.replace("z", "").split() if word not in "ML"][::2]
    return max(x) - min(x)


def test_the_same_numbers_give_the_same_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        plot_reliability(measured(2), tmp_path / f"{name}.png")
    for kind in ("png", "svg"):
        one, two = (tmp_path / f"{name}.{kind}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_no_setting_is_left_behind(tmp_path: Path) -> None:
    # Asking for the backend would choose one.
    names = [name for name in matplotlib.rcParams if name != "backend"]
    before = {name: matplotlib.rcParams[name] for name in names}
    plot_reliability(measured(2), tmp_path / "plot.png")
    assert {name: matplotlib.rcParams[name] for name in names} == before


def test_temperatures_alone_cannot_be_plotted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no reliability curves: calibrate the drafter again"):
        plot_reliability(Calibration(temperatures=[1.0, 1.0]), tmp_path / "plot.png")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write '.*plot\.png'"):
        plot_reliability(measured(1), tmp_path / "file" / "plot.png")
