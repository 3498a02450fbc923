"""The training text holds no prompt that the drafter is measured on."""

from __future__ import annotations

import gzip
import json
from importlib.resources import files
from pathlib import Path

import pytest

from dspark.data.builtin import builtin_names, builtin_prompts
from dspark.train.synthesize import normalise, openers

SHARED = Path(__file__).parents[2].parent / "shared" / "datasets"
# Words in a row; eight are still how any task begins ("Write a function that takes a string and").
PHRASE = 9
RUN = 13  # words in a row that two prompts do not share by chance
SHIPPED = files("dspark") / "assets" / "drafters" / "smollm2_135m" / "training_prompts.jsonl.gz"


def runs(text: str, length: int) -> set[str]:
    """Every run of `length` words of a normalised text."""
    words = text.split()
    return {" ".join(words[i : i + length]) for i in range(len(words) - length + 1)}


@pytest.fixture(scope="module")
def builtin() -> list[str]:
    prompts = [prompt for name in builtin_names() for prompt in builtin_prompts(name)]
    return [normalise(turn) for prompt in prompts for turn in prompt.turns]


@pytest.fixture(scope="module")
def published() -> list[str]:
    """The turns of the published sets; they are third-party data and not in the repo."""
    if not SHARED.is_dir():
        pytest.skip(f"the published prompt sets are not at {SHARED}")
    lines = [
        line for file in SHARED.glob("*.jsonl") for line in file.read_text("utf-8").splitlines()
    ]
    turns = [normalise(turn) for line in lines for turn in json.loads(line)["turns"]]
    assert len(turns) > 1000
    return turns


def check_openers(prompts: list[str]) -> None:
    whole, phrases = set(prompts), {run for text in prompts for run in runs(text, PHRASE)}
    for begin, end in openers():
        line = normalise(f"{begin} {end}")
        for text in {line, normalise(begin), normalise(end)}:
            assert text not in whole, text
            assert not runs(text, PHRASE) & phrases, text
        inside = [text for text in whole if len(text.split()) >= 5 and f" {text} " in f" {line} "]
        assert inside == [], line


def test_openers_copy_no_built_in_prompt(builtin: list[str]) -> None:
    check_openers(builtin)


def test_openers_copy_no_published_prompt(published: list[str]) -> None:
    check_openers(published)


@pytest.fixture(scope="module")
def trained_on() -> dict[str, str]:
    """The normalised prompts of the drafter that ships with the project, by id."""
    if not SHIPPED.is_file():
        pytest.skip("no list of training prompts is shipped")
    lines = gzip.decompress(SHIPPED.read_bytes()).decode("utf-8").splitlines()
    items = [json.loads(line) for line in lines]
    prompts = {item["id"]: normalise(item["user"]) for item in items}
    assert len(prompts) == len(items) > 100
    return prompts


def check_prompts(trained_on: dict[str, str], prompts: list[str]) -> None:
    whole, published = set(prompts), {run for text in prompts for run in runs(text, RUN)}
    equal = [name for name, text in trained_on.items() if text in whole]
    assert equal == []
    shared = {name: runs(text, RUN) & published for name, text in trained_on.items()}
    assert {name: found for name, found in shared.items() if found} == {}


def test_the_shipped_drafter_saw_no_built_in_prompt(
    trained_on: dict[str, str], builtin: list[str]
) -> None:
    check_prompts(trained_on, builtin)


def test_the_shipped_drafter_saw_no_published_prompt(
    trained_on: dict[str, str], published: list[str]
) -> None:
    check_prompts(trained_on, published)
