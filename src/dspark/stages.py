"""The stages of the DAG, one function each: files in, files out. The command line calls these.

train -> prepare -> prompts -> bench -> merge -> summarise -> table -> track; a drafter that exists
already is not trained, and a dataset that is not cut into shards not merged. Nothing here knows of
Snakemake; each stage runs alone on the files that the one before it left.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dspark.config import (
    DatasetConfig,
    History,
    JobConfig,
    ModelsConfig,
    Precision,
    TrackingConfig,
    digest,
    from_yaml,
    to_yaml,
)
from dspark.errors import UserError, nearest
from dspark.files import write_text

if TYPE_CHECKING:
    from dspark.data.prompts import Prompt
    from dspark.decode.bench import Job
    from dspark.decode.records import RequestRecord
    from dspark.decode.schedule import StepCurve
    from dspark.models.drafter import DSparkDrafter
    from dspark.models.prepare import PreparedModel
    from dspark.models.target import Target
    from dspark.models.tokenizer import ChatTokenizer
    from dspark.report.parts import ArmParts

OUTPUTS = ("environment.json", "lossless.json", "requests.parquet")  # of bench and merge
JOURNALS = ("journal-*.jsonl", "journal-*.usage")  # of a job that is not done yet
# Facts of the environment that decide the numbers, beside the job's inputs.
DECIDING = ("device", "precision", "threads", "kernels", "torch", "transformers", "dspark")


def prepare(config: Path, store: Path, out: Path, trained: Path | None = None) -> None:
    """Make target and drafter available; writes `out`/target.json and `out`/drafter.json.

    `trained` is the checkpoint of a drafter whose source is train.
    """
    from dspark.models.prepare import prepare_drafter, prepare_target

    models: ModelsConfig = from_yaml(ModelsConfig, config)
    out.mkdir(parents=True, exist_ok=True)
    prepare_target(models.target, store).write(out / "target.json")
    prepare_drafter(models.drafter, store, trained).write(out / "drafter.json")


def prompts(config: Path, out: Path) -> None:
    """Write one dataset's prompts.jsonl from wherever its source is."""
    from dspark.data.prepare import prepare_prompts
    from dspark.data.prompts import split_prompts, write_prompts

    job: JobConfig = from_yaml(JobConfig, config)
    asked = prepare_prompts(job.dataset)
    split_prompts(job.dataset, asked)  # too many shards: said here, before jobs queue for devices
    write_prompts(out, asked)


def shard_folder(folder: Path, shard: int, shards: int) -> Path:
    """Where shard `shard` (from 1) of the dataset in `folder` is measured; uncut, in `folder`."""
    return folder if shards == 1 else folder / "shards" / f"{shard}-of-{shards}"


def bench(
    config: Path,
    prompt_file: Path,
    models: Path,
    out: Path,
    profiles: Path,
    threads: int | None = None,
    shard: int = 1,
) -> None:
    """Run one dataset's job, or one shard's; writes requests.parquet, lossless.json, environment.json.

    They go to `out`, or to the shard's folder in it, with usage.jsonl beside them. `profiles` keeps the
    step curves of this machine, for runs that schedule their verification. Finished requests are
    journalled beside the results while the job runs, under a name that holds the digest of everything
    that decides the numbers: a killed job goes on, a changed one starts anew, and one that is whole
    already runs nothing.
    """
    from dspark.data.prompts import read_prompts
    from dspark.decode.environment import (
        describe,
        resolve_device,
        resolve_precision,
        set_kernels,
        set_threads,
    )
    from dspark.decode.journal import job_identity
    from dspark.locks import sole_use
    from dspark.models.prepare import PreparedModel

    job_config: JobConfig = from_yaml(JobConfig, config)
    asked = _prompts_of_shard(job_config.dataset, read_prompts(prompt_file), shard)
    folder = shard_folder(out, shard, job_config.dataset.shards)
    with sole_use(folder):
        _remove(folder, *(f"{name}.*.part" for name in OUTPUTS))  # a kill left them half written
        device = resolve_device(job_config.engine.device)
        set_threads(job_config.engine.threads or threads)
        set_kernels(job_config.engine, device)
        model_files = [models / name for name in ("target.json", "drafter.json")]
        prepared = [PreparedModel.read(path) for path in model_files]
        environment = describe(device, digest(job_config))
        job_config.engine.precision = resolve_precision(job_config.engine.precision, device)
        environment["precision"] = job_config.engine.precision.value
        environment["job"] = job_identity(
            [config, prompt_file, *model_files], {fact: environment[fact] for fact in DECIDING}
        )
        if _is_whole(folder, environment["job"]):
            _remove(folder, *JOURNALS)  # a kill came before that
            click.echo(
                f"'{folder}' is whole already: delete its requests.parquet to measure it again",
                err=True,
            )
            return
        for model, path in zip(prepared, model_files, strict=True):
            model.check_unchanged(path)
        job = _load_job(job_config, asked, prepared, device, environment, profiles)
        _measure(job, folder, shard, environment)


