"""Where training starts from: a new drafter whose first guesses are already the target's bigrams.

From random weights most of a short training goes into three things that can be had at once: channels
of very different loudness, what usually follows a token, and looking at the nearest context.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from dspark.config import DrafterShape
from dspark.errors import UserError
from dspark.models.checkpoint import check_fits, load_drafter, use_draft_vocabulary
from dspark.models.drafter import DSparkDrafter
from dspark.models.prepare import embedded_drafter
from dspark.models.target import Target
from dspark.progress import Bar
from dspark.train.states import target_states

# What a shape says, by its name in the settings and in a checkpoint's config.
SHAPE_FIELDS = {
    "layers": "num_hidden_layers",
    "target_layer_ids": "target_layer_ids",
    "block_size": "block_size",
    "draft_vocab_size": "draft_vocab_size",
    "markov_rank": "markov_rank",
    "markov_head_type": "markov_head_type",
    "confidence_head_with_markov": "confidence_head_with_markov",
    "mask_token_id": "mask_token_id",
}
LOCAL_PAIRS = 10  # rotary pairs (of 32) that draw attention to the nearest tokens at the start
LOUD = 4.0  # against the random part of queries and keys, whose entries are about 0.5
QUIET = 0.3  # first value of the final norm: random base logits must not drown the Markov bias


def spread_layers(count: int, num_layers: int) -> list[int]:
    """`count` layers spread evenly over the target, its last one (which is forbidden) left out."""
    last = num_layers - 2
    first = min(1, last)
    if count == 1:
        return [last]
    return sorted({round(first + (last - first) * i / (count - 1)) for i in range(count)})


def new_drafter(
    shape: DrafterShape, target: Target, seed: int, draft_ids: Tensor | None = None
) -> DSparkDrafter:
    """A drafter with random weights for `target`: float32, on the target's device.

    The Markov bias is zero: the draft is the parallel one alone.

    Args:
        draft_ids: target ids to draft from [Vd], ascending; None for all.

    Raises:
        UserError: as `check_shape`.
    """
    config = _config(shape, target, None if draft_ids is None else len(draft_ids))
    torch.manual_seed(seed)
    drafter = DSparkDrafter(config, target.embed, target.head)
    for module in drafter.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    nn.init.zeros_(drafter.markov_head.markov_w2.weight)
    drafter.to(target.device)
    if draft_ids is not None:
        d2t = draft_ids.to(target.device) - torch.arange(len(draft_ids), device=target.device)
        use_draft_vocabulary(drafter, target, d2t, "new drafter")
    return drafter


def load_start(start: str, shape: DrafterShape, target: Target) -> DSparkDrafter:
    """A drafter that exists already, to train on from: float32, on the target's device.

    Its calibration is left behind: training moves what it was fitted on.

    Args:
        start: a checkpoint's directory, or the name of a drafter that ships.

    Raises:
        UserError: there is none, it does not fit the target, or `shape` describes another one.
    """
    shipped = embedded_drafter(start)
    if not Path(start).is_dir() and not shipped.is_dir():
        raise UserError(
            f"drafter.train.start '{start}' is neither a directory nor a drafter that ships: give one"
        )
    drafter = load_drafter(start if Path(start).is_dir() else shipped, target).float()
    wanted = _config(shape, target, shape.draft_vocab_size or None)
    for setting, field in SHAPE_FIELDS.items():
        ours, theirs = getattr(wanted, field, 0), getattr(drafter.config, field, 0)
        if ours != theirs:
            raise UserError(
                f"drafter.train.start '{start}' has {setting} {theirs} and drafter.train.shape.{setting} "
                f"makes {ours}: set it to what the start has, or leave start out"
            )
    drafter.temperatures, drafter.shifts = [1.0] * drafter.block_size, []
    return drafter.train()


def check_shape(shape: DrafterShape, target: Target) -> None:
    """Refuse a shape of which no drafter for `target` can be made, without making one.

    Raises:
        UserError: a tapped layer, the mask token or the Markov head cannot be.
    """
    config = _config(shape, target, None)
    with torch.device("meta"):
        DSparkDrafter(config, target.embed, target.head)


def _config(shape: DrafterShape, target: Target, draft_vocab_size: int | None) -> Qwen3Config:
    source = target.config
    heads = source.num_attention_heads
    fields: dict[str, Any] = dict(
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
    if draft_vocab_size is not None:
        fields["draft_vocab_size"] = draft_vocab_size
    config = Qwen3Config(**fields)
    check_fits(config, target, "new drafter")
    return config


def _rope_theta(config: Qwen3Config) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta", getattr(config, "rope_theta", 10000.0)))


@torch.no_grad()
def start_from_bigrams(
    drafter: DSparkDrafter, target: Target, frequent: Tensor, batch: int = 512
) -> None:
    """Start the Markov head from what the target predicts after each single token.

    With H the target's final states after [bos, token] for every token, and P the main directions of
    H (those of the frequent tokens), W1 = (H - mean) P and W2 = E P give the bias E P P'(H - mean):
    the best low-rank copy of the target's own bigrams. Training is far shorter from there.
    """
    tokens = torch.arange(target.vocab_size, device=target.device)
    first = target.config.bos_token_id or 0
    states = []
    for chunk in Bar(tokens.split(batch), desc="bigrams", unit="batch"):
        pairs = torch.stack([torch.full_like(chunk, first), chunk], dim=1)
        states.append(target_states(target, pairs, [0])[0][:, -1].float())
    known = torch.cat(states)
    common = known[frequent[: 16 * drafter.markov_head.rank].to(known.device)]
    mean = common.mean(0)
    directions = torch.linalg.svd(common - mean, full_matrices=False).Vh
    directions = directions[: drafter.markov_head.rank].T  # [D, r], or fewer columns
    width = directions.shape[1]
    left = (known - mean) @ directions
    right = drafter.lm_head.weight.float() @ directions
    balance = (left.std() / right.std()).sqrt()
    drafter.markov_head.markov_w1.weight[:, :width] = left / balance
    drafter.markov_head.markov_w2.weight[:, :width] = right * balance
    drafter.norm.weight.fill_(QUIET)


@torch.no_grad()
def start_local(drafter: DSparkDrafter, taps: Tensor, frequent: Tensor) -> None:
    """Start all key/value groups but the last attending to the newest context tokens.

    What follows the anchor hangs most on the states just before it, but at random weights each of a
    hundred context tokens gets a hundredth of the attention, and learning to look there takes longer
    than all else. RoPE makes the score of two equal vectors fall with their distance, fastest where
    only the fastest rotations are used; so queries and keys get one constant vector that is nonzero
    there. A ridge regression finds the direction in which inputs have a constant part.

    Args:
        taps: scaled taps of some conversations [N, M*D].
    """
    config = drafter.config
    groups = config.num_key_value_heads or config.num_attention_heads
    local = max(1, groups - 1)
    heads = config.num_attention_heads // groups * local
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    constant = torch.zeros(head_dim, device=taps.device)
    constant[: max(1, LOCAL_PAIRS * head_dim // 64)] = LOUD  # pair i is dimensions i, i + h/2
    known = torch.cat([frequent[:2000], frequent.new_full((2000,), config.mask_token_id)])
    inputs = drafter.embed_tokens(known.to(taps.device)).float()
    for layer in drafter.layers:
        attention: Any = layer.self_attn
        norm: Any = layer.input_layernorm
        query = ones_direction(norm(inputs))
        key = ones_direction(drafter.context_features(taps))
        for weight, direction, count in (
            (attention.q_proj.weight, query, heads),
            (attention.k_proj.weight, key, local),
        ):
            rows = constant.repeat(count)
            weight[: len(rows)] += rows[:, None] * direction


def ones_direction(x: Tensor) -> Tensor:
    """The vector a [D] whose product with each row of x [N, D] is nearly 1 (ridge regression)."""
    gram = x.T @ x + 0.1 * len(x) * torch.eye(x.shape[1], device=x.device)
    return torch.linalg.solve(gram, x.sum(0))


def tap_scale(taps: Tensor) -> Tensor:
    """The typical magnitude of each channel of some taps [N, M*D]: what training divides taps by.

    A target's residual stream has channels, and a first token that serves as attention sink,
    thousands of times louder than the rest, which would drown what the context features should carry.
    """
    return taps.float().abs().median(0).values.clamp_min(1e-3)


def fold_tap_scale(drafter: DSparkDrafter, scale: Tensor) -> DSparkDrafter:
    """A copy that reads raw taps, of a drafter that was trained on taps / scale."""
    shared = {id(part): part for part in (drafter.embed_tokens, drafter.lm_head)}  # the target's
    folded = copy.deepcopy(drafter, shared)
    with torch.no_grad():
        folded.fc.weight.div_(scale)
    return folded


@torch.no_grad()
def unfold_tap_scale(drafter: DSparkDrafter, scale: Tensor) -> None:
    """Let a drafter that reads raw taps read taps / scale, as training feeds them."""
    drafter.fc.weight.mul_(scale)
