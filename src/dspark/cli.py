"""`dspark ...`: what the rules call, and what a user calls."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from dspark import __version__
from dspark.completion import (
    CHECKPOINT_FORMATS,
    STAGES,
    TABLE_FORMATS,
    complete_checkpoint_format,
    complete_dataset,
    complete_experiment,
    complete_override,
    complete_profile,
    complete_stage,
    complete_table_format,
    complete_training_override,
)
from dspark.errors import UserError, nearest
from dspark.files import REMEDIES, cannot_write
from dspark.signals import Interrupted, end, ignore_signals, interrupt_on_signals

FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
PROMPTS_HELP = "The dataset's prompts.jsonl."
STORE_HELP = "Folder of the targets that are fetched, shared by all experiments."
PROFILES_HELP = "Folder of this machine's step times."


class Verbs(click.Group):
    """A command group that answers an unknown verb with the nearest one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        unknown = args and not args[0].startswith("-") and args[0] not in self.commands
        if unknown and not ctx.resilient_parsing:  # which is how a shell completes
            raise UserError(f"no command '{args[0]}': {nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs)
@click.version_option(__version__)
def cli() -> None:
    """Does DSpark speculative decoding pay on my model, my GPU, my traffic?

    \b
    The whole table:   dspark run demo
    This machine:      dspark doctor
    How far it is:     dspark status demo
    One stage alone:   prepare, prompts, bench, merge, summarise, table, plots, track
    Where time goes:   dspark profile
    Two tables:        dspark compare results/before results/after
    A new drafter:     dspark train --out results/training/mine
    For other engines: dspark convert
    """


@cli.command()
@click.argument("experiment", default="demo", shell_complete=complete_experiment)
@click.argument("overrides", nargs=-1, shell_complete=complete_override)
@click.option("--cores", help="CPU cores for Snakemake; default: all, or what the profile says.")
@click.option(
    "--profile",
    help="Workflow profile, for example profiles/slurm.",
    shell_complete=complete_profile,
)
@click.option("-n", "--dry-run", is_flag=True, help="Show what would run.")
def run(
    experiment: str,
    overrides: tuple[str, ...],
    cores: str | None,
    profile: str | None,
    dry_run: bool,
) -> None:
    """Run an experiment's DAG up to its table.

    The experiment is demo unless one is named. A run that was stopped goes on with the same command.

    \b
    Example: dspark run demo engine.concurrency=8 datasets.gsm8k.limit=4
    """
    from dspark.config import compose_points

    compose_points(experiment, overrides)  # a wrong name fails here, in one line
    for folder in (Path.cwd(), Path.cwd() / "results"):
        if folder.exists() and not os.access(folder, os.W_OK, effective_ids=True):
            raise UserError(f"'{folder}' cannot be written: run in a checkout of your own")
    command = [sys.executable, "-m", "snakemake"]
    if cores or not profile:  # on a cluster it would cut each job down to the cores of this machine
        command += ["--cores", cores or "all"]
    if profile:
        if not Path(profile).is_dir():  # Snakemake would go on without it
            known = (str(path) for path in Path("profiles").glob("*"))
            raise UserError(f"no profile folder '{profile}': {nearest(profile, known)}")
        command += ["--workflow-profile", profile]
    if dry_run:
        command.append("--dry-run")
    quoted = json.dumps(overrides, ensure_ascii=False)  # what Snakemake reads as YAML
    command += ["--config", f"experiment={experiment}", f"overrides={quoted}"]
    os.execv(sys.executable, command)  # signals are Snakemake's to handle


@cli.command("config")
@click.argument("experiment", default="demo", shell_complete=complete_experiment)
@click.argument("overrides", nargs=-1, shell_complete=complete_override)
@click.option("--dataset", help="Show the job of one dataset.", shell_complete=complete_dataset)
def show_config(experiment: str, overrides: tuple[str, ...], dataset: str | None) -> None:
    """Print an experiment's resolved config.

    \b
    Example: dspark config demo engine.concurrency=8
             dspark config demo --dataset gsm8k
    """
    from dspark.config import compose_experiment, job_config, to_yaml

    config = compose_experiment(experiment, overrides)
    click.echo(to_yaml(job_config(config, dataset) if dataset else config), nl=False)


@cli.command()
@click.argument("experiment", default="demo", shell_complete=complete_experiment)
@click.argument("overrides", nargs=-1, shell_complete=complete_override)
def status(experiment: str, overrides: tuple[str, ...]) -> None:
    """Say what of an experiment is done, running and missing.

    Requests finished of all, for each dataset and run; what was measured with other settings than
    these does not count. The last line says what to run next.

    \b
    Example: dspark status demo
             dspark status demo engine.concurrency=8
    """
    from dspark.config import compose_points
    from dspark.status import experiment_status, render_status

    found = experiment_status(compose_points(experiment, overrides))
    click.echo(render_status(found, ["dspark", "run", experiment, *overrides]))


@cli.command()
def doctor() -> None:
    """Say what works on this machine, and how to mend what does not.

    Exit status 1 when the built-in experiment, demo, could not run.

    \b
    Example: dspark doctor
    """
    from dspark.doctor import examine, render_findings

    findings = examine()
    click.echo(render_findings(findings))
    broken = [finding.what for finding in findings if finding.stops_demo]
    if broken:
        raise UserError(f"the built-in demo cannot run here: see {', '.join(broken)} above")


@cli.command()
@click.option("--config", type=FILE, required=True, help="Resolved models config.")
@click.option("--store", type=FOLDER, default="results/models", show_default=True, help=STORE_HELP)
@click.option("--trained", type=FOLDER, help="Checkpoint of a drafter that was trained here.")
@click.option("--out", type=FOLDER, required=True, help="Folder for target.json and drafter.json.")
def prepare(config: Path, store: Path, trained: Path | None, out: Path) -> None:
    """Make target and drafter available on this machine.

    \b
    Example: dspark prepare --config results/demo/models/config.yaml --out results/demo/models
    """
    from dspark import stages

    stages.prepare(config, store, out, trained)


@cli.command()
@click.option("--config", type=FILE, required=True, help="Resolved job config.")
@click.option("--out", type=FILE, required=True, help="prompts.jsonl to write.")
def prompts(config: Path, out: Path) -> None:
    """Write a dataset's prompts.

    \b
    Example: dspark prompts --config results/demo/gsm8k/config.yaml --out gsm8k.jsonl
    """
    from dspark import stages

    stages.prompts(config, out)


@cli.command()
@click.option("--config", type=FILE, required=True, help="Resolved job config.")
@click.option("--prompts", "prompt_file", type=FILE, required=True, help=PROMPTS_HELP)
@click.option("--models", type=FOLDER, required=True, help="Folder of target.json, drafter.json.")
@click.option("--threads", type=int, help="CPU threads when engine.threads is null.")
@click.option(
    "--profiles", type=FOLDER, default="results/profiles", show_default=True, help=PROFILES_HELP
)
@click.option("--shard", type=int, default=1, show_default=True, help="Which of its shards.")
@click.option("--out", type=FOLDER, required=True, help="Folder of the dataset.")
def bench(
    config: Path,
    prompt_file: Path,
    models: Path,
    threads: int | None,
    profiles: Path,
    shard: int,
    out: Path,
) -> None:
    """Measure one dataset, or a shard of it, with all its runs.

    All run on one device. The step times that a scheduled run decides by are measured once and kept
    in PROFILES. A job that is killed goes on when the same command runs again; SIGTERM ends it with
    exit status 143, Ctrl-C with 130.

    \b
    Example: dspark bench --config results/demo/gsm8k/config.yaml \\
                 --prompts results/demo/gsm8k/prompts.jsonl \\
                 --models results/demo/models --out results/demo/gsm8k
    """
    from dspark.openmp import spin_on_free_cores

    spin_on_free_cores()  # before torch is loaded
    from dspark import stages

    stages.bench(config, prompt_file, models, out, profiles, threads, shard)


@cli.command()
@click.argument("folder", type=FOLDER)
def merge(folder: Path) -> None:
    """Put the measured shards of the dataset in FOLDER together.

    \b
    Example: dspark merge results/demo/gsm8k
    """
    from dspark import stages

    stages.merge(folder)


@cli.command()
@click.option("--config", type=FILE, required=True, help="Resolved job config.")
@click.option("--prompts", "prompt_file", type=FILE, required=True, help=PROMPTS_HELP)
@click.option("--models", type=FOLDER, required=True, help="Folder of target.json, drafter.json.")
@click.option("--run", required=True, help="The run to set beside the baseline.")
@click.option("--requests", default=16, show_default=True, help="Prompts to time.")
@click.option("--threads", type=int, help="CPU threads when engine.threads is null.")
@click.option(
    "--profiles", type=FOLDER, default="results/profiles", show_default=True, help=PROFILES_HELP
)
def profile(
    config: Path,
    prompt_file: Path,
    models: Path,
    run: str,
    requests: int,
    threads: int | None,
    profiles: Path,
) -> None:
    """Show where a cell's time goes, and what it could be at best.

    \b
    Example: dspark profile --config results/demo/gsm8k/config.yaml \\
                 --prompts results/demo/gsm8k/prompts.jsonl --models results/demo/models \\
                 --run dspark_k3
    """
    from dspark.openmp import spin_on_free_cores

    spin_on_free_cores()  # before torch is loaded
    from dspark import stages

    click.echo(stages.profile(config, prompt_file, models, run, requests, profiles, threads))


@cli.command()
@click.option("--models", type=FOLDER, required=True, help="Folder of target.json, drafter.json.")
@click.argument("folder", type=FOLDER)
def summarise(models: Path, folder: Path) -> None:
    """Turn a dataset's request records into summaries.

    \b
    Example: dspark summarise --models results/demo/models results/demo/gsm8k
    """
    from dspark import stages

    stages.summarise(folder, models)


@cli.command()
@click.argument("summaries", nargs=-1, required=True, type=FILE)
@click.option("--out", type=FILE, required=True, help="File to write.")
@click.option(
    "--allow-unpaired", is_flag=True, help="Mark speedups of arms that were not measured alike."
)
@click.option(
    "--format",
    "form",
    default="markdown",
    show_default=True,
    help=f"{', '.join(TABLE_FORMATS)}.",
    shell_complete=complete_table_format,
)
def table(summaries: tuple[Path, ...], out: Path, allow_unpaired: bool, form: str) -> None:
    """Write the results table of these summaries, in this order.

    A speedup whose two arms ran on different devices, versions, settings or prompts is refused. csv
    and json hold all numbers unrounded; a model-card is for the drafter's page on Hugging Face.

    \b
    Example: dspark table results/demo/*/*/summary.json --out demo.csv --format csv
    """
    from dspark import stages

    text = stages.table(list(summaries), out, allow_unpaired, form)
    if form == "markdown":
        click.echo(text)


@cli.command()
@click.argument("results", type=FOLDER)
@click.argument("summaries", nargs=-1, type=FILE)
@click.option("--out", type=FOLDER, help="Folder of the plots; default: <results>/plots.")
@click.option(
    "--allow-unpaired", is_flag=True, help="Mark speedups of arms that were not measured alike."
)
def plots(
    results: Path, summaries: tuple[Path, ...], out: Path | None, allow_unpaired: bool
) -> None:
    """Draw an experiment's cells, as PNG and SVG.

    Speedups of all datasets; acceptance, accept length, latency, TTFT and tok/s over time of each.

    \b
    Example: dspark plots results/demo
    """
    from dspark import stages

    chosen = list(summaries) or stages.summaries_in(results)
    for path in stages.plots(chosen, out or results / "plots", allow_unpaired):
        click.echo(path)


@cli.command()
@click.argument("results", type=FOLDER)
@click.argument("other", type=FOLDER, required=False)
@click.option("--published", is_flag=True, help="Compare with the published table instead.")
def compare(results: Path, other: Path | None, published: bool) -> None:
    """Set two experiments side by side, cell by cell.

    \b
    Example: dspark compare results/before results/after
             dspark compare results/published --published
    """
    from dspark import stages

    if (other is None) != published:
        raise UserError("compare takes either a second experiment's folder or --published")
    click.echo(stages.compare(results, other), nl=False)


@cli.command()
@click.argument("results", type=FOLDER)
@click.argument("summaries", nargs=-1, type=FILE)
@click.option(
    "--config",
    type=FILE,
    help="Resolved tracking config; default: <results>/tracking.yaml, else the local store.",
)
@click.option("--training", type=FOLDER, help="Folder of a training, to log its curve too.")
@click.option("--out", type=FILE, help="File for the run ids; default: <results>/mlflow.json.")
def track(
    results: Path,
    summaries: tuple[Path, ...],
    config: Path | None,
    training: Path | None,
    out: Path | None,
) -> None:
    """Log an experiment's cells to MLflow.

    They go where the experiment said. Logging again changes nothing but what is new, so this is also how
    a run is logged whose MLflow server was down.

    \b
    Example: dspark track results/demo
             dspark track results/demo --training results/training/mine
    """
    from dspark import stages
    from dspark.config import TrackingConfig, from_yaml

    stored = config or results / "tracking.yaml"
    given = config is not None or stored.is_file()
    tracking = from_yaml(TrackingConfig, stored) if given else TrackingConfig()
    chosen = list(summaries) or None
    stages.track(results, chosen, tracking, out or results / "mlflow.json", training)


@cli.command()
@click.argument("overrides", nargs=-1, shell_complete=complete_training_override)
@click.option(
    "--stage",
    help=f"{', '.join(STAGES)}; default: one after the other.",
    shell_complete=complete_stage,
)
@click.option("--config", type=FILE, help="Resolved models config, instead of overrides.")
@click.option("--store", type=FOLDER, default="results/models", show_default=True, help=STORE_HELP)
@click.option("--out", type=FOLDER, required=True, help="Folder of the training.")
def train(
    overrides: tuple[str, ...], stage: str | None, config: Path | None, store: Path, out: Path
) -> None:
    """Train a drafter on text that its target generates.

    A killed training goes on with the same command. The checkpoint is OUT/drafter. On several GPUs
    run the fit stage alone under torchrun.

    \b
    Example: dspark train --out results/training/mine drafter.train.prompts=500
             torchrun --nproc-per-node 8 -m dspark.cli train --stage fit \\
                 --out results/training/mine drafter.train.prompts=500
    """
    from dspark import stages
    from dspark.config import ModelsConfig, compose_training, from_yaml

    if config is not None and overrides:
        raise UserError("give either --config or overrides, not both")
    models = from_yaml(ModelsConfig, config) if config else compose_training(overrides)
    stages.train(models, store, out, stage)


@cli.command()
@click.argument("drafter", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option(
    "--to",
    required=True,
    help=f"Format to write: {', '.join(CHECKPOINT_FORMATS)}.",
    shell_complete=complete_checkpoint_format,
)
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
    from dspark import stages

    stages.convert(drafter, out, to, target, verifier)


def main() -> None:
    """Entry point: what the user can mend becomes one line on stderr and exit status 1.

    SIGTERM and SIGINT end in one line too, and exit status 143 and 130.
    """
    if not sys.stderr.isatty():  # bars of the hub's client and of transformers would fill a log
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        interrupt_on_signals()
        cli.main(standalone_mode=False)
        ignore_signals()  # all is done: a signal must not make it look otherwise
    except UserError as error:
        _fail(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        command = getattr(error, "ctx", None)
        more = f" (see {command.command_path} --help)" if command else ""
        _fail(error.format_message() + more, error.exit_code)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            named = error.filename is not None
            _fail(str(cannot_write(error.filename, error)) if named else REMEDIES[error.errno])
        if error.filename is None:
            raise
        _fail(f"'{error.filename}': {error.strerror}: check the path and its permissions")
    except Interrupted as interrupted:
        end(interrupted)


def _fail(text: str, status: int = 1) -> NoReturn:
    click.echo(f"dspark: {' '.join(text.split())}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