def profile(
    config: Path,
    prompt_file: Path,
    models: Path,
    run: str,
    requests: int,
    profiles: Path,
    threads: int | None = None,
) -> str:
    """Where the time of one cell goes, beside its baseline: a table, and the limits below it.

    Args:
        run: the cell's run.
        requests: prompts to time, from the first on.

    Raises:
        UserError: the job has no such run, or it is the baseline; no steps follow each other.
    """
    from dspark.data.prompts import read_prompts
    from dspark.decode.environment import (
        describe,
        resolve_device,
        resolve_precision,
        set_kernels,
        set_threads,
    )
    from dspark.decode.parts import PARTS, read_bandwidth
    from dspark.metrics.cell import BASELINE
    from dspark.models.prepare import PreparedModel
    from dspark.report.parts import render_parts

    job_config: JobConfig = from_yaml(JobConfig, config)
    arms = [name for name in job_config.runs if name != BASELINE]
    if run not in arms:
        raise UserError(f"'{config}' has no run '{run}' beside its baseline: {nearest(run, arms)}")
    device = resolve_device(job_config.engine.device)
    set_threads(job_config.engine.threads or threads)
    set_kernels(job_config.engine, device)
    prepared = [PreparedModel.read(models / f"{name}.json") for name in ("target", "drafter")]
    environment = describe(device, digest(job_config))
    job_config.engine.precision = resolve_precision(job_config.engine.precision, device)
    environment["precision"] = job_config.engine.precision.value
    asked = read_prompts(prompt_file)[:requests]
    job = _load_job(job_config, asked, prepared, device, environment, profiles)
    baseline, arm = (_arm_parts(job, name) for name in (BASELINE, run))
    return render_parts(baseline, arm, read_bandwidth(job.engines[run].target.device), PARTS)


