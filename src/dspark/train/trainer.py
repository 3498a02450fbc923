"""A minimal trainer: the target is frozen and run along, blocks are drawn from its own responses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from dspark.config import DrafterShape, TrainConfig
from dspark.decode.cache import SlotCache, causal_mask
from dspark.models.checkpoint import check_fits, save_drafter
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target
from dspark.train.loss import Losses, dspark_loss, slot_weights
from dspark.train.synthesize import Conversation


@dataclass
class Blocks:
    """Blocks of a batch: b conversations, A anchors each, B slots. S is the padded length."""

    ids: Tensor  # [b, S]
    anchors: Tensor  # [b, A] positions
    valid: Tensor  # [b, A, B] slots whose label exists


def spread_layers(count: int, num_layers: int) -> list[int]:
    """`count` layers spread evenly over the target, its last one (which is forbidden) left out."""
    last = num_layers - 2
    first = min(1, last)
    if count == 1:
        return [last]
    return sorted({round(first + (last - first) * i / (count - 1)) for i in range(count)})


def new_drafter(shape: DrafterShape, target: Target, seed: int) -> DSparkDrafter:
    """A drafter with random weights for `target`: float32, on the target's device.

    The Markov bias starts at zero, so that training starts from the parallel draft.
    """
    source = target.config
    heads = source.num_attention_heads
    config = Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(source, "num_key_value_heads", heads),
        head_dim=getattr(source, "head_dim", None) or target.hidden_size // heads,
        max_position_embeddings=target.max_positions,
        rms_norm_eps=getattr(source, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": _rope_theta(source)},
        tie_word_embeddings=False,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
        block_size=shape.block_size,
        num_target_layers=target.num_layers,
        target_layer_ids=shape.target_layer_ids or spread_layers(shape.taps, target.num_layers),
        mask_token_id=shape.mask_token_id,
        markov_rank=shape.markov_rank,
        markov_head_type=shape.markov_head_type,
        enable_confidence_head=True,
        confidence_head_with_markov=shape.confidence_head_with_markov,
    )
    check_fits(config, target, "new drafter")
    torch.manual_seed(seed)
    drafter = DSparkDrafter(config, target.embed, target.logits)
    for module in drafter.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    nn.init.zeros_(drafter.markov_head.markov_w2.weight)
    return drafter.to(target.device)


def _rope_theta(config: Qwen3Config) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta", getattr(config, "rope_theta", 10000.0)))


def make_blocks(
    batch: list[Conversation], anchors: int, block_size: int, generator: torch.Generator
) -> Blocks:
    """Draw anchors among response positions whose next token is part of the response too.

    A conversation with fewer such positions than `anchors` repeats none: its other blocks have no
    valid slot.
    """
    length = max(len(item.prompt_ids) + len(item.response_ids) for item in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    chosen = torch.zeros(len(batch), anchors, dtype=torch.long)
    valid = torch.zeros(len(batch), anchors, block_size, dtype=torch.bool)
    for row, item in enumerate(batch):
        begin, end = len(item.prompt_ids), len(item.prompt_ids) + len(item.response_ids)
        ids[row, :end] = torch.tensor(item.prompt_ids + item.response_ids)
        picks = begin + torch.randperm(end - begin - 1, generator=generator)[:anchors]
        chosen[row, : len(picks)] = picks
        labels = picks[:, None] + 1 + torch.arange(block_size)
        valid[row, : len(picks)] = labels < end
    return Blocks(ids, chosen, valid)


def block_mask(anchors: Tensor, length: int, block_size: int) -> Tensor:
    """Bool mask [b, 1, A*B, S + A*B]: a block sees the context before its anchor, and itself."""
    count = anchors.shape[1]
    owner = torch.arange(count * block_size, device=anchors.device) // block_size
    context = torch.arange(length, device=anchors.device) < anchors[:, owner, None]
    own = (owner[:, None] == owner)[None].expand(anchors.shape[0], -1, -1)
    return torch.cat([context, own], dim=-1)[:, None]


def block_hidden(drafter: DSparkDrafter, taps: Tensor, blocks: Blocks) -> Tensor:
    """States [b, A, B, D] of all blocks of a batch, given tapped target states [b, S, M*D]."""
    length, size = blocks.ids.shape[1], drafter.block_size
    positions = torch.arange(length, device=taps.device)[None].expand(taps.shape[0], -1)
    context = drafter.context_key_values(taps, positions)

    def key_values(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([context[layer][0], key], 2), torch.cat([context[layer][1], value], 2)

    ids = drafter.block_inputs(blocks.ids.gather(1, blocks.anchors).flatten())
    slots = (blocks.anchors[..., None] + torch.arange(size, device=taps.device)).flatten(1)
    mask = block_mask(blocks.anchors, length, size)
    hidden = drafter.block_hidden(ids.view(taps.shape[0], -1), slots, key_values, mask)
    return hidden.unflatten(1, (-1, size))


def target_states(target: Target, ids: Tensor, layers: list[int]) -> tuple[Tensor, Tensor]:
    """Final states [b, S, D] and taps [b, S, M*D] of whole conversations (right padding is inert)."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
    cache = SlotCache(target.num_layers, ids.shape[0], ids.shape[1])
    cache.select(slice(0, ids.shape[0]), positions, ids.shape[1])
    masks = {
        kind: causal_mask(positions, ids.shape[1], window)
        for kind, window in target.windows.items()
    }
    with torch.no_grad():
        states, taps = target.forward(ids, positions, cache, masks, layers)
    assert taps is not None
    return states, taps


