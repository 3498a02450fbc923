"""Text of configs, prompts and file names goes through the real rules and never reaches a shell."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from checkout import Checkout, copy_checkout

from dspark.config import (
    JobConfig,
    ModelsConfig,
    compose_experiment,
    from_yaml,
    job_config,
    models_config,
)
from dspark.data.prompts import read_prompts

NASTY = [
    "$(touch evil)",
    "`touch evil`",
    "'; touch evil; '",
    '"; touch evil; "',
    "x\n&& touch evil",
]
NASTY += ["| touch evil", "{output} {{x}}", "\\", "é ü"]


@pytest.fixture
def odd(tmp_path: Path, tiny_pair: Path) -> Checkout:
    """A checkout whose own path is no better."""
    return copy_checkout(tmp_path / "a b;$(touch evil)'", tiny_pair)


def overrides(checkout: Checkout) -> list[str]:
    """A prompt file, a model path and stop strings that mean something to a shell."""
    name = "own $(touch evil);`touch evil`.jsonl"
    rows = [{"id": text, "turns": [text]} for text in NASTY]
    (checkout.path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    stop = [text for text in NASTY if "\n" not in text and not text.endswith("\\")]
    return [
        f"datasets.gsm8k={{source:file,path:{json.dumps(name)},limit:{len(NASTY)}}}",
        f"sampling.stop={json.dumps([*stop, 'two lines'], ensure_ascii=False)}".replace(
            "two ", "two\n"
        ),
        f"target.path={json.dumps('/models/$(touch evil)')}",
    ]


def evil(checkout: Checkout) -> list[Path]:
    return [path for path in checkout.path.parent.rglob("evil*") if path.is_file()]


def test_nasty_text_arrives_as_it_is_and_runs_nothing(odd: Checkout) -> None:
    given = overrides(odd)
    wanted = ["results/tiny/gsm8k/prompts.jsonl", "results/tiny/models/config.yaml"]
    odd.snakemake(*wanted, "--config", "experiment=tiny", f"overrides={json.dumps(given)}")
    composed = compose_experiment("tiny", given, odd.path / "config")
    results = odd.results
    assert from_yaml(JobConfig, results / "gsm8k" / "config.yaml") == job_config(composed, "gsm8k")
    assert from_yaml(ModelsConfig, results / "models" / "config.yaml") == models_config(composed)
    assert [prompt.turns for prompt in read_prompts(results / "gsm8k" / "prompts.jsonl")] == [
        [text] for text in NASTY
    ]
    assert evil(odd) == []


def test_dspark_run_hands_it_on_as_it_is(odd: Checkout) -> None:
    """Or it would plan to write other configs."""
    given = overrides(odd)
    odd.snakemake(
        *("results/tiny/gsm8k/config.yaml", "results/tiny/models/config.yaml"),
        *("--config", "experiment=tiny", f"overrides={json.dumps(given)}"),
    )
    done = odd.dspark("run", "tiny", *given, "--cores", "1", "--dry-run")
    planned = done.stdout + done.stderr
    assert done.returncode == 0, planned
    assert re.search(r"^job_config +1$", planned, re.M)  # of the other dataset
    assert re.search(r"^bench +2$", planned, re.M) and "models_config" not in planned
    assert evil(odd) == []
