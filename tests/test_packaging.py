"""What a stranger's machine needs to set the project up, kept consistent."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lock() -> list[Requirement]:
    return [Requirement(line) for line in (ROOT / "requirements.lock").read_text().splitlines()]


def locked() -> dict[str, str]:
    pins = {canonicalize_name(line.name): next(iter(line.specifier)) for line in lock()}
    return {name: pin.version for name, pin in pins.items()}


def test_environment_yml_asks_for_what_pyproject_asks_for() -> None:
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(item["pip"] for item in dependencies if isinstance(item, dict))
    assert pip == PROJECT["dependencies"]


def test_lock_pins_every_requirement_within_its_range() -> None:
    pins = locked()
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    for requirement in map(Requirement, wanted):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier


def test_torch_is_the_pinned_release() -> None:
    assert locked()["torch"] == "2.13.0"


def test_every_lock_line_is_an_exact_pin() -> None:
    for line in lock():
        assert re.fullmatch(r"==[A-Za-z0-9.]+", str(line.specifier)), line
        assert line.url is None


def test_no_large_file_is_committed() -> None:
    """The drafter's weights are the largest: at most 24 MB."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    sizes = {name: (ROOT / name).stat().st_size for name in done.stdout.splitlines()}
    assert {name: size for name, size in sizes.items() if size > 24_000_000} == {}


def test_wheel_carries_the_package_data(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    source = tmp_path / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert "dspark/assets/prompts/gsm8k.jsonl" in names
    assert "dspark/assets/train/openers.txt" in names
    assert "dspark/assets/drafters/smollm2_135m/model.safetensors" in names
