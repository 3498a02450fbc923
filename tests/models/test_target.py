"""Targets of several families: their text is what transformers' own generate writes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GPT2Config,
    GraniteConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from dspark.config import DrafterShape
from dspark.decode.cache import SlotCache, causal_mask
from dspark.decode.engine import Engine, Request
from dspark.errors import UserError
from dspark.models import target as target_module
from dspark.models.target import Target, load_target
from dspark.train.start import new_drafter
from tiny_models import FAMILIES, VOCAB, save_tiny_target

PROMPT = [40, 87, 5, 199, 255, 31]
NEW_TOKENS = 48  # six times the sliding window of the windowed families
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "qwen2 with two windowed layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "llama with tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "gemma3 with tied embeddings and softcap": (
        "gemma3",
        {"tie_word_embeddings": True, "final_logit_softcapping": 3.0},
    ),
}
each_variant = pytest.mark.parametrize("variant", list(VARIANTS))


@pytest.fixture(scope="session")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a variant, written at its first use."""
    paths: dict[str, Path] = {}

    def path(variant: str) -> Path:
        if variant not in paths:
            family, changes = VARIANTS[variant]
            folder = tmp_path_factory.mktemp("variant") / "target"
            paths[variant] = save_tiny_target(folder, family, **changes)
        return paths[variant]

    return path


def generated(path: Path) -> list[int]:
    """What transformers itself writes after PROMPT, EOS ignored."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
    )
    return output[0, len(PROMPT) :].tolist()


def decoded(engine: Engine) -> list[int]:
    row = engine.admit(Request("p", 1, PROMPT, NEW_TOKENS), 0.0)
    while row.finish_reason is None:
        engine.step()
    return row.output


def run_in_parts(
    target: Target, ids: torch.Tensor, parts: list[int], taps: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Final states and taps of ids [1, T], fed in parts of the given lengths with one cache."""
    length = ids.shape[1]
    cache = SlotCache(target.num_layers, 1, length)
    states, caught = [], []
    begin = 0
    for part in parts:
        end = begin + part
        positions = torch.arange(begin, end)[None]
        cache.select(slice(0, 1), positions, end)
        masks = {
            kind: causal_mask(positions, end, window) for kind, window in target.windows.items()
        }
        state, tapped = target.forward(ids[:, begin:end], positions, cache, masks, taps)
        assert tapped is not None
        states.append(state)
        caught.append(tapped)
        begin = end
    return torch.cat(states, 1), torch.cat(caught, 1)


@each_variant
def test_greedy_text_is_that_of_generate(path_of: Callable[[str], Path], variant: str) -> None:
    path = path_of(variant)
    ours = decoded(Engine(load_target(path, "cpu", torch.float32), capacity=64))
    assert ours == generated(path)
    assert len(set(ours)) > 8  # a text that says the same thing over and over proves little


@each_variant
def test_a_random_drafter_does_not_change_the_text(
    path_of: Callable[[str], Path], variant: str
) -> None:
    target = load_target(path_of(variant), "cpu", torch.float32)
    drafter = new_drafter(DrafterShape(layers=1, taps=2), target, seed=1)
    plain = decoded(Engine(target, capacity=64))
    assert decoded(Engine(target, drafter, k=5, capacity=64)) == plain


@each_variant
def test_taps_are_the_outputs_of_their_layers(path_of: Callable[[str], Path], variant: str) -> None:
    """Tap L is hidden_states[L + 1], -1 the embedding output, in a prefill as in later blocks."""
    target = load_target(path_of(variant), "cpu", torch.float32)
    ids = torch.tensor([PROMPT + PROMPT[::-1] + PROMPT])
    taps = [2, -1, 0]
    with torch.no_grad():
        expected = target.model(input_ids=ids, output_hidden_states=True)
    states, caught = run_in_parts(target, ids, [6, 1, 4, 7], taps)
    wanted = torch.cat([expected.hidden_states[layer + 1] for layer in taps], dim=-1)
    torch.testing.assert_close(caught, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.logits(states), expected.logits, atol=1e-4, rtol=1e-4)


@each_variant
def test_bfloat16_loads_too(path_of: Callable[[str], Path], variant: str) -> None:
    """Rounding alone must not make a model look like one that cannot be decoded."""
    target = load_target(path_of(variant), "cpu", torch.bfloat16)
    assert (target.dtype, target.device.type) == (torch.bfloat16, "cpu")


def test_the_windows_are_those_of_the_config(path_of: Callable[[str], Path]) -> None:
    windows = {
        variant: load_target(path_of(variant), "cpu", torch.float32).windows
        for variant in ("llama", "mistral", "mistral without window", "gemma3")
    }
    assert windows == {
        "llama": {"all": None},
        "mistral": {"all": 8},
        "mistral without window": {"all": None},
        "gemma3": {"sliding_attention": 8, "full_attention": None},
    }


def test_no_tap_leaves_a_hook_behind(target: Target) -> None:
    run_in_parts(target, torch.tensor([PROMPT]), [6], [-1, 1])
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in target.model.modules()
    )


def test_softcap_bounds_the_logits(path_of: Callable[[str], Path]) -> None:
    target = load_target(path_of("gemma3 with tied embeddings and softcap"), "cpu", torch.float32)
    logits = target.logits(100 * torch.randn(5, target.hidden_size))
    assert target.head.softcap == 3.0
    assert 2.9 < logits.abs().max() <= 3.0


SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


