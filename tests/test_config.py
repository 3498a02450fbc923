"""Experiments compose, and what does not fit is refused in one line that names it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest

from dspark.config import (
    JobConfig,
    Mode,
    ResourcesConfig,
    asked_resources,
    compose_experiment,
    compose_training,
    digest,
    from_yaml,
    job_config,
    models_config,
    split_overrides,
    to_yaml,
    training_name,
)
from dspark.errors import UserError

CONFIG = Path(__file__).parents[1] / "config"
DATASETS = ["math500", "gsm8k", "humaneval", "mbpp", "mt_bench", "ultrachat"]
PUBLISHED_REQUESTS = dict(zip(DATASETS, [500, 1319, 164, 500, 160, 5000], strict=True))


def composed(*overrides: str, experiment: str = "demo"):
    return compose_experiment(experiment, overrides, CONFIG)


@pytest.mark.parametrize(
    "experiment", sorted(path.stem for path in (CONFIG / "experiment").glob("*.yaml"))
)
def test_every_experiment_composes(experiment: str) -> None:
    config = composed(experiment=experiment)
    assert set(config.datasets) <= set(DATASETS)
    assert next(iter(config.runs)) == "baseline"
    assert config.name == experiment


@pytest.mark.parametrize("experiment", ["demo", "published"])
def test_a_whole_table_has_the_published_datasets_and_arms(experiment: str) -> None:
    config = composed(experiment=experiment)
    assert list(config.datasets) == DATASETS
    assert list(config.runs)[:3] == ["baseline", "dspark_k3", "dspark_k7"]


def test_published_experiment_has_the_published_settings() -> None:
    config = composed(experiment="published")
    turns = {"mt_bench": 2}
    counts = {name: (d.limit or 0) * turns.get(name, 1) for name, d in config.datasets.items()}
    # gsm8k, humaneval and mt_bench take all rows of their split: tests/data counts them.
    assert {n: c for n, c in counts.items() if c} == {
        n: PUBLISHED_REQUESTS[n] for n, c in counts.items() if c
    }
    assert {d.max_new_tokens for d in config.datasets.values()} == {128}
    assert (config.engine.concurrency, config.engine.warmup) == (4, 8)
    assert (config.sampling.temperature, config.sampling.ignore_eos) == (0.0, False)
    assert config.target.revision and config.drafter.revision


def test_job_round_trips_through_its_yaml(tmp_path: Path) -> None:
    job = job_config(composed("sampling.stop=[END]"), "gsm8k")
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(job))
    assert from_yaml(JobConfig, path) == job
    assert digest(from_yaml(JobConfig, path)) == digest(job)


def test_a_datasets_option_changes_that_datasets_job_alone() -> None:
    before, after = composed(), composed("datasets.gsm8k.limit=3")
    changed = [
        name
        for name in DATASETS
        if digest(job_config(before, name)) != digest(job_config(after, name))
    ]
    assert changed == ["gsm8k"]


def test_tracking_is_no_part_of_a_job() -> None:
    other = composed("tracking.uri=http://127.0.0.1:1")
    assert digest(job_config(composed(), "gsm8k")) == digest(job_config(other, "gsm8k"))


def test_what_a_dataset_asks_a_cluster_for_is_no_part_of_its_job() -> None:
    asking = composed(
        "datasets.gsm8k.resources={runtime: 60, slurm_partition: h200}",
        "datasets.mt_bench.resources.slurm_extra='--exclude=node7 --nice=5'",
    )
    assert to_yaml(job_config(asking, "gsm8k")) == to_yaml(job_config(composed(), "gsm8k"))
    assert "resources" not in to_yaml(job_config(asking, "gsm8k"))
    asked = {name: asked_resources(dataset) for name, dataset in asking.datasets.items()}
    assert {name: found for name, found in asked.items() if found} == {
        "gsm8k": {"runtime": 60, "slurm_partition": "h200"},
        "mt_bench": {"slurm_extra": "--exclude=node7 --nice=5"},
    }


def test_resources_are_those_that_the_slurm_executor_reads() -> None:
    package = files("snakemake_executor_plugin_slurm")
    text = "".join(path.read_text() for path in package.iterdir() if path.name.endswith(".py"))
    read = set(re.findall(r'resources\.get\(\s*"(\w+)"', text))
    assert {entry.name for entry in fields(ResourcesConfig)} <= read


def test_a_user_adds_an_arm_by_a_small_yaml_file(tmp_path: Path) -> None:
    for path in CONFIG.rglob("*.yaml"):
        copy = tmp_path / path.relative_to(CONFIG)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults: [demo, _self_]\n"
        "datasets: {gsm8k: {limit: 4}}\n"
        "runs: {dspark_k5: {mode: speculative, k: 5}}\n"
        "engine: {concurrency: 2}\n"
    )
    config = compose_experiment("mine", (), tmp_path)
    assert config.runs["dspark_k5"].k == 5
    assert config.runs["dspark_k5"].mode is Mode.speculative
    assert (config.datasets["gsm8k"].limit, config.engine.concurrency) == (4, 2)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engine.concurency=8"], "EngineConfig has no field 'concurency'.*'concurrency'"),
        (["drafter=smollm"], "drafter 'smollm' not found.*smollm2_135m"),
        (["datasets.gsm9k.limit=2"], "'datasets' has no 'gsm9k'.*did you mean 'gsm8k'"),
        (["runs.dspark_k9.k=2"], "'runs' has no 'dspark_k9'"),
        (["engine.precision=fp8"], "Invalid value 'fp8', expected one of"),
        (["datasets.gsm8k.limit=many"], "limit"),
        (
            ["datasets.gsm8k.resources.slurm_partion=a"],
            "ResourcesConfig has no field 'slurm_partion': did you mean 'slurm_partition'",
        ),
        (["datasets.gsm8k.resources.runtime=2h"], "resources.runtime: Value '2h'.*Integer"),
        (["datasets.gsm8k.resources.runtime=0"], "datasets.gsm8k.resources.runtime is 0"),
        (["datasets.gsm8k.resources.mem_mb=0"], "datasets.gsm8k.resources.mem_mb is 0"),
        (["datasets.gsm8k.resources.gpu=-1"], "datasets.gsm8k.resources.gpu is -1"),
        (["runs.baseline.k=2"], "runs.baseline.k is 2"),
        (
            ["+dataset@datasets.boxed=gsm8k_boxed"],
            "datasets.gsm8k and datasets.boxed are both named 'gsm8k'.*set datasets.boxed.name=boxed",
        ),
        (["runs.dspark_k3.k=0"], "runs.dspark_k3.k is 0"),
        (["engine.concurrency=0"], "engine.concurrency is 0"),
        (["datasets.gsm8k.limit=0"], "datasets.gsm8k.limit is 0"),
        (["datasets.gsm8k.shards=0"], "datasets.gsm8k.shards is 0"),
        (
            ["datasets.gsm8k.limit=4", "datasets.gsm8k.shards=5"],
            "datasets.gsm8k.shards is 5 and its limit 4: every shard needs a prompt",
        ),
        (["sampling.top_p=0"], "sampling.top_p"),
        (["sampling.temperature=-1"], "sampling.temperature"),
        (["runs.dspark_k3.confidence_threshold=2"], "confidence_threshold"),
        (["sampling.stop=['']"], "sampling.stop holds an empty string"),
        (["~runs.baseline"], "no run named 'baseline'"),
        (["engine.threads=0"], "engine.threads is 0"),
        (["engine.concurrency"], "engine.concurrency"),
        (["+foo=1"], "ExperimentConfig has no field 'foo'"),
        (["+target.nam=x"], "TargetConfig has no field 'nam': did you mean 'name'"),
        (
            ["+datasets.gsm8k.limitt=1"],
            "ScheduledDataset has no field 'limitt': did you mean 'limit'",
        ),
        (["targett=smollm2_135m"], "has no field 'targett': did you mean 'target'"),
        (["+runn@runs.x=dspark_k3"], "no config group 'runn': did you mean 'run'"),
        (["+run@runs.x=dspark_k9"], "run 'dspark_k9' not found.*'dspark_k7'"),
        (["+dataset@datasets.x=gsm9k"], "dataset 'gsm9k' not found.*'gsm8k'"),
        (["tracking=lokal"], "tracking 'lokal' not found.*'local'"),
        (
            ["+runs.x={mode:speculative,k:3}"],
            r"a run is added by its group, as \+run@runs.NAME=FILE",
        ),
        (["+datasets.x={name:x}"], r"a dataset is added by its group, as \+dataset@datasets.NAME"),
        (["target=null"], "an override of a config group names one of its files"),
        (
            ["drafter.train.prompts=9"],
            "sets a field of what is null: choose the whole first, as drafter=",
        ),
        (
            ["engine.concurrency=$(touch x)"],
            "'engine.concurrency=.*' cannot be read: write name=value",
        ),
        (["engine concurrency"], "override 'engine concurrency' cannot be read: write name=value"),
        (
            ["engine.concurrency=[1]"],
            "engine.concurrency: Value .* could not be converted to Integer",
        ),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        composed(*overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../x", "a b", "$(touch x)", "", ".hidden"])
def test_names_that_cannot_be_files_are_refused(tmp_path: Path, name: str) -> None:
    """Datasets, runs and trained drafters give their names to folders and commands."""
    said = "cannot name a file in results/: a name begins with a letter or digit, has letters"
    with pytest.raises(UserError, match=said):
        compose_training([f'drafter.name="{name}"'], CONFIG)
    shutil.copytree(CONFIG, tmp_path / "config")
    for what, entry in (("datasets", "{name: x, source: builtin}"), ("runs", "{mode: baseline}")):
        (tmp_path / "config" / "experiment" / "mine.yaml").write_text(
            "# @package _global_\ndefaults: [demo, _self_]\n"
            f"{what}: {{{json.dumps(name)}: {entry}}}\n"
        )
        with pytest.raises(UserError, match=f"{what} .*{said}"):
            compose_experiment("mine", (), tmp_path / "config")


def test_an_experiment_may_not_take_the_folder_of_others(tmp_path: Path) -> None:
    shutil.copytree(CONFIG, tmp_path / "config")
    for name in ("models", "it's"):
        shutil.copy(
            CONFIG / "experiment" / "demo.yaml", tmp_path / f"config/experiment/{name}.yaml"
        )
    with pytest.raises(UserError, match=r"experiment 'models' cannot name .* is none of "):
        compose_experiment("models", (), tmp_path / "config")
    with pytest.raises(UserError, match="it's"):
        compose_experiment("it's", (), tmp_path / "config")


@pytest.mark.parametrize(
    "overrides",
    [
        ["+dataset@datasets.models=gsm8k", "datasets.models.name=x"],
        ["+dataset@datasets.logs=gsm8k", "datasets.logs.name=x"],
        ["+run@runs.shards=dspark_k3"],
    ],
)
def test_names_of_other_folders_are_refused(overrides: list[str]) -> None:
    with pytest.raises(UserError, match=r"cannot name a file in results/.* is none of"):
        composed(*overrides)


@pytest.mark.parametrize("value", ["gsm8k", "5", "null"])
@pytest.mark.parametrize(
    ("field", "rest"),
    [
        ("datasets.gsm8k", "; +dataset@datasets.gsm8k=FILE adds one, ~datasets.gsm8k takes it out"),
        ("runs.dspark_k3", "; +run@runs.dspark_k3=FILE adds one, ~runs.dspark_k3 takes it out"),
        ("sampling", ""),
    ],
)
def test_a_value_where_fields_belong_is_refused(field: str, rest: str, value: str) -> None:
    with pytest.raises(UserError) as caught:
        composed(f"{field}={value}")
    said = f"experiment 'demo': {field} has fields: set them, as {field}.FIELD=VALUE{rest}"
    assert str(caught.value) == said


def test_a_dataset_written_inline_is_called_as_its_entry(tmp_path: Path) -> None:
    shutil.copytree(CONFIG, tmp_path / "config")
    (tmp_path / "config" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [demo, _self_]\n"
        "datasets: {own: {source: file, path: own.jsonl}}\n"
    )
    assert compose_experiment("mine", (), tmp_path / "config").datasets["own"].name == "own"


def test_unknown_experiment_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'published'"):
        composed(experiment="publishd")


def test_training_composes_and_refuses_unknown_fields() -> None:
    train = compose_training(["drafter.train.shape.layers=1"], CONFIG).drafter.train
    assert train is not None and train.shape.layers == 1
    with pytest.raises(UserError, match="DrafterShape has no field 'layer': did you mean 'layers'"):
        compose_training(["drafter.train.shape.layer=1"], CONFIG)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["drafter.train.batch=0"], "drafter.train.batch is 0"),
        (["drafter.train.shape.block_size=0"], "drafter.train.shape.block_size is 0"),
        (
            [f"drafter.train.{name}" for name in ("prompts=96", "held_out=32", "calibration=64")],
            "prompts is 96: held_out .32. and calibration .64. leave",
        ),
        (["drafter.train=null"], "source 'train' but no train settings"),
        (["target=smollm"], "target 'smollm' not found.*smollm2_135m"),
        (["targt=smollm2_135m"], "ModelsConfig has no field 'targt': did you mean 'target'"),
        (["train@drafter.train=defalt"], "train 'defalt' not found: did you mean 'default'"),
        (
            ["drafter.train.device=gpu"],
            "drafter.train.device: Invalid value 'gpu', expected one of",
        ),
        (["+drafter.train.promts=3"], "TrainConfig has no field 'promts': did you mean 'prompts'"),
        (["engine.device=cuda"], "ModelsConfig has no field 'engine': known: drafter, target"),
        (["datasets.x=1"], "ModelsConfig has no field 'datasets'"),
        (["drafter.train.lr"], "drafter.train.lr"),
    ],
)
def test_a_training_that_cannot_work_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        compose_training(overrides, CONFIG)
    assert "\n" not in str(caught.value)


def test_a_run_that_drafts_more_than_a_block_is_refused_before_the_training() -> None:
    small = ["drafter=trained", "drafter.train.shape.block_size=4"]
    with pytest.raises(UserError, match=r"runs.dspark_k7.k is 7.*block_size is 4"):
        composed(*small)
    smaller = [f"runs.{run}.k=4" for run in ("dspark_k7", "dspark_sched")]
    assert composed(*small, *smaller).drafter.train is not None


def test_the_name_of_a_training_follows_what_decides_it_alone() -> None:
    def name(*overrides: str) -> str:
        return training_name(models_config(composed("drafter=trained", *overrides)))

    assert name() == name("engine.concurrency=2", "datasets.gsm8k.limit=1", "tracking.uri=x")
    assert name() == training_name(compose_training((), CONFIG))
    others = [
        name("drafter.train.lr=1e-3"),
        name("drafter.train.shape.layers=1"),
        name("target.name=y"),
    ]
    assert len({name(), *others}) == 4


def test_overrides_split_like_a_shell_line() -> None:
    assert split_overrides("a=1 'b=x y'") == ["a=1", "b=x y"]
    assert split_overrides(["a=1"]) == ["a=1"]
    assert split_overrides(None) == []


def test_damaged_config_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        from_yaml(JobConfig, tmp_path / "none.yaml")
    (tmp_path / "odd.yaml").write_text("engine: {speed: 3}\n")
    with pytest.raises(UserError, match=r"odd.yaml.*'speed'"):
        from_yaml(JobConfig, tmp_path / "odd.yaml")
    (tmp_path / "broken.yaml").write_text("engine: [\n")
    with pytest.raises(UserError, match=r"broken.yaml"):
        from_yaml(JobConfig, tmp_path / "broken.yaml")


def test_no_config_reads_the_clock_or_the_environment() -> None:
    """A value that changes by itself would run every cell again, every time."""
    for path in CONFIG.rglob("*.yaml"):
        assert "${now" not in path.read_text() and "oc.env" not in path.read_text(), path
