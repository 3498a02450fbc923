"""Builds a small results tree with plausible numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
    to_yaml,
)

ARMS = {
    "baseline": RunConfig(),
    "dspark_k3": RunConfig(mode=Mode.speculative, k=3),
    "dspark_k7": RunConfig(mode=Mode.speculative, k=7),
}
SHA = "0123456789abcdef0123456789abcdef01234567"


def summary(dataset: str, run: str, **changed: Any) -> dict[str, Any]:
    """One cell's numbers: scalars, a list, nested objects, and values that are no metrics."""
    k = ARMS[run].k
    return {
        "dataset": dataset,
        "run": run,
        "requests": 3,
        "output_tok_s": 41.5 + 6.25 * k,
        "speedup": 1 + 6.25 * k / 41.5,
        "ttft_ms_p95": 88.125,
        "accept_rate": 0.61 if k else None,
        "accept_p": [0.78, 0.61, 0.44] if k else None,
        "settings": {
            "device": "Intel Xeon",
            "git_sha": SHA,
            "git_dirty": False,
            "threads": 4,
            "target": "tiny",
            "versions": {"torch": "2.13.0"},
        },
        "by_device": [{"windows": 2}],
        "lossless": {"checked": True, "identical_requests": 3, "differences": [{"position": 7}]},
        **changed,
    }


def write_dataset(root: Path, dataset: str, arms: Iterable[str] = ARMS) -> None:
    """All files of one dataset with its arms."""
    base = root / dataset
    base.mkdir(parents=True)
    job = JobConfig(
        experiment=root.name,
        dataset=DatasetConfig(name=dataset),
        runs={arm: ARMS[arm] for arm in arms},
        engine=EngineConfig(concurrency=4),
    )
    (base / "config.yaml").write_text(to_yaml(job))
    prompts = [{"id": f"{dataset}-{i}", "turns": [f"Question {i}?"]} for i in range(3)]
    (base / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    for run in arms:
        write_summary(root, dataset, run)


def write_summary(root: Path, dataset: str, run: str, **changed: Any) -> Path:
    path = root / dataset / run / "summary.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(summary(dataset, run, **changed), indent=2))
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
