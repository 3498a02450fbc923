"""What all rules share: the experiment, composed by Hydra from the Snakemake config.

    snakemake --cores 2 --config experiment=demo overrides="engine.concurrency=8"

A rule asks for the part of the experiment that it depends on as text (`get_*_text`); the text goes
into a config file that is rewritten only when it changes, so only what it decides runs again.
"""

import os
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

sys.path.insert(0, str(Path(workflow.basedir) / "src"))
# The rules call `dspark`, which lies beside the interpreter even when its environment is not active.
BESIDE = shlex.quote(str(Path(sys.executable).parent))
shell.prefix(f"set -euo pipefail; export PATH={BESIDE}:$PATH; ")

from dspark.config import (
    Device,
    ModelSource,
    asked_resources,
    compose_points,
    job_config,
    models_config,
    split_overrides,
    to_yaml,
    training_name,
)
from dspark.errors import UserError
from dspark.stages import shard_folder

EXPERIMENT = config.get("experiment", "demo")
OVERRIDES = split_overrides(config.get("overrides"))
try:
    POINTS = compose_points(EXPERIMENT, OVERRIDES, Path(workflow.basedir) / "config")
except UserError as error:
    raise WorkflowError(str(error)) from None

# What all points of a sweep share: models, names of datasets and runs, tracking.
COMPOSED = next(iter(POINTS.values()))
# Each job's config and dataset by its folder, <dataset> or in a sweep <point>/<dataset>, which is what
# the wildcard `dataset` stands for.
JOBS = {
    f"{point}/{name}".lstrip("/"): (composed, name)
    for point, composed in POINTS.items()
    for name in composed.datasets
}
DATASETS = list(JOBS)
SHARDED = [
    job for job, (composed, name) in JOBS.items() if composed.datasets[name].shards > 1
]
RUNS = list(COMPOSED.runs)
SUMMARIES = expand(
    f"results/{EXPERIMENT}/{{dataset}}/{{run}}/summary.json", dataset=DATASETS, run=RUNS
)
# What each dataset asks a cluster for itself.
ASKED = {
    job: asked_resources(composed.datasets[name])
    for job, (composed, name) in JOBS.items()
}
# A drafter of source train lies with its training, which experiments with the same settings share.
TRAINED = COMPOSED.drafter.source is ModelSource.train
TRAINING = f"results/training/{training_name(models_config(COMPOSED))}"
# The plots of a dataset, and what the report calls them.
DATASET_PLOTS = {
    "acceptance": "Acceptance by position",
    "accept_length": "Accept length",
    "latency": "Latency",
    "ttft": "Time to first token",
    "throughput": "Output tok/s over the run",
}
# Files whose content decides the numbers: editing one runs every cell again.
ENGINE_CODE = sorted(
    str(path.relative_to(workflow.basedir))
    for package in ("decode", "models")
    for path in (Path(workflow.basedir) / "src" / "dspark" / package).glob("*.py")
    if path.name not in ("prepare.py", "embedded.py", "speculators.py")
)


wildcard_constraints:
    dataset="|".join(DATASETS),
    run="|".join(RUNS),
    shard=r"(/shards/\d+-of-\d+)?",


def get_models_text(wildcards):
    return to_yaml(models_config(COMPOSED))


def get_prompt_files(wildcards):
    """The user's own prompts, which the target answers for training."""
    return COMPOSED.drafter.train.prompt_files if TRAINED else []


def get_trained_drafter(wildcards):
    """All that a training ends with; nothing when the drafter is not trained here."""
    return rules.calibrate.output if TRAINED else []


def get_job_text(wildcards):
    return to_yaml(job_config(*JOBS[wildcards.dataset]))


def get_shard(wildcards):
    """Which shard a bench job measures: 2 in folder shards/2-of-3, 1 in that of the dataset."""
    return Path(wildcards.shard).name.partition("-")[0] or 1


def get_shard_records(wildcards):
    """What the jobs of a dataset's shards leave."""
    composed, name = JOBS[wildcards.dataset]
    shards = composed.datasets[name].shards
    folders = [
        shard_folder(Path(f"results/{EXPERIMENT}/{wildcards.dataset}"), shard, shards)
        for shard in range(1, shards + 1)
    ]
    names = ("requests.parquet", "lossless.json", "environment.json")
    return [str(folder / name) for folder in folders for name in names]


def get_tracking_text(wildcards):
    return to_yaml(COMPOSED.tracking)


def get_gpus(wildcards):
    """A job takes the GPU unless the engine is told to stay on the CPU, or its dataset says so."""
    composed, _ = JOBS[wildcards.dataset]
    on_cpu = composed.engine.device is Device.cpu
    return ASKED[wildcards.dataset].get("gpu", 0 if on_cpu else 1)


def get_asked_resources():
    """Resources that any dataset asks a cluster for, but gpu, each as a function of a job."""
    # Without an executor or profile that sets defaults, nobody is asked.
    defaults = workflow.resource_settings.default_resources or {}
    names = {name for asked in ASKED.values() for name in asked if name != "gpu"}
    return {name: get_asked(name, defaults) for name in sorted(names) if defaults}


def get_asked(name, defaults):
    """A job's resource `name`: what its dataset asks for, or the default if there is one."""

    def resource(wildcards, **job):
        asked = ASKED[wildcards.dataset]
        if name in asked:
            return asked[name]
        if name in defaults:
            return defaults[name].evaluate(wildcards, **job).value
        return None

    return resource


def get_training_gpus(wildcards):
    """As for a job, by the training's own device: experiments that share it agree."""
    on_cpu = TRAINED and COMPOSED.drafter.train.device is Device.cpu
    return 0 if on_cpu else 1


def get_bench_threads(wildcards):
    """All cores: two jobs that share them would spoil each other's times."""
    composed, _ = JOBS.get(wildcards.get("dataset"), (COMPOSED, None))
    return composed.engine.threads or os.cpu_count()


def get_command_text(wildcards):
    """What runs this experiment again."""
    return shlex.join(["dspark", "run", EXPERIMENT, *OVERRIDES])


def get_results(wildcards):
    return f"results/{EXPERIMENT}"


def get_plots():
    """The plots of each dataset, of all, and where the concurrency is swept the one that shows it."""
    folder = Path(f"results/{EXPERIMENT}/plots")
    plots = []
    for point in POINTS:
        plots += get_plot(
            folder / point / "speedup", "speedup", "Speedup", point or "All datasets"
        )
    for job in DATASETS:
        for kind, title in DATASET_PLOTS.items():
            plots += get_plot(folder / f"{job}-{kind}", kind, title, job)
    if len({composed.engine.concurrency for composed in POINTS.values()}) > 1:
        title = "Speedup by concurrency"
        plots += get_plot(folder / "concurrency", "concurrency", title, "All datasets")
    return plots


def get_plot(path, kind, title, category):
    """A plot's two files; the report shows the SVG, with the caption of its kind."""
    shown = report(
        f"{path}.svg",
        caption=f"../report/{kind}.rst",
        category=category,
        labels={"result": title},
    )
    return [f"{path}.png", shown]
