"""What a cell was made from: its prompts, its target and its drafter. Knows nothing of MLflow.

MLflow keeps all three as datasets of a run, each with its context: names, digests and where it is
from, so that one finds all runs on the same prompts or with the same drafter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.config import DatasetConfig, DrafterConfig, PromptSource, TargetConfig
from dspark.data.prompts import prompts_digest, read_prompts

DIGEST_LENGTH = 32  # of a sha256's 64 digits: MLflow takes 36 at most


@dataclass(frozen=True)
class Input:
    """One thing that a cell was made from."""

    context: str  # what it served as: eval (the prompts), target or drafter
    name: str
    digest: str
    source_type: str  # one that MLflow knows, for its pages link to some of them
    source: dict[str, Any]
    profile: dict[str, Any]  # what else there is to know


def prompts_input(config: DatasetConfig, path: Path) -> Input:
    """The prompts of a dataset.

    Args:
        path: the prompts.jsonl that was asked.

    Raises:
        UserError: the file is absent or malformed.
    """
    prompts = read_prompts(path)
    digest = prompts_digest(prompts)
    source_type = "local"
    source: dict[str, Any] = {"uri": config.path or path.as_posix()}
    if config.source is PromptSource.hub:
        source_type = "hugging_face"
        source = {"path": config.repo, "data_files": config.file, "revision": config.revision}
    return Input(
        context="eval",
        name=config.name,
        digest=digest[:DIGEST_LENGTH],
        source_type=source_type,
        source=source,
        profile={
            "num_rows": len(prompts),
            "turns": sum(len(prompt.turns) for prompt in prompts),
            "source": config.source.value,
            "sha256": digest,
        },
    )


def model_input(
    context: str, config: TargetConfig | DrafterConfig, prepared: Mapping[str, Any]
) -> Input:
    """A target or drafter, by the checksums of all its files.

    Args:
        context: target or drafter.
        config: what was asked for.
        prepared: content of target.json or drafter.json.
    """
    files = dict(prepared["files"])
    of_files = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    source_type, source = "local", {"uri": prepared["path"]}
    if config.repo is not None:
        source_type, source = "hub", {"uri": f"hf://{config.repo}@{config.revision}"}
    return Input(
        context=context,
        name=config.name,
        digest=of_files[:DIGEST_LENGTH],
        source_type=source_type,
        source=source,
        profile={
            "source": config.source.value,
            "revision": prepared["revision"],
            "sha256": {name: digest for name, digest in files.items() if _is_weights(name)},
        },
    )


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")
