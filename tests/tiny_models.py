"""Tiny random targets and drafters, saved as the directories that a user would give.

A target has a real byte-level tokenizer (any text encodes), a ChatML-like template and greedy text
that varies. A drafter knows the target's most frequent bigrams, so that some of its tokens are
accepted and some are not.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark.config import DrafterShape
from dspark.decode.engine import Engine, Request
from dspark.decode.loop import closed_loop
from dspark.models.checkpoint import save_drafter
from dspark.models.target import Target, load_target
from dspark.train.start import new_drafter

FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
# Ids of the special tokens; the bytes follow, then pairs of letters up to the vocabulary's size.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
EOS = 2
# How much louder than usual the embeddings are.
EMBED = {"llama": 20.0, "qwen2": 20.0, "qwen3": 12.0, "gemma3": 4.0, "mistral": 25.0}
VOCAB = 300
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(vocab: int = VOCAB, chat: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocab` (at least 260) tokens: every id decodes to something."""
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    pairs = [(a, b) for a in letters for b in letters][: vocab - len(tokens)]
    tokens += [a + b for a, b in pairs]
    assert len(tokens) == vocab, f"vocab must lie in 260..{260 + len(letters) ** 2}"
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[EOS], pad_token=SPECIAL[0], bos_token=SPECIAL[0]
    )
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def tiny_config(
    family: str = "llama", vocab: int = VOCAB, layers: int = 4, **changes: Any
) -> PreTrainedConfig:
    """A config of one of `FAMILIES`: width 48, 4 heads on 2 key/value heads, 512 positions."""
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    if family == "gemma3":  # windowed layers and full ones take turns
        kinds = ["sliding_attention", "full_attention"]
        fields |= {"sliding_window": 8, "layer_types": [kinds[i % 2] for i in range(layers)]}
        fields |= {"query_pre_attn_scalar": 12}
    if family == "mistral":  # every layer is windowed
        fields |= {"sliding_window": 8}
    return FAMILIES[family][0](**fields | changes)


def save_tiny_target(
    path: str | Path,
    family: str = "llama",
    vocab: int = VOCAB,
    layers: int = 4,
    seed: int = 0,
    *,
    chat: bool = True,
    **changes: Any,
) -> Path:
    """Write a random float32 target with tokenizer and generation config to `path`.

    Args:
        family: one of `FAMILIES`.
        chat: whether the tokenizer has a chat template.
        changes: fields of the model's config.
    """
    torch.manual_seed(seed)
    model = FAMILIES[family][1](tiny_config(family, vocab, layers, **changes))  # type: ignore[arg-type]
    with torch.no_grad():
        # Loud embeddings let the last token decide much of the next one, and the context the rest:
        # the text varies, and bigrams predict some of it. Tied ones would repeat the last token.
        loudness = 0.05 if model.config.tie_word_embeddings else EMBED[family]
        model.get_input_embeddings().weight.mul_(loudness)
    model.save_pretrained(path)
    tiny_tokenizer(vocab, chat).save_pretrained(path)
    return Path(path)


def save_tiny_drafter(
    path: str | Path,
    target_path: str | Path,
    seed: int = 0,
    layers: int = 1,
    *,
    bigrams: bool = True,
    **shape: Any,
) -> Path:
    """Write a random float32 drafter for the target at `target_path` to `path`.

    Args:
        bigrams: put the target's own bigrams into the Markov head, so that some drafts are accepted.
        shape: fields of `DrafterShape`, as block_size or markov_head_type.
    """
    target = load_target(target_path, "cpu", torch.float32)
    fields = {"layers": layers, "taps": 2, "markov_rank": 64, **shape}
    drafter = new_drafter(DrafterShape(**fields), target, seed)
    with torch.no_grad():
        if drafter.confidence_head is not None:  # confidences that differ
            drafter.confidence_head.proj.weight.normal_(std=0.3)
        drafter.markov_head.markov_w1.weight.normal_()
        if bigrams:
            _learn_bigrams(drafter.markov_head, target)
        else:
            drafter.markov_head.markov_w2.weight.normal_(std=0.2)
    save_drafter(drafter, path)
    return Path(path)


def greedy_texts(target: Target, prompts: int, length: int, first: int = 4) -> list[list[int]]:
    """The target's greedy continuations of one-byte prompts, EOS ignored."""
    engine = Engine(target, concurrency=min(16, prompts), capacity=length + 2)

    def request(name: str, turn: int, _answers: list[list[int]]) -> Request:
        return Request(name, turn, [first + int(name)], length)

    rows = closed_loop(engine, [(str(index), 1) for index in range(prompts)], request)
    return [row.output for row in sorted(rows, key=lambda row: int(row.request.prompt_id))]


def _learn_bigrams(head: Any, target: Target) -> None:
    """Make the bias favour, after each token, what most often followed it in the target's text."""
    counts = torch.zeros(target.vocab_size, target.vocab_size)
    for text in greedy_texts(target, 48, 48):
        for before, after in pairwise(text):
            counts[before, after] += 1
    seen = counts.sum(1) > 0
    keys = torch.nn.functional.normalize(head.markov_w1.weight, dim=-1)
    head.markov_w1.weight.copy_(keys)
    head.markov_w2.weight.zero_()
    head.markov_w2.weight.index_add_(0, counts.argmax(1)[seen], 20 * keys[seen])
