"""Fitting a drafter to cached states: batches, steps, validation, resuming, several devices.

Everything random is a function of the seed and the step's number, and a checkpoint holds the weights
and the optimizer's state in float32, so a killed run goes on to the very weights that it would have
reached undisturbed. Under `torchrun` each process takes its share of a step's passes (DDP).
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dspark.config import LearningRate, TrainConfig, digest
from dspark.decode.sampling import named_generator
from dspark.errors import UserError
from dspark.models.checkpoint import save_drafter
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target
from dspark.progress import Bar
from dspark.train.blocks import (
    Batch,
    block_hidden,
    draw_anchors,
    flatten_slots,
    make_batch,
)
from dspark.train.cache import StateCache
from dspark.train.curve import Curve
from dspark.train.evaluate import draft_response, walk
from dspark.train.loss import draw_slots, dspark_loss, slot_weights
from dspark.train.optimizers import make_optimizers, set_rate
from dspark.train.resume import Progress, load_progress, save_progress
from dspark.train.start import (
    fold_tap_scale,
    load_start,
    new_drafter,
    start_from_bigrams,
    start_local,
    tap_scale,
    unfold_tap_scale,
)

SAMPLE = 16  # conversations whose taps the start is set by
SHOWN_K = (3, 7)  # accept lengths that validation reports


class BlockLoss(nn.Module):
    """A drafter with its losses: one module to call in a step, alone or under DDP.

    Args:
        scale: what taps are divided by [M*D], see `tap_scale`.
    """

    scale: Tensor
    to_draft: Tensor  # [V] draft token of each of the target's, -1 where there is none

    def __init__(self, drafter: DSparkDrafter, config: TrainConfig, scale: Tensor) -> None:
        super().__init__()
        self.drafter, self.config = drafter, config
        # No gradient passes a packed head.
        self.head = replace(drafter.lm_head, packed=None)
        self.losses = torch.compile(self._losses, dynamic=True) if config.compile else self._losses
        self.register_buffer("scale", scale)
        draft_ids = drafter.draft_ids
        known = torch.full((drafter.config.vocab_size,), -1, device=draft_ids.device)
        known[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
        self.register_buffer("to_draft", known)

    def forward(self, batch: Batch) -> Tensor:
        """[4]: the total, which carries the gradient, then CE, L1 and confidence."""
        drafter = self.drafter
        hidden = block_hidden(drafter, batch, batch.taps.float() / self.scale)
        slots = flatten_slots(drafter, hidden, batch)
        confidence = drafter.confidence_logits(slots.hidden, slots.previous)
        return self.losses(
            slots.hidden,
            slots.latents,
            slots.teacher,
            slots.logz,
            confidence,
            self.to_draft[slots.labels],
            slot_weights(slots.offsets, self.config),
        )

    def _losses(
        self,
        hidden: Tensor,
        latents: Tensor,
        teacher: Tensor,
        logz: Tensor,
        confidence: Tensor,
        labels: Tensor,
        weights: Tensor,
    ) -> Tensor:
        # The frozen LM head runs in the target's dtype.
        base = self.head(hidden.to(self.head.weight.dtype)).float()
        draft_logits = base + self.drafter.markov_head.bias(latents)
        with torch.no_grad():
            target_logits = self.head(teacher.to(self.head.weight.dtype))
        losses = dspark_loss(
            draft_logits, target_logits, logz, confidence, labels, weights, self.config
        )
        return torch.stack([losses.total, losses.ce, losses.l1, losses.confidence])


@dataclass
class World:
    """The processes that train together."""

    rank: int
    size: int

    @classmethod
    def join(cls, device: torch.device) -> World:
        """Join the processes that torchrun started; alone without it."""
        if "WORLD_SIZE" not in os.environ:
            return cls(0, 1)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # else NCCL takes device 0 for what is not a tensor
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())


def frequent_tokens(cache: StateCache, indices: range, vocab: int) -> Tensor:
    """All token ids [V], the most frequent in these conversations' responses first."""
    counts = torch.zeros(vocab, dtype=torch.long)
    for index in indices:
        counts += torch.bincount(cache.response_ids(index), minlength=vocab)
    return counts.argsort(descending=True, stable=True)


