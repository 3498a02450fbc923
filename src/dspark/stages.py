"""The stages of the DAG, one function each: files in, files out. The command line calls these.

train -> prepare -> prompts -> bench -> summarise -> table -> track; a drafter that exists already is
not trained. Nothing here knows of Snakemake; each stage runs alone on the files that the one before
it left.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import click

from dspark.config import (
    History,
    JobConfig,
    ModelsConfig,
    TrackingConfig,
    digest,
    from_yaml,
    to_yaml,
)
from dspark.errors import UserError
from dspark.files import write_text


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
    from dspark.data.prompts import write_prompts

    job: JobConfig = from_yaml(JobConfig, config)
    write_prompts(out, prepare_prompts(job.dataset))


def bench(
    config: Path,
    prompt_file: Path,
    models: Path,
    out: Path,
    profiles: Path,
    threads: int | None = None,
) -> None:
    """Run one dataset's job; writes requests.parquet, lossless.json and environment.json to `out`.

    `profiles` keeps the step curves of this machine, for runs that schedule their verification.
    Finished requests are journalled in `out` while the job runs, under a name that holds the digest
    of everything that decides the numbers: a killed job goes on, a changed one starts anew.
    """
    import torch

    from dspark.data.builtin import warmup_prompts
    from dspark.data.prompts import read_prompts
    from dspark.decode.bench import Job, run_job
    from dspark.decode.environment import describe, resolve_device, set_threads
    from dspark.decode.profile import step_curve
    from dspark.metrics.records_io import write_records
    from dspark.models.checkpoint import load_drafter
    from dspark.models.prepare import PreparedModel
    from dspark.models.target import load_target
    from dspark.models.tokenizer import load_tokenizer

    job_config: JobConfig = from_yaml(JobConfig, config)
    device = resolve_device(job_config.engine.device)
    set_threads(job_config.engine.threads or threads)
    loaded = [PreparedModel.read(models / name) for name in ("target.json", "drafter.json")]
    target = load_target(loaded[0].path, device, getattr(torch, job_config.engine.precision.value))
    drafter = None
    if any(run.k for run in job_config.runs.values()):
        drafter = load_drafter(loaded[1].path, target)
        click.echo(f"drafter '{loaded[1].name}': embedding and LM head are the target's", err=True)
    for model in (target, drafter):
        if model is not None:
            model.pack()
    tokenizer, warmup = load_tokenizer(loaded[0].path), warmup_prompts()
    environment = describe(device, digest(job_config))
    curves = {}
    for name, run in job_config.runs.items():
        if run.schedule and drafter is not None:
            facts = ("device", "threads", "torch", "transformers", "dspark")
            identity = {
                **{fact: environment[fact] for fact in facts},
                "target": loaded[0].files,
                "drafter": loaded[1].files,
                "precision": job_config.engine.precision.value,
            }
            text = [
                token
                for p in warmup
                for token in tokenizer.encode_turn(p.turns[:1], [], job_config.dataset.chat)
            ]
            curves[name] = step_curve(
                profiles, identity, target, drafter, run.k, job_config.engine.concurrency, text
            )
    environment["step_curves"] = {name: curve.points() for name, curve in curves.items()}
    job = Job(job_config, read_prompts(prompt_file), warmup, target, drafter, tokenizer, curves)
    out.mkdir(parents=True, exist_ok=True)
    inputs = [config, prompt_file, models / "target.json", models / "drafter.json"]
    journal = out / f"journal-{_digest_files(inputs)}.jsonl"
    records = run_job(job, journal)
    verdicts = _lossless(job, records)
    write_text(out / "environment.json", json.dumps(environment, indent=2, sort_keys=True) + "\n")
    write_text(out / "lossless.json", json.dumps(verdicts, indent=2, sort_keys=True) + "\n")
    write_records(out / "requests.parquet", records)
    for old in out.glob("journal-*.jsonl"):
        old.unlink()


def _digest_files(paths: list[Path]) -> str:
    """First 16 hex digits of a sha256 over the files' contents."""
    state = hashlib.sha256()
    for path in paths:
        state.update(hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()[:16]


def _lossless(job: Any, records: list[Any]) -> dict[str, dict[str, Any]]:
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


def summarise(folder: Path, models: Path) -> None:
    """Turn one dataset's records into <run>/summary.json for each of its runs."""
    from dspark.data.prompts import prompts_digest, read_prompts
    from dspark.metrics.records_io import read_records
    from dspark.metrics.summary import summarise_job, write_summary
    from dspark.models.prepare import PreparedModel

    job: JobConfig = from_yaml(JobConfig, folder / "config.yaml")
    asked = read_prompts(folder / "prompts.jsonl")
    environment = _read_json(folder / "environment.json")
    target, drafter = (
        PreparedModel.read(models / f"{name}.json") for name in ("target", "drafter")
    )
    settings = {
        "device": environment["device"],
        "device_uuid": environment["device_uuid"],
        "threads": environment["threads"],
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


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"'{path}' cannot be read ({error}): run the dataset's job again"
        ) from error


def table(summaries: list[Path], out: Path) -> str:
    """Write the markdown table of these cells, in this order, and return it."""
    from dspark.report.table import write_table

    return write_table(summaries, out)


def track(
    results: Path,
    summaries: list[Path],
    tracking: TrackingConfig,
    out: Path,
    training: Path | None = None,
) -> None:
    """Mirror the cells, and the training in folder `training`, into MLflow; writes run ids to `out`."""
    from dspark.tracking.mlflow_store import track as mirror

    mirror(results, tracking, out, summaries, training)


def train(config: ModelsConfig, store: Path, out: Path, stage: str | None = None) -> None:
    """Make a drafter for a target in `out`: one stage of its chain, or all of them.

    Writes `out`/config.yaml too, which says how the drafter was made, unless it says so already.
    """
    from dspark.train.chain import run_chain

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
