"""A minimal trainer: the target is frozen and run along, blocks are drawn from its own responses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dspark.config import TrainConfig
from dspark.errors import UserError
from dspark.models.checkpoint import save_drafter
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target
from dspark.train.blocks import Blocks, block_hidden, flatten_slots, make_blocks, target_states
from dspark.train.loss import Losses, dspark_loss
from dspark.train.start import (
    fold_tap_scale,
    new_drafter,
    sample_taps,
    start_from_bigrams,
    start_local,
)
from dspark.train.synthesize import Conversation


def candidate_tokens(
    labels: Tensor, frequent: Tensor, count: int, vocab: int, generator: torch.Generator
) -> Tensor:
    """The tokens [C] that a step's distributions range over, sorted; all of them when count is 0.

    On a CPU the logits of a large vocabulary are most of a step's work, and nearly all probability
    lies on few tokens: half the candidates are the most frequent ones of the training text, half a
    fresh random sample, so that every token is still pushed down now and then; the batch's own
    labels are always among them. Both distributions are renormalised over the candidates.
    """
    if count == 0 or count >= vocab:
        return torch.arange(vocab, device=labels.device)
    random = torch.randint(vocab, (count // 2,), generator=generator)
    chosen = torch.cat([frequent[: count - count // 2], random, labels.cpu()]).unique()
    return chosen.to(labels.device)


def frequent_tokens(conversations: list[Conversation], vocab: int) -> Tensor:
    """All token ids [V], the most frequent in the responses first."""
    ids = torch.tensor([token for item in conversations for token in item.response_ids])
    return torch.bincount(ids, minlength=vocab).argsort(descending=True, stable=True)


def train_step(
    drafter: DSparkDrafter,
    target: Target,
    blocks: Blocks,
    config: TrainConfig,
    frequent: Tensor,
    generator: torch.Generator,
    tap_scale: Tensor | float = 1.0,
) -> Losses:
    """Losses of one batch; gradients are left on the drafter's parameters.

    The drafter reads taps / tap_scale: see `sample_taps`.
    """
    blocks = blocks.to(target.device)
    states, taps = target_states(target, blocks.ids, drafter.target_layer_ids)
    hidden = block_hidden(drafter, taps.float() / tap_scale, blocks)
    slots = flatten_slots(drafter, hidden, states, blocks, config.decay)
    tokens = candidate_tokens(
        slots.labels, frequent, config.candidates, target.vocab_size, generator
    )
    # The frozen LM head runs in the target's dtype.
    base = target.logits(slots.hidden.to(target.dtype), tokens).float()
    draft_logits = base + drafter.markov_head.bias(slots.latents, tokens)
    with torch.no_grad():
        target_logits = target.logits(slots.teacher, tokens)
    confidence = drafter.confidence_logits(slots.hidden, slots.previous)
    labels = torch.searchsorted(tokens, slots.labels)
    losses = dspark_loss(draft_logits, target_logits, confidence, labels, slots.weights, config)
    losses.total.backward()
    return losses


@torch.no_grad()
def validate(
    drafter: DSparkDrafter, target: Target, held_out: list[Conversation], config: TrainConfig
) -> list[float]:
    """Share of blocks whose greedy draft agrees with the target up to each position (unconditional)."""
    generator = torch.Generator().manual_seed(config.seed)
    matched = torch.zeros(drafter.block_size)
    count = torch.zeros(drafter.block_size)
    for start in range(0, len(held_out), config.batch):
        batch = held_out[start : start + config.batch]
        blocks = make_blocks(batch, config.anchors, drafter.block_size, generator)
        blocks = blocks.to(target.device)
        states, taps = target_states(target, blocks.ids, drafter.target_layer_ids)
        hidden = block_hidden(drafter, taps.float(), blocks)
        slots = flatten_slots(drafter, hidden, states, blocks, config.decay)
        logits = target.logits(slots.hidden.to(target.dtype)).float()
        logits = logits + drafter.markov_head.bias(slots.latents)
        agree = torch.zeros_like(blocks.valid)
        agree[blocks.valid] = logits.argmax(-1) == slots.labels
        whole = blocks.valid.all(-1)
        matched += agree[whole].long().cumprod(-1).sum(0).cpu()
        count += int(whole.sum())
    return (matched / count.clamp_min(1)).tolist()


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Linear warm-up, then cosine to 0."""
    warmup = max(1, round(config.warmup * steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train(
    target: Target, conversations: list[Conversation], config: TrainConfig, out: Path
) -> list[float]:
    """Train a drafter and write it to `out`; returns the last validation's acceptance by position.

    Raises:
        UserError: too few conversations for the held-out ones and one batch.
    """
    held_out, rest = conversations[: config.held_out], conversations[config.held_out :]
    if len(rest) < config.batch:
        raise UserError(
            f"{len(conversations)} conversations are too few: held_out takes {config.held_out} and "
            f"a batch {config.batch}; synthesise more prompts, or lower held_out or batch"
        )
    drafter = new_drafter(config.shape, target, config.seed)
    layers, sample = drafter.target_layer_ids, rest[:16]
    scale = sample_taps(target, layers, sample).abs().median(0).values.clamp_min(1e-3)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=config.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(config.seed)
    steps = max(1, round(config.epochs * len(rest) / config.batch))
    batches = _batches(rest, config.batch, generator)
    frequent = frequent_tokens(rest, target.vocab_size)
    start_from_bigrams(drafter, target, frequent)
    start_local(drafter, sample_taps(target, layers, sample) / scale, frequent)
    acceptance: list[float] = []
    with tqdm(total=steps, unit="step") as bar:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, config)
            blocks = make_blocks(next(batches), config.anchors, drafter.block_size, generator)
            losses = train_step(drafter, target, blocks, config, frequent, generator, scale)
            nn.utils.clip_grad_norm_(drafter.parameters(), config.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % config.validate_every == 0 or step + 1 == steps:
                finished = fold_tap_scale(drafter, target, config, scale)
                acceptance = validate(finished, target, held_out, config)
                save_drafter(finished, out, torch.bfloat16)
                shown = " ".join(f"{share:.3f}" for share in acceptance)
                tqdm.write(f"step {step + 1}: accept by position {shown}")
            bar.set_postfix(
                ce=f"{losses.ce:.3f}", l1=f"{losses.l1:.3f}", conf=f"{losses.confidence:.3f}"
            )
            bar.update()
    return acceptance


def _batches(
    conversations: list[Conversation], size: int, generator: torch.Generator
) -> Iterator[list[Conversation]]:
    """Shuffled batches, epoch after epoch."""
    while True:
        order = torch.randperm(len(conversations), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            yield [conversations[i] for i in order[start : start + size]]