def _arm_parts(job: Job, run: str) -> ArmParts:
    from dspark.decode.parts import step_bytes, time_parts
    from dspark.metrics.acceptance import count_acceptance
    from dspark.metrics.steps import step_ms
    from dspark.report.parts import ArmParts

    engine, k = job.engines[run], job.config.runs[run].k
    laps, records = time_parts(job, run)
    ms = step_ms(records)
    if ms is None:
        raise UserError("no two steps follow each other without a prefill: profile more requests")
    context = sum(r.prompt_tokens + r.output_tokens // 2 for r in records) // len(records)
    return ArmParts(
        run=run,
        seconds=dict(laps.seconds),
        steps=len({t for record in records for t in record.step_t}),
        step_ms=ms,
        accept_len=count_acceptance(records, k).accept_len,
        bytes_read=step_bytes(engine.target, engine.drafter, len(engine.slots), k, context),
    )


def _prompts_of_shard(dataset: DatasetConfig, prompts: list[Prompt], shard: int) -> list[Prompt]:
    """The prompts of shard `shard`, counted from 1.

    Raises:
        UserError: the dataset has no such shard, or fewer prompts than shards.
    """
    from dspark.data.prompts import split_prompts

    if not 1 <= shard <= dataset.shards:
        raise UserError(
            f"dataset '{dataset.name}' has no shard {shard}: its shards are 1 to {dataset.shards}, "
            f"as datasets.{dataset.name}.shards says"
        )
    return split_prompts(dataset, prompts)[shard - 1]


def _load_job(
    config: JobConfig,
    asked: Sequence[Prompt],
    prepared: Sequence[PreparedModel],
    device: str,
    environment: dict[str, Any],
    profiles: Path,
) -> Job:
    """The job on target and drafter, ready to run; its step curves are added to `environment`."""
    import torch

    from dspark.data.builtin import warmup_prompts
    from dspark.decode.bench import Job
    from dspark.decode.draft import check_k
    from dspark.models.checkpoint import load_drafter
    from dspark.models.target import load_target
    from dspark.models.tokenizer import load_tokenizer

    path, trusted = prepared[0].path, prepared[0].trust_remote_code
    target = load_target(path, device, getattr(torch, config.engine.precision.value), trusted)
    drafter = None
    if any(run.k for run in config.runs.values()):
        drafter = load_drafter(prepared[1].path, target)
        click.echo(
            f"drafter '{prepared[1].name}': embedding and LM head are the target's", err=True
        )
        for name, run in config.runs.items():  # before anything is timed
            check_k(run.k, drafter, f"runs.{name}.k")
    for model in (target, drafter):
        if model is not None:
            model.pack()
    tokenizer = load_tokenizer(path, trusted)
    curves = _step_curves(config, prepared, environment, target, drafter, tokenizer, profiles)
    environment["step_curves"] = {name: curve.points() for name, curve in curves.items()}
    return Job(config, asked, warmup_prompts(), target, drafter, tokenizer, curves)


def _step_curves(
    config: JobConfig,
    prepared: Sequence[PreparedModel],
    environment: Mapping[str, Any],
    target: Target,
    drafter: DSparkDrafter | None,
    tokenizer: ChatTokenizer,
    profiles: Path,
) -> dict[str, StepCurve]:
    """The step curve of each run that schedules its verification; what `profiles` lacks is measured."""
    from dspark.data.builtin import warmup_prompts
    from dspark.decode.profile import step_curve

    if drafter is None:
        return {}
    identity = {
        **{fact: environment[fact] for fact in (*DECIDING, "gomp_spincount")},
        "target": prepared[0].files,
        "drafter": prepared[1].files,
    }
    text = [
        token
        for prompt in warmup_prompts()
        for token in tokenizer.encode_turn(prompt.turns[:1], [], config.dataset.chat)
    ]
    return {
        name: step_curve(
            profiles,
            identity,
            target,
            drafter,
            run.k,
            config.engine.concurrency,
            text,
            config.engine.cuda_graphs,
        )
        for name, run in config.runs.items()
        if run.schedule
    }


def _measure(job: Job, folder: Path, shard: int, environment: Mapping[str, Any]) -> None:
    """Run the job, from its journal on where `folder` holds one, and write what it makes."""
    from dspark.decode.bench import run_job
    from dspark.decode.journal import telling_what_is_kept
    from dspark.decode.memory import check_engines, room_explained
    from dspark.decode.usage import USAGE, keep_usage

    journal = folder / f"journal-{environment['job']}.jsonl"
    for other in sorted(set(folder.glob("journal-*.jsonl")) - {journal}):
        click.echo(f"'{other}' is of other settings, code or another device: not used", err=True)
    engines = list(job.engines.values())
    check_engines(engines)
    with telling_what_is_kept(journal, job.requests), room_explained(engines):
        records = run_job(job, journal)
        for record in records:
            record.shard = shard
        verdicts = _lossless(job, records)
        keep_usage(journal, folder / USAGE)
        _write_job(folder, records, verdicts, {**environment, "cuda_graphs": job.cuda_graphs})
    _remove(folder, *JOURNALS)


def _is_whole(out: Path, identity: str) -> bool:
    """Whether `out` holds all that the job of this identity makes."""
    if not all((out / name).is_file() for name in OUTPUTS):
        return False
    try:
        environment = _read_json(out / "environment.json")
    except UserError:
        return False
    return isinstance(environment, dict) and environment.get("job") == identity


def _remove(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink()


def _lossless(job: Job, records: Sequence[RequestRecord]) -> dict[str, dict[str, Any]]:
    """Compare each arm's output tokens with the baseline's, with the target's margin where they differ."""
    from dspark.decode.bench import top_two_margin
    from dspark.metrics.cell import BASELINE
    from dspark.metrics.lossless import compare_arms, judge

    baseline = [record for record in records if record.run == BASELINE]
    outputs = {(record.prompt_id, record.turn): record.output_token_ids for record in baseline}
    target = job.engines[BASELINE].target
    verdicts = {}
    for run in job.config.runs:
        if run == BASELINE:
            continue
        arm = [record for record in records if record.run == run]
        model_history = job.config.dataset.history is History.model
        differences = compare_arms(baseline, arm, model_history)
        for difference in differences:
            if difference.inherited:
                continue
            name, turn = difference.request_id.rsplit("#", 1)
            answers = [outputs[name, earlier] for earlier in range(int(turn))]
            prefix = outputs[name, int(turn)][: difference.position]
            tokens = job.prompt_tokens(name, int(turn), answers) + prefix
            difference.margin = top_two_margin(target, tokens)
        verdicts[run] = judge(
            differences,
            len(baseline),
            job.config.engine.precision.value,
            temperature=job.config.sampling.temperature,
        )
    return verdicts


def _write_job(
    folder: Path,
    records: Sequence[RequestRecord],
    verdicts: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> None:
    from dspark.metrics.records_io import write_records

    # Last and gone first: where it is, the two others are of the same job.
    (folder / "requests.parquet").unlink(missing_ok=True)
    write_text(
        folder / "environment.json", json.dumps(environment, indent=2, sort_keys=True) + "\n"
    )
    write_text(folder / "lossless.json", json.dumps(verdicts, indent=2, sort_keys=True) + "\n")
    write_records(folder / "requests.parquet", records)


def merge(folder: Path) -> None:
    """Put a dataset's shards together: `folder` then holds what an uncut dataset's job leaves there.

    Raises:
        UserError: the dataset is not cut into shards; a shard is absent, or was measured on other
            prompts or under other conditions than the rest.
    """
    from dspark.data.prompts import read_prompts
    from dspark.decode.usage import USAGE, merge_usage, write_usage
    from dspark.metrics.records_io import read_records
    from dspark.metrics.shards import merge_environments, merge_records, merge_verdicts

    job: JobConfig = from_yaml(JobConfig, folder / "config.yaml")
    shards = job.dataset.shards
    if shards == 1:
        raise UserError(
            f"dataset '{job.dataset.name}' is not cut into shards: there is nothing to merge"
        )
    parts = [shard_folder(folder, shard, shards) for shard in range(1, shards + 1)]
    environment = merge_environments(
        job.dataset.name, [_read_json(part / "environment.json") for part in parts]
    )
    records = merge_records(
        job,
        read_prompts(folder / "prompts.jsonl"),
        [read_records(part / "requests.parquet") for part in parts],
    )
    verdicts = merge_verdicts([_read_json(part / "lossless.json") for part in parts], records)
    write_usage(folder / USAGE, merge_usage([part / USAGE for part in parts]))
    _write_job(folder, records, verdicts, environment)


def summarise(folder: Path, models: Path) -> None:
    """Turn one dataset's records into <run>/summary.json for each of its runs."""
    from dspark.data.prompts import prompts_digest, read_prompts
    from dspark.metrics.records_io import read_records
    from dspark.metrics.summary import summarise_job, write_summary
    from dspark.models.prepare import PreparedModel

    job: JobConfig = from_yaml(JobConfig, folder / "config.yaml")
    asked = read_prompts(folder / "prompts.jsonl")
    environment = _read_environment(folder / "environment.json")
    job.engine.precision = Precision(environment["precision"])  # what auto came to
    target, drafter = (
        PreparedModel.read(models / f"{name}.json") for name in ("target", "drafter")
    )
    settings = {
        "config_digest": environment["config_digest"],
        "device": environment["device"],
        "device_uuid": environment["device_uuid"],
        "threads": environment["threads"],
        "cuda_graphs": environment["cuda_graphs"],
        "kernels": environment["kernels"],
        "git_sha": environment["git_sha"],
        "git_dirty": environment["git_dirty"],
        "target": target.name,
        "target_revision": target.revision,
        "target_sha256": target.files.get("model.safetensors"),
        "drafter": drafter.name,
        "drafter_revision": drafter.revision,
        "drafter_sha256": drafter.files.get("model.safetensors"),
        "versions": {name: environment[name] for name in ("dspark", "torch", "transformers")},
        "prompts_sha256": prompts_digest(asked),
        "step_curves": environment["step_curves"],
    }
    cells = summarise_job(
        read_records(folder / "requests.parquet"),
        job,
        expected_requests=sum(len(prompt.turns) for prompt in asked),
        settings=settings,
        lossless=_read_json(folder / "lossless.json"),
    )
    for cell in cells:
        (folder / cell.run).mkdir(exist_ok=True)
        write_summary(folder / cell.run / "summary.json", cell)


class _Environment(dict[str, Any]):
    """Facts that name their file when one is missing."""

    path: Path

    def __missing__(self, key: str) -> Any:
        raise UserError(
            f"'{self.path}' lacks '{key}': it was written by another version, run the dataset's job "
            "again"
        )


def _read_environment(path: Path) -> _Environment:
    environment = _Environment(_read_json(path))
    environment.path = path
    return environment


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"'{path}' cannot be read ({error}): run the dataset's job again"
        ) from error


def table(
    summaries: list[Path], out: Path, allow_unpaired: bool = False, form: str = "markdown"
) -> str:
    """Write the table of these cells, in this order, as markdown or another form, and return it.

    `allow_unpaired` marks a speedup whose arms were not measured alike instead of refusing it.
    """
    if form == "markdown":
        from dspark.report.table import write_table

        return write_table(summaries, out, allow_unpaired)
    from dspark.report.export import write_export

    return write_export(summaries, out, form, allow_unpaired)


def summaries_in(results: Path) -> list[Path]:
    """The summaries of an experiment's folder, those of a sweep's points too, by name.

    Raises:
        UserError: there are none.
    """
    found = sorted([*results.glob("*/*/summary.json"), *results.glob("*=*/*/*/summary.json")])
    if not found:
        raise UserError(f"no summary.json under '{results}': run the experiment first")
    return found


def plots(summaries: list[Path], out: Path, allow_unpaired: bool = False) -> list[Path]:
    """Draw these cells into `out`, each plot as PNG and SVG; returns the PNG files."""
    from dspark.report.plots import write_plots

    return write_plots(summaries, out, allow_unpaired)


def compare(results: Path, other: Path | None) -> str:
    """Two experiments cell by cell, as markdown; without `other`, one beside the published table."""
    from dspark.report.compare import published_side, read_side, render_comparison

    first = read_side(str(results), summaries_in(results))
    second = published_side() if other is None else read_side(str(other), summaries_in(other))
    return render_comparison(first, second)


def track(
    results: Path,
    summaries: list[Path] | None,
    tracking: TrackingConfig,
    out: Path,
    training: Path | None = None,
) -> None:
    """Mirror the cells, and the training in folder `training`, into MLflow; writes run ids to `out`.

    Without `summaries` all cells in `results` are mirrored.
    """
    from dspark.tracking.mlflow_store import track as mirror

    mirror(results, tracking, out, summaries, training)


def train(config: ModelsConfig, store: Path, out: Path, stage: str | None = None) -> None:
    """Make a drafter for a target in `out`: one stage of its chain, or all of them.

    Writes `out`/config.yaml too, which says how the drafter was made, unless it says so already.
    """
    from dspark.decode.environment import resolve_device
    from dspark.memory import out_of_memory
    from dspark.train.chain import run_chain

    if config.drafter.train is not None:  # before the target is fetched
        resolve_device(config.drafter.train.device, "drafter.train.device")
    with out_of_memory(
        lambda: (
            "training ran out of memory: lower drafter.train.batch or drafter.train.anchors, or set "
            "drafter.train.precision=bfloat16"
        )
    ):
        run_chain(config, store, out, stage)
    text, path = to_yaml(config), out / "config.yaml"
    if not path.is_file() or path.read_text() != text:
        write_text(path, text)


def convert(drafter: Path, out: Path, to: str, target: Path, verifier: str | None = None) -> None:
    """Write the checkpoint `drafter`, made for `target`, to `out` in the other format."""
    from dspark.models.checkpoint import convert as convert_checkpoint
    from dspark.models.target import load_target

    as_stored: Any = "auto"  # transformers takes it for a dtype; what is copied keeps its bytes
    convert_checkpoint(drafter, out, to, load_target(target, "cpu", as_stored), verifier)
