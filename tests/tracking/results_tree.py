"""Builds a small results tree as the stages leave it: simulated records, summarised by the real stage."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from dspark import stages
from dspark.config import (
    DatasetConfig,
    DrafterConfig,
    DrafterShape,
    EngineConfig,
    JobConfig,
    Mode,
    ModelsConfig,
    ModelSource,
    RunConfig,
    TargetConfig,
    TrainConfig,
    digest,
    to_yaml,
)
from dspark.data.prompts import Prompt, write_prompts
from dspark.decode.records import RequestRecord
from dspark.decode.usage import USAGE, WindowUsage, write_usage
from dspark.metrics.lossless import judge
from dspark.metrics.records_io import write_records
from dspark.models.prepare import PreparedModel

ARMS = {
    "baseline": RunConfig(),
    "dspark_k3": RunConfig(mode=Mode.speculative, k=3),
    "dspark_k7": RunConfig(mode=Mode.speculative, k=7),
}
SHA = "0123456789abcdef0123456789abcdef01234567"
REQUESTS = 6
WINDOWS = 2
BEGAN = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
ENVIRONMENT = {
    "device": "Intel Xeon",
    "device_uuid": None,
    "precision": "float32",
    "threads": 4,
    "cuda_graphs": False,
    "kernels": False,
    "git_sha": SHA,
    "git_dirty": False,
    "dspark": "0.1.0",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "step_curves": {},
}
WEIGHTS = {"target": "a5" * 32, "drafter": "d0" * 32}  # sha256


def simulate(dataset: str, run: str, k: int, turn: float, tokens: int = 24) -> list[RequestRecord]:
    """One request after the other; a draft token survives with probability 0.6.

    Args:
        turn: seconds that lie between the starts of two windows, in which other arms have theirs.
    """
    generator = np.random.default_rng([k, *dataset.encode()])
    records = []
    now = 1000.0 + 10 * k
    for index in range(REQUESTS):
        window = index * WINDOWS // REQUESTS
        if records and window > records[-1].window:
            now = 1000.0 + 10 * k + window * turn
        submit, now = now, now + 0.2
        first, left, steps = now, tokens - 1, []
        while left:
            now += 0.05 + 0.004 * k
            accepted = int(np.cumprod(generator.random(k) < 0.6).sum())
            emitted = min(accepted + 1, left)
            steps.append((now, emitted, accepted, left < k + 1))
            left -= emitted
        records.append(
            RequestRecord(
                prompt_id=f"{dataset}-{index}",
                turn=0,
                dataset=dataset,
                run=run,
                window=window,
                prompt_tokens=9,
                output_tokens=tokens,
                output_token_ids=list(range(tokens)),
                finish_reason="length",
                t_submit=submit,
                t_first=first,
                t_last=now,
                step_t=[step[0] for step in steps],
                step_emitted=[step[1] for step in steps],
                step_drafted=[k] * len(steps),
                step_verified=[k] * len(steps),
                step_accepted=[step[2] for step in steps],
                step_cut=[step[3] for step in steps],
            )
        )
    return records


def usage_of(records: Iterable[RequestRecord]) -> list[WindowUsage]:
    """What the machine showed of the windows of these records."""
    members: dict[tuple[str, int], list[RequestRecord]] = {}
    for record in records:
        members.setdefault((record.run, record.window), []).append(record)
    return [
        WindowUsage(
            run=run,
            window=window,
            began=(BEGAN + timedelta(seconds=inside[0].t_submit - 1000)).isoformat(),
            seconds=inside[-1].t_last - inside[0].t_submit,
            cpu_utilization_percentage=60.0 + window,
            process_cpu_percentage=180.0,
            system_memory_usage_megabytes=4000.0,
            process_memory_megabytes=1500.0 + 100 * window,
        )
        for (run, window), inside in members.items()
    ]


def write_models(root: Path) -> None:
    """What `dspark prepare` leaves of target and drafter, but for the models themselves."""
    folder = root / "models"
    if folder.is_dir():
        return
    folder.mkdir(parents=True)
    models = ModelsConfig(
        target=TargetConfig(name="tiny", source=ModelSource.local, path="/models/tiny"),
        drafter=DrafterConfig(
            name="tiny_dspark",
            source=ModelSource.hub,
            repo="someone/tiny-dspark",
            revision="abc123",
        ),
    )
    (folder / "config.yaml").write_text(to_yaml(models))
    for name, sha256 in WEIGHTS.items():
        config = getattr(models, name)
        files = {"config.json": "c0" * 32, "model.safetensors": sha256}
        PreparedModel(config.name, config.source.value, str(folder), config.revision, files).write(
            folder / f"{name}.json"
        )


def write_dataset(root: Path, dataset: str, arms: Iterable[str] = ARMS) -> None:
    """All files of one dataset with its arms; those of the models too, where they are not yet there."""
    arms = list(arms)
    base = root / dataset
    base.mkdir(parents=True)
    write_models(root.parent if "=" in root.name else root)
    job = JobConfig(
        experiment=root.name,
        dataset=DatasetConfig(name=dataset),
        runs={arm: ARMS[arm] for arm in arms},
        engine=EngineConfig(concurrency=1),
    )
    (base / "config.yaml").write_text(to_yaml(job))
    write_prompts(
        base / "prompts.jsonl",
        [Prompt(f"{dataset}-{i}", [f"Question {i}?"]) for i in range(REQUESTS)],
    )
    records = [
        record
        for arm in arms
        for record in simulate(dataset, arm, ARMS[arm].k, turn=30 * len(arms))
    ]
    write_records(base / "requests.parquet", records)
    write_usage(base / USAGE, usage_of(records))
    environment = {**ENVIRONMENT, "config_digest": digest(job)}
    (base / "environment.json").write_text(json.dumps(environment))
    verdicts = {arm: judge([], REQUESTS, "float32") for arm in arms if arm != "baseline"}
    (base / "lossless.json").write_text(json.dumps(verdicts))
    stages.summarise(base, (root.parent if "=" in root.name else root) / "models")


def summary(root: Path, dataset: str, run: str) -> dict[str, Any]:
    """One cell's summary."""
    return json.loads((root / dataset / run / "summary.json").read_text())


