"""The `speculators` checkpoint format in terms of the native one: configs and tensors, both ways.

The differences: the network's fields are nested, layer ids count from the embedding output (theirs
are ours plus one), the target's number of layers is not told, and a reduced draft vocabulary brings
its own LM head, the offsets `d2t` and the mask `t2d`. Embeddings are the target's in either format.
Nothing here reads or writes files; models/checkpoint.py does.

V vocabulary, Vd draft vocabulary, D hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from dspark.errors import UserError

REQUIRED = (
    "transformer_layer_config",
    "aux_hidden_state_layer_ids",
    "block_size",
    "mask_token_id",
    "markov_rank",
)
# Fields that both formats have at the top, under the same names.
SAME = (
    "block_size",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "draft_vocab_size",
)
# Fields that change what a drafter computes, with the values that mean a plain DSpark drafter.
PLAIN: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash", "dspark"),
    "shift_label": (None, False),
    "aux_hidden_state_layer_offset": (None, 0),
}
# Where a file says nothing of its own, these follow from how and where it was written.
INCIDENTAL = frozenset(PreTrainedConfig().to_dict()) | {"torch_dtype"}


def is_speculators(raw: dict[str, Any]) -> bool:
    """Whether a config.json is one of this format."""
    return "speculators_model_type" in raw


def native_fields(file: Path, raw: dict[str, Any], num_target_layers: int) -> dict[str, Any]:
    """A config.json of this format as the fields of a native one.

    Args:
        file: its name, for messages.
        num_target_layers: the target's, which this format does not tell.

    Raises:
        UserError: another algorithm, a field that is missing or not as it should be, or one that
            asks for what the decoder does not have.
    """
    kind = raw["speculators_model_type"]
    if kind != "dspark":
        raise UserError(
            f"drafter config '{file}': speculators_model_type is {kind!r}: of the speculators "
            "format only dspark drafters can be used"
        )
    missing = [name for name in REQUIRED if name not in raw]
    if missing:
        raise UserError(
            f"drafter config '{file}' lacks {', '.join(missing)}: is it a DSpark drafter?"
        )
    for name, plain in PLAIN.items():
        if raw.get(name) not in plain:
            raise UserError(
                f"drafter config '{file}': {name} is {raw[name]!r}, which this decoder does not have"
            )
    _check_proposals(file, raw)
    nested, layers = raw["transformer_layer_config"], raw["aux_hidden_state_layer_ids"]
    if not isinstance(nested, dict) or nested.get("model_type", "qwen3") != "qwen3":
        found = nested.get("model_type") if isinstance(nested, dict) else nested
        raise UserError(
            f"drafter config '{file}': transformer_layer_config is {found!r}, expected the fields "
            "of a qwen3 model: a DSpark drafter has Qwen3's layers"
        )
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise UserError(
            f"drafter config '{file}': aux_hidden_state_layer_ids is {layers!r}, expected a list of "
            "layer numbers"
        )
    fields = {name: value for name, value in nested.items() if name not in INCIDENTAL}
    fields |= {name: raw[name] for name in SAME if name in raw}
    fields["target_layer_ids"] = [layer - 1 for layer in layers]
    fields["num_target_layers"] = num_target_layers
    fields["tie_word_embeddings"] = False  # whether the target ties its own is no matter here
    return fields


def speculators_fields(
    config: Qwen3Config, target: PreTrainedConfig, verifier: str | None, dtype: torch.dtype
) -> dict[str, Any]:
    """A native config as the fields of a config.json of this format.

    Args:
        target: the target's own config, which lends its architectures.
        verifier: name of the target on the hub, or where it lies; None: not told.
        dtype: of the drafter's tensors.
    """
    own = {*SAME, *INCIDENTAL, "target_layer_ids", "num_target_layers"}
    nested = {name: value for name, value in config.to_dict().items() if name not in own}
    fields = {name: getattr(config, name, None) for name in SAME}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        **fields,
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "draft_vocab_size": getattr(config, "draft_vocab_size", None) or config.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": verifier,
                "architectures": list(target.architectures or []),
            },
        },
        "speculators_model_type": "dspark",
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": {**nested, "model_type": "qwen3"},
    }


def check_anchor_first(file: Path, raw: dict[str, Any]) -> None:
    """Refuse a drafter whose blocks have a slot for the bonus token before the first draft.

    Both layouts have the same tensors; one decoded as the other drafts nonsense, without an error.
    A config that does not tell is taken for anchor-first, unless it drafts one token less than its
    block has slots.

    Raises:
        UserError: the layout is told, or implied, to be the other one.
    """
    block, tokens = raw.get("block_size"), _speculative_tokens(raw)
    anchor_first = raw.get("sample_from_anchor")
    if anchor_first is None and tokens is not None and block == tokens + 1:
        raise UserError(
            f"drafter config '{file}': {tokens} speculative_tokens of blocks of {block} and no "
            "sample_from_anchor mean that a bonus slot precedes the drafts, which this decoder does "
            "not have; if the drafter was trained anchor-first, add sample_from_anchor: true"
        )
    if anchor_first not in (None, True):
        raise UserError(
            f"drafter config '{file}': sample_from_anchor is {anchor_first!r}: a bonus slot precedes "
            "the drafts, which this decoder does not have; use a drafter that was trained "
            "anchor-first"
        )


def _speculative_tokens(raw: dict[str, Any]) -> int | None:
    """How many tokens a block drafts by the config's first proposal; None where it does not say."""
    about = raw.get("speculators_config")
    methods = about.get("proposal_methods") if isinstance(about, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return tokens if type(tokens) is int else None


def _check_proposals(file: Path, raw: dict[str, Any]) -> None:
    """Refuse another algorithm, or another way to propose tokens than one chain of them."""
    about = raw.get("speculators_config") or {}
    methods = about.get("proposal_methods", []) if isinstance(about, dict) else None
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        raise UserError(f"drafter config '{file}': speculators_config is broken: fetch it again")
    named = [("algorithm", about.get("algorithm", "dspark"), "dspark")]
    named += [
        ("proposal_type", method.get("proposal_type", "greedy"), "greedy") for method in methods
    ]
    for field, value, known in named:
        if value != known:
            raise UserError(
                f"drafter config '{file}': {field} is {value!r} in speculators_config, and only "
                f"{known} is known"
            )


def without_verifier(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` less the target's own, which training may have left beside the drafter's."""
    return {name: value for name, value in tensors.items() if not name.startswith("verifier_")}


def without_mask(
    tensors: dict[str, Tensor], vocab_size: int, reduced: bool, name: str | Path
) -> dict[str, Tensor]:
    """`tensors`, of the right shapes, less `t2d` and for a whole vocabulary less `d2t`.

    `t2d` serves training alone, and a whole vocabulary maps to itself: both are only checked.

    Args:
        reduced: whether the draft vocabulary is a part of the target's.

    Raises:
        UserError: `t2d` is not the mask of the tokens that `d2t` maps to, or `d2t` moves tokens
            though the vocabulary is whole.
    """
    kept = {key: value for key, value in tensors.items() if key != "t2d"}
    offsets = kept.get("d2t") if reduced else kept.pop("d2t", None)
    if offsets is None:
        offsets = torch.zeros(vocab_size, dtype=torch.long)
    ids = offsets.long() + torch.arange(len(offsets))
    if not reduced and offsets.any():
        raise UserError(
            f"drafter '{name}': d2t moves tokens though draft_vocab_size is the whole vocabulary of "
            f"{vocab_size}: fetch it again"
        )
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool().nonzero().flatten(), ids):
        raise UserError(
            f"drafter '{name}': t2d does not mark the tokens that d2t maps to: fetch it again"
        )
    return kept


def reduced_tensors(
    d2t: Tensor, head: Tensor, embeddings: Tensor, vocab_size: int
) -> dict[str, Tensor]:
    """What this format's engines need beside a drafter with a reduced vocabulary.

    Args:
        d2t: offsets [Vd] of the draft tokens.
        head: LM head of the draft tokens [Vd, D].
        embeddings: the target's [V, D].
    """
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[d2t.cpu() + torch.arange(len(d2t))] = True
    return {"t2d": t2d, "lm_head.weight": head, "embed_tokens.weight": embeddings}
