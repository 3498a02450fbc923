"""What all rules share: the experiment, composed by Hydra from the Snakemake config.

    snakemake --cores 2 --config experiment=demo overrides="engine.concurrency=8"

A rule asks for the part of the experiment that it depends on as text (`get_*_text`); the text goes
into a config file that is rewritten only when it changes, so only what it decides runs again.
"""

import os
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

sys.path.insert(0, str(Path(workflow.basedir) / "src"))
# The rules call `dspark`, which lies beside the interpreter even when its environment is not active.
shell.prefix(f"set -euo pipefail; export PATH={Path(sys.executable).parent}:$PATH; ")

from dspark.config import (
    Device,
    ModelSource,
    compose_experiment,
    job_config,
    models_config,
    split_overrides,
    to_yaml,
    training_name,
)
from dspark.errors import UserError

EXPERIMENT = config.get("experiment", "demo")
try:
    COMPOSED = compose_experiment(
        EXPERIMENT,
        split_overrides(config.get("overrides")),
        Path(workflow.basedir) / "config",
    )
except UserError as error:
    raise WorkflowError(str(error)) from None

DATASETS = list(COMPOSED.datasets)
RUNS = list(COMPOSED.runs)
SUMMARIES = expand(
    f"results/{EXPERIMENT}/{{dataset}}/{{run}}/summary.json", dataset=DATASETS, run=RUNS
)
# A drafter of source train lies with its training, which experiments with the same settings share.
TRAINED = COMPOSED.drafter.source is ModelSource.train
TRAINING = f"results/training/{training_name(models_config(COMPOSED))}"
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


def get_models_text(wildcards):
    return to_yaml(models_config(COMPOSED))


def get_prompt_files(wildcards):
    """The user's own prompts, which the target answers for training."""
    return COMPOSED.drafter.train.prompt_files if TRAINED else []


def get_trained_drafter(wildcards):
    """All that a training ends with; nothing when the drafter is not trained here."""
    return rules.calibrate.output if TRAINED else []


def get_job_text(wildcards):
    return to_yaml(job_config(COMPOSED, wildcards.dataset))


def get_tracking_text(wildcards):
    return to_yaml(COMPOSED.tracking)


def get_gpus(wildcards):
    """A job takes the GPU unless the engine is told to stay on the CPU."""
    return 0 if COMPOSED.engine.device is Device.cpu else 1


def get_training_gpus(wildcards):
    """As for a job, by the training's own device: experiments that share it agree."""
    on_cpu = TRAINED and COMPOSED.drafter.train.device is Device.cpu
    return 0 if on_cpu else 1


def get_bench_threads(wildcards):
    """All cores: two jobs that share them would spoil each other's times."""
    return COMPOSED.engine.threads or os.cpu_count()