def write_summary(root: Path, dataset: str, run: str, **changed: Any) -> Path:
    """Write a cell's summary once more, with some of its fields changed."""
    path = root / dataset / run / "summary.json"
    path.write_text(json.dumps({**summary(root, dataset, run), **changed}, indent=2))
    return path


def curve(steps: int, every: int = 2, **changed: float) -> list[dict[str, float]]:
    """What a training notes: losses of each step, acceptance every so many steps."""
    lines: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        losses = {"ce": 4.0 / step, "l1": 1.5 / step, "confidence": 0.5}
        lines.append({"step": step, **losses, "lr": 1e-3, "tokens_per_s": 900.0, **changed})
        if step % every == 0:
            lines.append({"step": step, "accept_len_k3": 1 + step / 10, "accept_p1_k3": step / 20})
    return lines


def write_curve(folder: Path, lines: list[dict[str, float]]) -> None:
    (folder / "curve.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_training(folder: Path, steps: int = 6) -> Path:
    """All files of a finished training that tracking reads."""
    (folder / "drafter").mkdir(parents=True)
    train = TrainConfig(lr=2e-3, shape=DrafterShape(layers=1))
    models = ModelsConfig(
        target=TargetConfig(name="tiny", source=ModelSource.local, path="/models/tiny"),
        drafter=DrafterConfig(name="mine", source=ModelSource.train, train=train),
    )
    (folder / "config.yaml").write_text(to_yaml(models))
    (folder / "drafter" / "calibration.json").write_text('{"temperatures": [1.25, 0.75]}')
    (folder / "reliability.png").write_bytes(b"a picture")
    write_curve(folder, curve(steps))
    return folder