@dataclass
class Slots:
    """All valid slots of a batch, flattened: N of them."""

    hidden: Tensor  # [N, D]
    latents: Tensor  # [N, r]
    previous: Tensor  # [N]
    labels: Tensor  # [N]
    teacher: Tensor  # [N, D], the target's final state that predicts the label
    weights: Tensor  # [N]


def flatten_slots(
    drafter: DSparkDrafter, hidden: Tensor, states: Tensor, blocks: Blocks, decay: float
) -> Slots:
    """Pair each valid slot with its previous token, its label and the target's state (teacher forcing)."""
    offsets = torch.arange(drafter.block_size, device=hidden.device)
    where = (blocks.anchors[..., None] + offsets).clamp_max(blocks.ids.shape[1] - 1)  # [b, A, B]
    rows = torch.arange(where.shape[0], device=hidden.device)[:, None, None]
    previous = blocks.ids[rows, where]
    labels = blocks.ids[rows, (where + 1).clamp_max(blocks.ids.shape[1] - 1)]
    latents = drafter.markov_head.block_latents(
        hidden.flatten(0, 1), previous.flatten(0, 1)
    ).view(*hidden.shape[:3], -1)
    valid = blocks.valid
    return Slots(
        hidden[valid], latents[valid], previous[valid], labels[valid],
        states[rows, where][valid], slot_weights(valid, decay)[valid],
    )


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
        return torch.arange(vocab)
    random = torch.randint(vocab, (count // 2,), generator=generator)
    return torch.cat([frequent[: count - count // 2], random, labels]).unique()


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
) -> Losses:
    """Losses of one batch; gradients are left on the drafter's parameters."""
    states, taps = target_states(target, blocks.ids, drafter.target_layer_ids)
    hidden = block_hidden(drafter, taps.float(), blocks)
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
        states, taps = target_states(target, blocks.ids, drafter.target_layer_ids)
        hidden = block_hidden(drafter, taps.float(), blocks)
        slots = flatten_slots(drafter, hidden, states, blocks, config.decay)
        logits = target.logits(slots.hidden.to(target.dtype)).float()
        logits = logits + drafter.markov_head.bias(slots.latents)
        agree = torch.zeros_like(blocks.valid)
        agree[blocks.valid] = logits.argmax(-1) == slots.labels
        whole = blocks.valid.all(-1)
        matched += agree[whole].long().cumprod(-1).sum(0)
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
    """Train a drafter and write it to `out`; returns the last validation's acceptance by position."""
    held_out, rest = conversations[: config.held_out], conversations[config.held_out :]
    drafter = new_drafter(config.shape, target, config.seed)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=config.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(config.seed)
    steps = max(1, round(config.epochs * len(rest) / config.batch))
    batches = _batches(rest, config.batch, generator)
    frequent = frequent_tokens(rest, target.vocab_size)
    acceptance: list[float] = []
    with tqdm(total=steps, unit="step") as bar:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, config)
            blocks = make_blocks(next(batches), config.anchors, drafter.block_size, generator)
            losses = train_step(drafter, target, blocks, config, frequent, generator)
            nn.utils.clip_grad_norm_(drafter.parameters(), config.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % config.validate_every == 0 or step + 1 == steps:
                acceptance = validate(drafter, target, held_out, config)
                save_drafter(drafter, out, torch.bfloat16)
                shown = " ".join(f"{share:.3f}" for share in acceptance)
                tqdm.write(f"step {step + 1}: accept by position {shown}")
            bar.set_postfix(ce=f"{losses.ce:.3f}", l1=f"{losses.l1:.3f}", conf=f"{losses.confidence:.3f}")
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