def save_model(config: PreTrainedConfig, path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(**SMALL, logit_scale=0.25),
        GraniteConfig(**SMALL, logits_scaling=4.0, embedding_multiplier=3.0),
    ],
    ids=["cohere", "granite"],
)
def test_families_that_scale_their_logits_are_followed(
    tmp_path: Path, config: PreTrainedConfig
) -> None:
    """Greedy text would not show a wrong scale; sampling and drafting would suffer from it."""
    target = load_target(save_model(config, tmp_path), "cpu", torch.float32)
    ids = torch.tensor([[5, 6, 7, 30, 2]])
    with torch.no_grad():
        expected = target.model(input_ids=ids, output_hidden_states=True)
    states, caught = run_in_parts(target, ids, [3, 2], [-1])
    torch.testing.assert_close(target.logits(states), expected.logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(caught, expected.hidden_states[0])


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_logits_of_some_tokens_are_a_slice_of_the_whole(tmp_path: Path, scale: float) -> None:
    config = CohereConfig(**SMALL, logit_scale=scale)
    target = load_target(save_model(config, tmp_path), "cpu", torch.float32)
    states, tokens = torch.randn(2, 3, target.hidden_size), torch.tensor([49, 0, 7])
    sliced = target.logits(states)[..., tokens]
    torch.testing.assert_close(target.head.rows(tokens)(states), sliced)


def refused(path: Path) -> str:
    """The one line that says why a target is not loaded."""
    with pytest.raises(UserError) as caught:
        load_target(path, "cpu", torch.float32)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=64, eos_token_id=0),
        Qwen3NextConfig(
            **SMALL, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8
        ),
    ],
    ids=["learned positions", "linear attention"],
)
def test_families_that_the_decoder_cannot_run_are_refused(
    tmp_path: Path, config: PreTrainedConfig
) -> None:
    message = refused(save_model(config, tmp_path))
    assert f"models of type {config.model_type} cannot be decoded here" in message


def test_a_model_whose_logits_are_not_ours_is_refused(
    target_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a family that does something after its last layer which the decoder knows nothing of."""
    honest = Target.logits
    monkeypatch.setattr(Target, "logits", lambda self, states: 2 * honest(self, states))
    assert "its logits are not those of its last layer" in refused(target_copy)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert "is an encoder-decoder (t5)" in refused(tmp_path)


@pytest.mark.parametrize("name", ["absent", "owner/name"])
def test_a_missing_directory_is_not_looked_for_elsewhere(tmp_path: Path, name: str) -> None:
    """A path that looks like a repo on the hub is still a path."""
    assert "has no config.json" in refused(tmp_path / name)


def test_pickled_weights_are_never_read(target_copy: Path) -> None:
    torch.save(load_file(target_copy / "model.safetensors"), target_copy / "pytorch_model.bin")
    (target_copy / "model.safetensors").unlink()
    message = refused(target_copy)
    assert "lacks model.safetensors and pytorch_model.bin is a pickle" in message
    assert "save_pretrained" in message


@pytest.mark.parametrize("kept", [0.0, 0.0002, 0.5, 0.9999])
def test_truncated_weights_are_refused(target_copy: Path, kept: float) -> None:
    file = target_copy / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    message = refused(target_copy)
    assert f"target weights '{file}' are corrupt" in message and "fetch them again" in message


def test_a_missing_tensor_is_not_filled_with_random_numbers(target_copy: Path) -> None:
    file = target_copy / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert "tensor model.layers.1.mlp.up_proj.weight is missing" in refused(target_copy)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_makes_the_logits_meaningless_is_named(
    target_copy: Path, value: float
) -> None:
    file, name = target_copy / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    tensors[name][0] = value
    save_file(tensors, file, metadata={"format": "pt"})
    message = refused(target_copy)
    assert (
        f"gives logits that are not finite, for tensor {name} holds values that are not" in message
    )
    assert "fetch the model again" in message


def test_weights_that_exceed_the_memory_are_refused_before_they_are_read(
    target_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = load_target(target_path, "cpu", torch.float32).weight_bytes
    monkeypatch.setattr(target_module, "free_bytes", lambda device: needed - 1)
    message = refused(target_path)
    size = f"{needed / 2**30:.3g} GiB"
    assert f"needs {size} for its weights in float32 and cpu has {size} free" in message
    assert "precision bfloat16" in message
    load_target(target_path, "cpu", torch.bfloat16)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=["gpu", "cpu"],
)
def test_memory_that_runs_out_while_loading_is_told(
    target_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(self: torch.nn.Module, device: str) -> None:
        raise error

    monkeypatch.setattr(torch.nn.Module, "to", full)  # which brings a model to its device
    assert "for its weights in float32 and cpu has" in refused(target_path)


def test_a_misshapen_tensor_is_named_with_both_shapes(target_copy: Path) -> None:
    file = target_copy / "model.safetensors"
    tensors = load_file(file) | {"model.norm.weight": torch.ones(47)}
    save_file(tensors, file, metadata={"format": "pt"})
    assert "tensor model.norm.weight is [47], expected [48]" in refused(target_copy)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "nonsense"}'])
def test_a_broken_config_is_refused(target_copy: Path, text: str) -> None:
    (target_copy / "config.json").write_text(text)
    assert "cannot be loaded" in refused(target_copy)


def test_loading_leaves_the_directory_alone(tmp_path: Path, target_path: Path) -> None:
    copy = Path(shutil.copytree(target_path, tmp_path / "copy"))
    before = sorted((file.name, file.stat().st_mtime_ns) for file in copy.iterdir())
    target = load_target(copy, "cpu", torch.float32)
    assert sorted((file.name, file.stat().st_mtime_ns) for file in copy.iterdir()) == before
    assert target.vocab_size == VOCAB and not target.model.training
    assert not any(value.requires_grad for value in target.model.parameters())
