"""The chain that makes a drafter: synthesise -> cache -> fit -> calibrate, all in one folder.

Each stage reads what the one before left there, goes on where a kill stopped it and changes nothing
when it is done:

    conversations.jsonl   what the target was asked and answered
    cache/                its states
    best/, curve.jsonl    the best drafter so far, and how training went
    drafter/              the finished checkpoint with its calibration.json; reliability.png, .svg
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch

from dspark.config import ModelsConfig, TrainConfig
from dspark.data.builtin import builtin_names, builtin_prompts
from dspark.data.prompts import read_prompts
from dspark.decode.environment import resolve_device, resolve_precision, set_threads
from dspark.errors import UserError, nearest
from dspark.models.calibration import write_calibration
from dspark.models.checkpoint import load_drafter, save_drafter
from dspark.models.drafter import DSparkDrafter
from dspark.models.prepare import PreparedModel, prepare_target
from dspark.models.target import Target, load_target
from dspark.models.tokenizer import ChatTokenizer, load_tokenizer
from dspark.report.reliability import plot_reliability
from dspark.signals import Interrupted
from dspark.train.cache import StateCache, write_cache
from dspark.train.calibrate import calibrate
from dspark.train.confidence import refit_confidence
from dspark.train.evaluate import draft_response, visited_blocks
from dspark.train.start import check_shape, load_start, spread_layers
from dspark.train.synthesize import read_conversations, synthesize
from dspark.train.trainer import fit

STAGES = ("synthesise", "cache", "fit", "calibrate")


def run_chain(config: ModelsConfig, store: Path, out: Path, stage: str | None = None) -> None:
    """Run one stage of the chain, or all.

    Args:
        store: where prepared targets lie.
        out: the folder of this training.

    Raises:
        UserError: an unknown stage; a stage's input is missing; no drafter of this shape fits the
            target.
    """
    if stage is not None and stage not in STAGES:
        raise UserError(f"no training stage '{stage}': {nearest(stage, STAGES)}")
    train = config.drafter.train
    if train is None:
        raise UserError(f"drafter '{config.drafter.name}' has no train settings")
    set_threads(None)
    prepared = prepare_target(config.target, store)
    device = resolve_device(train.device, "drafter.train.device")
    if "LOCAL_RANK" in os.environ:
        if stage != "fit":
            raise UserError("under torchrun only the fit stage can run: add --stage fit")
        device = f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device
    precision = resolve_precision(train.precision, device)
    dtype, trusted = getattr(torch, precision.value), prepared.trust_remote_code
    target = load_target(prepared.path, device, dtype, trusted)
    check_shape(train.shape, target)
    if train.start is not None:
        load_start(train.start, train.shape, target)
    target.pack()
    out.mkdir(parents=True, exist_ok=True)
    for name in STAGES if stage is None else (stage,):
        try:
            _run_stage(name, target, prepared, train, out)
        except Interrupted as interrupted:
            interrupted.kept = f"what stage '{name}' wrote to '{out}' is kept"
            raise


def _run_stage(
    name: str, target: Target, prepared: PreparedModel, train: TrainConfig, out: Path
) -> None:
    if name == "synthesise":
        tokenizer = load_tokenizer(prepared.path, prepared.trust_remote_code)
        _synthesise(target, tokenizer, train, out)
    elif name == "cache":
        _cache(target, train, out)
    elif name == "fit":
        fit(target, StateCache(out / "cache"), train, out)
    else:
        _calibrate(target, train, out)


def _synthesise(target: Target, tokenizer: ChatTokenizer, train: TrainConfig, out: Path) -> None:
    own = [prompt.turns[0] for file in train.prompt_files for prompt in read_prompts(file)]
    synthesize(
        target,
        tokenizer,
        out / "conversations.jsonl",
        prompts=train.prompts,
        max_new_tokens=train.max_new_tokens,
        seed=train.seed,
        own=own,
        forbidden=_evaluation_turns(),
    )


def _evaluation_turns() -> list[str]:
    """The user turns of the prompts that ship with the project, which measure the drafter later."""
    prompts = [prompt for name in builtin_names() for prompt in builtin_prompts(name)]
    return [turn for prompt in prompts for turn in prompt.turns]


def _cache(target: Target, train: TrainConfig, out: Path) -> None:
    conversations = read_conversations(out / "conversations.jsonl")[: train.prompts]
    # Own prompts come first in the file, and the first conversations validate and calibrate.
    random.Random(train.seed).shuffle(conversations)
    shape = train.shape
    write_cache(
        target,
        conversations,
        shape.target_layer_ids or spread_layers(shape.taps, target.num_layers),
        out / "cache",
        shard_tokens=train.shard_tokens,
        max_bytes=int(train.cache_gb * 1e9),
    )


def _calibrate(target: Target, train: TrainConfig, out: Path) -> None:
    """Fit the confidence head on half of the calibration conversations, temperatures on the others.

    Both are measured on the held-out ones.
    """
    drafter = load_drafter(out / "best", target)
    cache = StateCache(out / "cache")
    first, end = train.held_out, train.held_out + train.calibration
    middle = (first + end) // 2
    refit_confidence(drafter, (cache[index] for index in range(first, middle)))
    calibration = calibrate(
        *outcomes(drafter, cache, range(middle, end)),
        *outcomes(drafter, cache, range(train.held_out)),
    )
    (out / "drafter").mkdir(exist_ok=True)
    write_calibration(out / "drafter", calibration)
    save_drafter(drafter, out / "drafter", torch.bfloat16)  # config.json last: it says "done"
    plot_reliability(calibration, out / "reliability.png")


def outcomes(
    drafter: DSparkDrafter, cache: StateCache, indices: range
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Confidence logits, survival and validity [N, B] of the blocks that a decoder would draft."""
    drafts = (draft_response(drafter, cache[index]) for index in indices)
    return visited_blocks(drafts, drafter.block_size)