def _draft_ids(frequent: Tensor, size: int) -> Tensor | None:
    """The draft vocabulary [size]: the most frequent tokens, ascending; None for all of them."""
    return frequent[:size].sort().values if 0 < size < len(frequent) else None


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Linear warm-up, then cosine to 0 or constant."""
    warmup = max(1, round(config.warmup * steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule is LearningRate.constant:
        return config.lr
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def step_batches(
    cache: StateCache,
    training: range,
    config: TrainConfig,
    step: int,
    world: World,
) -> Iterator[Batch]:
    """The batches of one step that this process runs.

    Pass number n of the whole training takes its conversations from a shuffled epoch and draws its
    anchors, both by n alone: the same passes make a step, however many processes share them.
    """
    per_epoch = len(training) // config.batch
    for turn in range(config.accumulate):
        number = (step * config.accumulate + turn) * world.size + world.rank
        epoch, place = divmod(number, per_epoch)
        order = torch.randperm(
            len(training), generator=named_generator(f"{config.seed}/epoch/{epoch}")
        )
        chosen = order[place * config.batch : (place + 1) * config.batch].tolist()
        generator = named_generator(f"{config.seed}/anchors/{number}")
        items = [cache[training[index]] for index in chosen]
        anchors = [draw_anchors(item, config.anchors, generator) for item in items]
        batch = make_batch(items, anchors, config.shape.block_size)
        if config.draw_slots:
            batch.valid &= draw_slots(batch.valid.shape, config.decay, generator)
        yield batch


def fit(target: Target, cache: StateCache, config: TrainConfig, out: Path) -> None:
    """Train a drafter on the cached states of `target`; resumes what a kill left in `out`.

    Writes to `out`: best/ (the best drafter so far by accept length on held-out responses), curve.jsonl
    (losses, rates and validations by step) and progress.safetensors (what resuming needs). The first
    `held_out` conversations validate, the next `calibration` ones are left for calibration.

    Raises:
        UserError: too few conversations for these and one step.
    """
    world = World.join(target.device)
    training = range(config.held_out + config.calibration, len(cache))
    share = config.accumulate * world.size
    if len(training) < config.batch * share:
        raise UserError(
            f"{len(cache)} conversations are too few: held_out takes {config.held_out}, calibration "
            f"{config.calibration} and a step {config.batch * share}; synthesise more "
            "(drafter.train.prompts), or lower these"
        )
    steps = max(1, round(config.epochs * (len(training) // config.batch) / share))
    frequent = frequent_tokens(cache, training, target.vocab_size)
    if config.start is None:
        draft_ids = _draft_ids(frequent, config.shape.draft_vocab_size)
        drafter = new_drafter(config.shape, target, config.seed, draft_ids)
    else:
        drafter = load_start(config.start, config.shape, target)
    taps = torch.cat([cache[index].taps[1:] for index in training[:SAMPLE]])
    taps = taps.to(target.device).float()
    scale = tap_scale(taps)
    optimizers = make_optimizers(drafter, config)
    run = f"{cache.fingerprint}/{digest(config)}/{world.size}"
    progress = load_progress(out, run, drafter, optimizers)
    if progress.step == 0 and config.start is None:
        start_from_bigrams(drafter, target, frequent)
        start_local(drafter, taps / scale, frequent)
    elif progress.step == 0:
        unfold_tap_scale(drafter, scale)
    model: nn.Module = BlockLoss(drafter, config, scale)
    if world.size > 1:
        model = DistributedDataParallel(model)
    curve = Curve(out / "curve.jsonl", progress.step) if world.rank == 0 else None
    bar = Bar(
        total=steps,
        initial=progress.step,
        unit="step",
        desc="fit",
        disable=world.rank > 0,
    )
    while progress.step < steps and not _stopped(progress, config):
        begun = time.perf_counter()
        rate = learning_rate(progress.step, steps, config)
        batches = step_batches(cache, training, config, progress.step, world)
        set_rate(optimizers, rate)
        terms, tokens = train_step(model, optimizers, batches, config, target)
        progress.step += 1
        seen = tokens * world.size / (time.perf_counter() - begun)
        values = dict(zip(("ce", "l1", "confidence"), terms.tolist()[1:], strict=True))
        bar.set_postfix_str(
            " ".join(f"{name} {value:.3f}" for name, value in values.items())
            + f" {seen:.0f} tok/s",
            refresh=False,
        )
        bar.update()
        if curve is not None:
            curve.add(progress.step, **values, lr=rate, tokens_per_s=seen)
        if progress.step % config.validate_every == 0 or progress.step == steps:
            if curve is not None:
                _validate(fold_tap_scale(drafter, scale), cache, config, out, progress, curve)
                save_progress(out, progress, drafter, optimizers)
            progress = _agreed(progress, world)
    bar.close()


def _stopped(progress: Progress, config: TrainConfig) -> bool:
    return 0 < config.patience <= progress.stale


def _agreed(progress: Progress, world: World) -> Progress:
    """The first process's progress, on all of them: it alone validates."""
    if world.size == 1:
        return progress
    shared = [progress]
    dist.broadcast_object_list(shared)
    return shared[0]


