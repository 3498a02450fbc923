"""`dspark ...`: what the rules call, and what a user calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from dspark import __version__, stages
from dspark.config import (
    ModelsConfig,
    TrackingConfig,
    compose_experiment,
    compose_training,
    from_yaml,
    job_config,
    to_yaml,
)
from dspark.errors import UserError, nearest

FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


class Verbs(click.Group):
    """A command group that answers an unknown verb with the nearest one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise UserError(f"no command '{args[0]}': {nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs)
@click.version_option(__version__)
def cli() -> None:
    """Does DSpark speculative decoding pay on my model, my GPU, my traffic?

    \b
    The whole table:   dspark run demo
    One stage alone:   prepare, prompts, bench, summarise, table, track
    A new drafter:     dspark train --out results/training/mine
    For other engines: dspark convert
    """


@cli.command()
@click.argument("experiment", default="demo")
@click.argument("overrides", nargs=-1)
@click.option("--cores", default="all", show_default=True, help="CPU cores for Snakemake.")
@click.option("--profile", help="Workflow profile, for example profiles/slurm.")
@click.option("-n", "--dry-run", is_flag=True, help="Show what would run.")
def run(
    experiment: str, overrides: tuple[str, ...], cores: str, profile: str | None, dry_run: bool
) -> None:
    """Run an experiment's DAG up to its table.

    \b
    Example: dspark run demo engine.concurrency=8 datasets.gsm8k.limit=4
    """
    compose_experiment(experiment, overrides)  # a wrong name fails here, in one line
    command = [sys.executable, "-m", "snakemake", "--cores", cores]
    if profile:
        command += ["--workflow-profile", profile]
    if dry_run:
        command.append("--dry-run")
    quoted = ",".join(f'"{_escape(item)}"' for item in overrides)
    command += ["--config", f"experiment={experiment}", f"overrides=[{quoted}]"]
    sys.exit(subprocess.run(command).returncode)


def _escape(text: str) -> str:
    """Inside a double-quoted YAML string."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


@cli.command("config")
@click.argument("experiment", default="demo")
@click.argument("overrides", nargs=-1)
@click.option("--dataset", help="Show the job of one dataset.")
def show_config(experiment: str, overrides: tuple[str, ...], dataset: str | None) -> None:
    """Print an experiment's resolved config."""
    config = compose_experiment(experiment, overrides)
    click.echo(to_yaml(job_config(config, dataset) if dataset else config), nl=False)


@cli.command()
@click.option("--config", type=FILE, required=True, help="Resolved models config.")
@click.option("--store", type=FOLDER, default="results/models", show_default=True)
@click.option("--trained", type=FOLDER, help="Checkpoint of a drafter that was trained here.")
@click.option("--out", type=FOLDER, required=True, help="Folder for target.json and drafter.json.")
def prepare(config: Path, store: Path, trained: Path | None, out: Path) -> None:
    """Make target and drafter available on this machine."""
    stages.prepare(config, store, out, trained)


@cli.command()
@click.option("--config", type=FILE, required=True, help="Resolved job config.")
@click.option("--out", type=FILE, required=True, help="prompts.jsonl to write.")
def prompts(config: Path, out: Path) -> None:
    """Write a dataset's prompts."""
    stages.prompts(config, out)


@cli.command()
@click.option("--config", type=FILE, required=True, help="Resolved job config.")
@click.option("--prompts", "prompt_file", type=FILE, required=True)
@click.option("--models", type=FOLDER, required=True, help="Folder of target.json, drafter.json.")
@click.option("--threads", type=int, help="CPU threads when engine.threads is null.")
@click.option("--profiles", type=FOLDER, default="results/profiles", show_default=True)
@click.option("--out", type=FOLDER, required=True, help="Folder of the dataset.")
def bench(
    config: Path, prompt_file: Path, models: Path, threads: int | None, profiles: Path, out: Path
) -> None:
    """Run one dataset with all its runs on one device.

    The step times that a scheduled run decides by are measured once and kept in PROFILES.
    """
    stages.bench(config, prompt_file, models, out, profiles, threads)


@cli.command()
@click.option("--models", type=FOLDER, required=True, help="Folder of target.json, drafter.json.")
@click.argument("folder", type=FOLDER)
def summarise(models: Path, folder: Path) -> None:
    """Turn a dataset's request records into summaries."""
    stages.summarise(folder, models)


@cli.command()
@click.argument("summaries", nargs=-1, required=True, type=FILE)
@click.option("--out", type=FILE, required=True)
def table(summaries: tuple[Path, ...], out: Path) -> None:
    """Write the results table of these summaries, in this order."""
    click.echo(stages.table(list(summaries), out))


@cli.command()
@click.argument("results", type=FOLDER)
@click.argument("summaries", nargs=-1, type=FILE)
@click.option("--config", type=FILE, help="Resolved tracking config; default: the local store.")
@click.option("--training", type=FOLDER, help="Folder of a training, to log its curve too.")
@click.option("--out", type=FILE, help="File for the run ids; default: <results>/mlflow.json.")
def track(
    results: Path,
    summaries: tuple[Path, ...],
    config: Path | None,
    training: Path | None,
    out: Path | None,
) -> None:
    """Log an experiment's cells to MLflow; logging again changes nothing.

    \b
    Example: dspark track results/demo
             dspark track results/demo --training results/training/mine
    """
    tracking = from_yaml(TrackingConfig, config) if config else TrackingConfig()
    chosen = sorted(results.glob("*/*/summary.json")) if not summaries else list(summaries)
    stages.track(results, chosen, tracking, out or results / "mlflow.json", training)


@cli.command()
@click.argument("overrides", nargs=-1)
@click.option("--stage", help="synthesise, cache, fit or calibrate; default: one after the other.")
@click.option("--config", type=FILE, help="Resolved models config, instead of overrides.")
@click.option("--store", type=FOLDER, default="results/models", show_default=True)
@click.option("--out", type=FOLDER, required=True, help="Folder of the training.")
def train(
    overrides: tuple[str, ...], stage: str | None, config: Path | None, store: Path, out: Path
) -> None:
    """Train a drafter on text that its target generates; a killed training goes on.

    The checkpoint is OUT/drafter. On several GPUs run the fit stage alone under torchrun.

    \b
    Example: dspark train --out results/training/mine drafter.train.prompts=500
             torchrun --nproc-per-node 8 -m dspark.cli train --stage fit \\
                 --out results/training/mine drafter.train.prompts=500
    """
    if config is not None and overrides:
        raise UserError("give either --config or overrides, not both")
    models = from_yaml(ModelsConfig, config) if config else compose_training(overrides)
    stages.train(models, store, out, stage)


@cli.command()
@click.argument("drafter", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option("--to", required=True, help="Format to write: native or speculators.")
@click.option(
    "--target",
    type=FOLDER,
    default="results/models/smollm2_135m",
    show_default=True,
    help="Hugging Face directory of the drafter's target.",
)
@click.option("--verifier", help="The target's name on the hub, for engines that load it by name.")
def convert(drafter: Path, out: Path, to: str, target: Path, verifier: str | None) -> None:
    """Write a drafter's checkpoint in the other format.

    \b
    Example: dspark convert results/training/mine/drafter mine_speculators --to speculators
    """
    stages.convert(drafter, out, to, target, verifier)


def main() -> None:
    """Entry point: a UserError becomes one line on stderr and exit status 1."""
    try:
        cli.main(standalone_mode=False)
    except UserError as error:
        click.echo(f"dspark: {' '.join(str(error).split())}", err=True)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("dspark: interrupted", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
