"""Sweeps: an experiment's points, each with its own config, and what cannot be swept."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.config import (
    compose_experiment,
    compose_points,
    digest,
    job_config,
    models_config,
    point_name,
    point_options,
    to_yaml,
)
from dspark.errors import UserError

CONFIG = Path(__file__).parents[1] / "config"


def points(*overrides: str, experiment: str = "demo"):
    return compose_points(experiment, overrides, CONFIG)


def test_an_experiment_without_a_sweep_is_one_point_without_a_name() -> None:
    [(name, config)] = points("engine.concurrency=2").items()
    assert name == ""
    assert config == compose_experiment("demo", ["engine.concurrency=2"], CONFIG)


def test_every_combination_is_a_point_with_its_own_config() -> None:
    found = points("+sweep={engine.concurrency:[1,4,16],runs.dspark_k3.k:[1,3]}")
    assert [(c.engine.concurrency, c.runs["dspark_k3"].k) for c in found.values()] == [
        (1, 1),
        (1, 3),
        (4, 1),
        (4, 3),
        (16, 1),
        (16, 3),
    ]
    assert list(found)[3] == "engine.concurrency=4,runs.dspark_k3.k=3"
    jobs = {digest(job_config(config, "gsm8k")) for config in found.values()}
    assert len(jobs) == len(found)
    assert len({to_yaml(models_config(config)) for config in found.values()}) == 1


def test_a_point_is_the_experiment_with_its_options_as_overrides() -> None:
    found = points("+sweep={engine.concurrency:[2],sampling.ignore_eos:[true]}", "sampling.seed=5")
    [point] = found.values()
    alone = compose_experiment(
        "demo", ["engine.concurrency=2", "sampling.ignore_eos=true", "sampling.seed=5"], CONFIG
    )
    assert to_yaml(job_config(point, "gsm8k")) == to_yaml(job_config(alone, "gsm8k"))


def test_a_sweep_in_an_experiments_file(tmp_path: Path) -> None:
    for path in CONFIG.rglob("*.yaml"):
        copy = tmp_path / path.relative_to(CONFIG)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [demo, _self_]\nsweep: {engine.concurrency: [1, 8]}\n"
    )
    found = compose_points("mine", (), tmp_path)
    assert list(found) == ["engine.concurrency=1", "engine.concurrency=8"]
    changed = compose_points("mine", ["sweep={engine.concurrency:[3]}"], tmp_path)
    assert list(changed) == ["engine.concurrency=3"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine.concurrency": "4"},
        {"engine.concurrency": "4", "datasets.gsm8k.limit": "null", "sampling.temperature": "0.5"},
    ],
)
def test_a_points_name_says_its_options(options: dict[str, str]) -> None:
    assert point_options(point_name(options)) == options


@pytest.mark.parametrize("folder", ["demo", "results", "dspark_k3"])
def test_other_folders_are_no_points(folder: str) -> None:
    assert point_options(folder) == {}


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ("{engine.concurency:[1]}", "EngineConfig has no field 'concurency'.*'concurrency'"),
        (
            "{target.name:[a,b]}",
            r"sweeps target.name: only options of datasets, runs, engine, samp",
        ),
        ("{engine.concurrency:[]}", r"sweeps engine.concurrency over \[\]: list different values"),
        ("{engine.concurrency:[4,4]}", "list different values"),
        ("{engine.concurrency:[[1],[2]]}", "each a number, a switch or a word"),
        ("{engine.precision:['a/b']}", "each a number, a switch or a word"),
        ("{engine.concurrency:4}", "engine.concurrency: Value 4 .* is incompatible"),
        ("{engine.concurrency:[1,0]}", "engine.concurrency is 0"),
        ("{runs.baseline.k:[1]}", "runs.baseline.k is 1"),
    ],
)
def test_what_cannot_be_swept_is_refused(sweep: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        points(f"+sweep={sweep}")
    assert "\n" not in str(caught.value)


def test_a_sweep_without_its_plus_is_explained() -> None:
    with pytest.raises(UserError, match=r"a sweep is added, as '\+sweep=\{engine.concurrency"):
        points("sweep={engine.concurrency:[1]}")