def _validate(
    drafter: DSparkDrafter,
    cache: StateCache,
    config: TrainConfig,
    out: Path,
    progress: Progress,
    curve: Curve,
) -> None:
    """Measure acceptance on the held-out responses; keep the drafter when it is the best so far."""
    drafts = [draft_response(drafter, cache[index]) for index in range(config.held_out)]
    shown: dict[str, float] = {}
    for k in sorted({min(k, drafter.block_size) for k in SHOWN_K}):
        acceptance = walk(drafts, k)
        shown[f"accept_len_k{k}"] = acceptance.accept_len
        for t in range(k):
            shown[f"accept_p{t + 1}_k{k}"] = acceptance.unconditional[t]
            shown[f"accept_given_p{t + 1}_k{k}"] = acceptance.conditional[t]
    curve.add(progress.step, **shown)
    lengths = [name for name in shown if name.startswith("accept_len")]
    positions = [shown[f"accept_p{t + 1}_k{k}"] for t in range(k)]
    Bar.write(
        f"step {progress.step}: "
        + ", ".join(f"{name} {shown[name]:.3f}" for name in lengths)
        + "; accept by position "
        + " ".join(f"{share:.1%}" for share in positions),
        file=sys.stderr,
    )
    best = shown[lengths[0]]
    progress.stale += 1
    if best > progress.best:
        progress.best, progress.stale = best, 0
        save_drafter(drafter, out / "best", torch.bfloat16)


def train_step(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    batches: Iterator[Batch],
    config: TrainConfig,
    target: Target,
) -> tuple[Tensor, int]:
    """One step over `accumulate` passes; the mean terms [4], and tokens that went in."""
    terms, tokens = torch.zeros(4, device=target.device), 0
    kind = target.device.type
    for turn, batch in enumerate(batches):
        last = turn + 1 == config.accumulate
        several = isinstance(model, DistributedDataParallel)
        with (
            # Gradients are shared in the last pass alone.
            model.no_sync() if several and not last else nullcontext(),  # type: ignore[operator]
            torch.autocast(kind, torch.bfloat16, enabled=target.dtype is torch.bfloat16),
        ):
            losses = model(batch.to(target.device)) / config.accumulate
            losses[0].backward()
        terms += losses.detach()
        tokens += batch.ids.numel()
    nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return terms, tokens
