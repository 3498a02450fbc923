"""The `speculators` format: the same drafter from either format, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.config import DrafterShape
from dspark.decode.cache import SlotCache, causal_mask
from dspark.decode.draft import Draft, propose, write_context
from dspark.decode.sampling import Sampling
from dspark.errors import UserError
from dspark.models.checkpoint import (
    convert,
    load_drafter,
    read_config,
    save_drafter,
    save_speculators,
)
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target, load_target
from dspark.train.start import new_drafter

WEIGHTS = "model.safetensors"
BLOCK, ROWS = 5, 2
GREEDY = [Sampling()] * ROWS
WARM = [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=20)]
PROMPTS = torch.tensor([[40, 7, 120, 99, 260, 14], [3, 200, 31, 31, 77, 5]])
ANCHORS = torch.tensor([150, 8])
EditConfig = Callable[..., None]
HEADS = ["vanilla", "gated", "rnn"]
VOCABULARIES = [pytest.param(None, id="whole"), pytest.param(60, id="reduced")]


def make_drafter(
    target: Target, kind: str = "vanilla", drafted: int | None = None, seed: int = 0
) -> DSparkDrafter:
    """A random drafter whose every part matters; `drafted` random tokens, or all."""
    generator = torch.Generator().manual_seed(seed)
    shape = DrafterShape(
        layers=1, taps=2, block_size=BLOCK, markov_rank=8, markov_head_type=kind, mask_token_id=3
    )
    ids = torch.randperm(target.vocab_size, generator=generator)[:drafted].sort().values
    drafter = new_drafter(shape, target, seed, None if drafted is None else ids).eval()
    with torch.no_grad():
        for value in drafter.parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.1 * noise if value.dim() == 1 else 0.3 * noise)
    return drafter


@torch.inference_mode()
def drafts(drafter: DSparkDrafter, target: Target, sampling: list[Sampling] = WARM) -> Draft:
    """What a drafter proposes after `PROMPTS`, from the target's own hidden states."""
    rows, length = slice(0, ROWS), PROMPTS.shape[1]
    positions = torch.arange(length).expand(ROWS, -1)
    seen = SlotCache(target.num_layers, ROWS, length)
    seen.select(rows, positions, length)
    mask = {kind: causal_mask(positions, length) for kind in target.windows}
    _, taps = target.forward(PROMPTS, positions, seen, mask, drafter.target_layer_ids)
    assert taps is not None
    context = SlotCache(len(drafter.layers), ROWS, length + BLOCK)
    write_context(drafter, context, rows, taps, positions)
    uniforms = torch.rand(ROWS, BLOCK, generator=torch.Generator().manual_seed(5))
    starts = torch.full((ROWS,), length)
    return propose(drafter, context, ANCHORS, starts, length, BLOCK, sampling, uniforms)


def assert_same(one: Draft, other: Draft) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.confidence, other.confidence)
    assert torch.equal(one.logits, other.logits)
    assert (one.probs is None) == (other.probs is None)
    if one.probs is not None and other.probs is not None:
        assert torch.equal(one.probs, other.probs)


def edit_tensors(folder: Path, add: dict[str, Tensor] | None = None, drop: str = "nothing") -> None:
    """Add or replace tensors, and drop those whose name begins with `drop`."""
    tensors = load_file(folder / WEIGHTS) | (add or {})
    kept = {name: value for name, value in tensors.items() if not name.startswith(drop)}
    save_file(kept, folder / WEIGHTS)


def edit_nested(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    fields["transformer_layer_config"] |= changes
    file.write_text(json.dumps(fields))


def refused(folder: Path, target: Target) -> str:
    """The one line that says why a checkpoint is not loaded."""
    with pytest.raises(UserError) as caught:
        load_drafter(folder, target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def whole(tmp_path: Path, target: Target) -> Path:
    """A checkpoint of this format that drafts every token."""
    save_speculators(make_drafter(target), tmp_path / "whole", target)
    return tmp_path / "whole"


@pytest.fixture
def reduced(tmp_path: Path, target: Target) -> Path:
    """A checkpoint of this format that drafts 60 tokens."""
    save_speculators(make_drafter(target, "vanilla", 60), tmp_path / "reduced", target)
    return tmp_path / "reduced"


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("drafted", VOCABULARIES)
def test_both_formats_give_the_same_drafts(
    tmp_path: Path, target: Target, kind: str, drafted: int | None
) -> None:
    drafter = make_drafter(target, kind, drafted)
    save_drafter(drafter, tmp_path / "native")
    save_speculators(drafter, tmp_path / "speculators", target)
    for sampling in (GREEDY, WARM):
        expected = drafts(drafter, target, sampling)
        for folder in ("native", "speculators"):
            again = load_drafter(tmp_path / folder, target)
            assert_same(drafts(again, target, sampling), expected)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("drafted", VOCABULARIES)
def test_there_and_back_changes_no_bit(
    tmp_path: Path, target: Target, kind: str, drafted: int | None
) -> None:
    """A bfloat16 checkpoint with a float32 confidence head keeps both dtypes."""
    first, middle, last = (tmp_path / name for name in ("first", "middle", "last"))
    save_drafter(make_drafter(target, kind, drafted), first, torch.bfloat16)
    edit_tensors(first, add={"confidence_head.proj.weight": torch.randn(1, 56)})
    (first / "calibration.json").write_text('{"temperatures": [1, 2, 3, 4, 5]}\n')
    convert(first, middle, "speculators", target)
    convert(middle, last, "native", target)

    before, after = load_file(first / WEIGHTS), load_file(last / WEIGHTS)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype and torch.equal(value, after[name]), name
    assert read_config(first).to_dict() == read_config(last).to_dict()
    for folder in (middle, last):
        copied = (folder / "calibration.json").read_bytes()
        assert copied == (first / "calibration.json").read_bytes()
        assert sorted(path.name for path in folder.iterdir()) == [
            "calibration.json",
            "config.json",
            WEIGHTS,
        ]
    expected = drafts(load_drafter(first, target), target)
    for folder in (middle, last):
        assert_same(drafts(load_drafter(folder, target), target), expected)


@pytest.mark.parametrize("name", ["vanilla_confmarkov", "gated_confhidden", "rnn_confmarkov"])
def test_a_golden_drafter_survives_both_conversions(
    golden: Path, tmp_path: Path, name: str
) -> None:
    target = load_target(golden / "target", "cpu", torch.float32)
    convert(golden / name, tmp_path / "theirs", "speculators", target)
    convert(tmp_path / "theirs", tmp_path / "ours", "native", target)
    before = json.loads((golden / name / "config.json").read_text())
    after = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert {field: after[field] for field in before} == before
    stored = load_file(golden / name / WEIGHTS)
    for folder in ("theirs", "ours"):
        for tensor, value in load_file(tmp_path / folder / WEIGHTS).items():
            assert torch.equal(value, stored[tensor]), tensor


def test_a_stale_calibration_is_not_left_beside_another_drafter(
    tmp_path: Path, target: Target, whole: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "calibration.json").write_text("{}")
    convert(whole, out, "native", target)
    assert not (out / "calibration.json").exists()


def test_layer_ids_are_ours_plus_one(whole: Path, target: Target, edit_config: EditConfig) -> None:
    """And it matters: read one off, the same weights draft something else."""
    drafter = load_drafter(whole, target)
    ids = json.loads((whole / "config.json").read_text())["aux_hidden_state_layer_ids"]
    assert ids == [layer + 1 for layer in drafter.target_layer_ids]
    expected = drafts(drafter, target)
    edit_config(whole, aux_hidden_state_layer_ids=[layer - 1 for layer in ids])
    shifted = drafts(load_drafter(whole, target), target)
    assert not torch.equal(shifted.tokens, expected.tokens)
    assert (shifted.logits - expected.logits).abs().max() > 0.1


@pytest.mark.parametrize("ids", [[0, 1], [1, 3]])
def test_the_embedding_output_is_layer_zero(
    whole: Path, target: Target, edit_config: EditConfig, ids: list[int]
) -> None:
    edit_config(whole, aux_hidden_state_layer_ids=ids)
    assert load_drafter(whole, target).target_layer_ids == [layer - 1 for layer in ids]


@pytest.mark.parametrize("ids", [[-1, 1], [1, 4]])
def test_layers_that_the_target_cannot_be_tapped_at_are_refused(
    whole: Path, target: Target, edit_config: EditConfig, ids: list[int]
) -> None:
    edit_config(whole, aux_hidden_state_layer_ids=ids)
    assert "lie outside -1..2 of this target" in refused(whole, target)


def test_a_whole_vocabulary_is_written_without_what_is_the_targets(
    whole: Path, target: Target
) -> None:
    names = set(load_file(whole / WEIGHTS))
    assert not names & {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    fields = json.loads((whole / "config.json").read_text())
    assert fields["draft_vocab_size"] == target.vocab_size


def test_a_reduced_vocabulary_is_written_with_all_that_engines_need(
    reduced: Path, target: Target
) -> None:
    tensors = load_file(reduced / WEIGHTS)
    ids = tensors["d2t"] + torch.arange(60)
    assert tensors["d2t"].dtype is torch.int64 and (ids.diff() > 0).all()
    assert tensors["t2d"].dtype is torch.bool
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert torch.equal(tensors["lm_head.weight"], target.head.weight[ids])
    assert torch.equal(tensors["embed_tokens.weight"], target.embed.weight)
    assert tensors["markov_head.markov_w1.weight"].shape == (300, 8)
    assert tensors["markov_head.markov_w2.weight"].shape == (60, 8)
    assert len(tensors) == 11 + 11  # as many as public checkpoints have: 11 a layer and 11 more


def test_the_config_has_the_formats_fields(reduced: Path, target: Target) -> None:
    fields = json.loads((reduced / "config.json").read_text())
    nested = fields.pop("transformer_layer_config")
    ids = [layer + 1 for layer in load_drafter(reduced, target).target_layer_ids]
    assert fields == {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": ids,
        "block_size": BLOCK,
        "confidence_head_with_markov": True,
        "draft_vocab_size": 60,
        "dtype": "float32",
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 8,
        "mask_token_id": 3,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": BLOCK,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "architectures": ["LlamaForCausalLM"],
                "name_or_path": target.model.name_or_path,
            },
        },
        "speculators_model_type": "dspark",
        "target_hidden_size": 48,
        "tie_word_embeddings": False,
    }
    expected = {"model_type": "qwen3", "num_hidden_layers": 1, "vocab_size": 300, "hidden_size": 48}
    assert {name: nested[name] for name in expected} == expected
    assert not {"block_size", "target_layer_ids", "num_target_layers"} & nested.keys()


def test_the_verifier_may_be_named(tmp_path: Path, target: Target, whole: Path) -> None:
    def verifier(folder: str) -> Any:
        fields = json.loads((tmp_path / folder / "config.json").read_text())
        return fields["speculators_config"]["verifier"]["name_or_path"]

    save_speculators(make_drafter(target), tmp_path / "saved", target, verifier="org/target")
    convert(whole, tmp_path / "native", "native", target)
    convert(tmp_path / "native", tmp_path / "back", "speculators", target, "org/target")
    assert verifier("saved") == verifier("back") == "org/target"


def test_a_config_as_the_library_writes_it_is_read(
    whole: Path, target: Target, edit_config: EditConfig
) -> None:
    """Nested fields at a Qwen3 model's defaults are left out there, and others' noise is kept."""
    expected = drafts(load_drafter(whole, target), target)
    nested = json.loads((whole / "config.json").read_text())["transformer_layer_config"]
    for default in ("hidden_act", "attention_bias", "rms_norm_eps", "layer_types", "use_cache"):
        del nested[default]
    noise = {"_attn_implementation": "eager", "torch_dtype": "bfloat16", "sliding_window": None}
    edit_config(
        whole,
        transformer_layer_config=nested | noise | {"tie_word_embeddings": True},
        speculators_version="0.6.0",
        transformers_version="4.57.0",
        num_anchors=3072,
        ce_loss_alpha=0.1,
        projector_type="dflash",
    )
    again = load_drafter(whole, target)
    assert_same(drafts(again, target), expected)
    assert again.config.tie_word_embeddings is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stored_lm_head_of_a_reduced_vocabulary_is_used(
    reduced: Path, target_path: Path, dtype: torch.dtype
) -> None:
    target = load_target(target_path, "cpu", dtype)
    shared = drafts(load_drafter(reduced, target), target)
    own = torch.randn(60, 48)
    edit_tensors(reduced, add={"lm_head.weight": own})
    drafter = load_drafter(reduced, target)
    assert torch.equal(drafter.lm_head.weight, own.to(dtype))
    assert not torch.equal(drafts(drafter, target).logits, shared.logits)
    edit_tensors(reduced, drop="lm_head.")
    assert_same(drafts(load_drafter(reduced, target), target), shared)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_stored_lm_head_is_scaled_and_capped_as_the_targets(
    reduced: Path, target_path: Path, packed: bool
) -> None:
    target = load_target(target_path, "cpu", torch.float32)
    target.head = replace(target.head, scale=0.5, softcap=3.0)
    if packed:
        target.pack()
    states, own = torch.randn(4, 48), torch.randn(60, 48)
    edit_tensors(reduced, add={"lm_head.weight": own})
    logits = load_drafter(reduced, target).lm_head(states)
    torch.testing.assert_close(logits, 3 * torch.tanh(0.5 * states @ own.T / 3))


def test_a_stored_lm_head_of_a_whole_vocabulary_gives_way_to_the_targets(
    whole: Path, target: Target
) -> None:
    shared = {name: torch.ones(300, 48) for name in ("embed_tokens.weight", "lm_head.weight")}
    expected = drafts(load_drafter(whole, target), target)
    edit_tensors(whole, add=shared)
    assert_same(drafts(load_drafter(whole, target), target), expected)


def test_embeddings_are_the_targets(reduced: Path, target: Target) -> None:
    expected = drafts(load_drafter(reduced, target), target)
    edit_tensors(reduced, add={"embed_tokens.weight": torch.ones(300, 48)})
    assert_same(drafts(load_drafter(reduced, target), target), expected)
    edit_tensors(reduced, add={"embed_tokens.weight": torch.ones(60, 48)})
    assert "embed_tokens.weight is [60, 48], expected [300, 48]" in refused(reduced, target)


@pytest.mark.parametrize("name", ["verifier_lm_head.weight", "verifier_norm.weight"])
def test_tensors_of_the_verifier_are_skipped(reduced: Path, target: Target, name: str) -> None:
    expected = drafts(load_drafter(reduced, target), target)
    edit_tensors(reduced, add={name: torch.ones(2)})
    assert_same(drafts(load_drafter(reduced, target), target), expected)


def test_other_tensors_are_refused_by_name(reduced: Path, target: Target) -> None:
    edit_tensors(reduced, add={"modality_head.weight": torch.ones(2)})
    assert "tensor modality_head.weight is not one of a DSpark" in refused(reduced, target)


def test_the_mapping_is_needed_and_checked(reduced: Path, target: Target) -> None:
    tensors = load_file(reduced / WEIGHTS)
    edit_tensors(reduced, drop="t2d")
    load_drafter(reduced, target)
    edit_tensors(reduced, add={"t2d": tensors["t2d"].roll(1)})
    assert "t2d does not mark the tokens that d2t maps to" in refused(reduced, target)
    edit_tensors(reduced, add={"t2d": tensors["t2d"][:-1]})
    assert "tensor t2d is [299], expected [300]" in refused(reduced, target)
    edit_tensors(reduced, add={"t2d": tensors["t2d"]}, drop="d2t")
    assert "tensor d2t [60] is missing" in refused(reduced, target)
    edit_tensors(reduced, add={"d2t": torch.full((60,), 270)}, drop="t2d")
    assert "d2t does not give ascending ids below" in refused(reduced, target)
    edit_tensors(reduced, add={"d2t": tensors["d2t"], "lm_head.weight": torch.ones(300, 48)})
    assert "lm_head.weight is [300, 48], expected [60, 48]" in refused(reduced, target)


def test_a_whole_vocabulary_may_bring_its_trivial_mapping(whole: Path, target: Target) -> None:
    expected = drafts(load_drafter(whole, target), target)
    zeros, ones = torch.zeros(300, dtype=torch.long), torch.ones(300, dtype=torch.bool)
    edit_tensors(whole, add={"d2t": zeros, "t2d": ones})
    drafter = load_drafter(whole, target)
    assert drafter.d2t is None
    assert_same(drafts(drafter, target), expected)
    edit_tensors(whole, add={"d2t": zeros, "t2d": ones ^ (torch.arange(300) == 5)})
    assert "t2d does not mark" in refused(whole, target)


@pytest.mark.parametrize(
    ("flag", "tokens", "reason"),
    [
        pytest.param(True, BLOCK, None, id="told"),
        pytest.param(True, BLOCK - 1, None, id="told-with-fewer-tokens"),
        pytest.param(None, BLOCK, None, id="implied"),
        pytest.param(None, None, None, id="not-decidable"),
        pytest.param(None, 3, None, id="not-decidable-tokens"),
        pytest.param(None, BLOCK - 1, "add sample_from_anchor: true", id="implied-bonus"),
        pytest.param(False, BLOCK, "sample_from_anchor is False", id="told-bonus"),
        pytest.param(False, None, "sample_from_anchor is False", id="told-bonus-alone"),
        pytest.param("yes", BLOCK, "sample_from_anchor is 'yes'", id="nonsense"),
    ],
)
def test_only_anchor_first_blocks_are_read(
    whole: Path,
    target: Target,
    edit_config: EditConfig,
    flag: Any,
    tokens: int | None,
    reason: str | None,
) -> None:
    methods = [{"proposal_type": "greedy", "speculative_tokens": tokens}]
    about = {"algorithm": "dspark", "proposal_methods": methods} if tokens else None
    edit_config(whole, sample_from_anchor=flag, speculators_config=about)
    if reason is None:
        load_drafter(whole, target)
    else:
        assert reason in refused(whole, target)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'"),
        ({"speculators_config": {"algorithm": "dflash"}}, "algorithm is 'dflash'"),
        (
            {"speculators_config": {"proposal_methods": [{"proposal_type": "tree"}]}},
            "proposal_type is 'tree'",
        ),
        ({"speculators_config": [1]}, "speculators_config is broken"),
        ({"speculators_config": {"proposal_methods": "greedy"}}, "speculators_config is broken"),
        ({"projector_type": "domino"}, "projector_type is 'domino'"),
        ({"shift_label": True}, "shift_label is True"),
        ({"aux_hidden_state_layer_offset": 1}, "aux_hidden_state_layer_offset is 1"),
        ({"aux_hidden_state_layer_ids": "1"}, "aux_hidden_state_layer_ids is '1'"),
        ({"aux_hidden_state_layer_ids": [1.0]}, "aux_hidden_state_layer_ids is [1.0]"),
        ({"aux_hidden_state_layer_ids": []}, "target_layer_ids is []"),
        ({"aux_hidden_state_layer_ids": None}, "lacks aux_hidden_state_layer_ids"),
        ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ({"transformer_layer_config": 3}, "transformer_layer_config is 3"),
        ({"block_size": None}, "lacks block_size"),
        ({"block_size": "8"}, "block_size is '8'"),
        ({"markov_rank": 0}, "markov_rank is 0"),
        ({"markov_head_type": "tree"}, "markov_head_type 'tree' is unknown"),
        ({"draft_vocab_size": 301}, "draft_vocab_size is 301"),
        ({"mask_token_id": 300}, "mask_token_id 300"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_this_decoder_lacks_or_no_drafter_has_is_named(
    whole: Path, target: Target, edit_config: EditConfig, change: dict[str, Any], reason: str
) -> None:
    edit_config(whole, **change)
    assert reason in refused(whole, target)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "llama"}, "transformer_layer_config is 'llama', expected the fields"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 64},
            "layer_types has sliding_attention",
        ),
        (
            {
                "layer_types": None,
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": 0,
            },
            "layer_types has sliding_attention",
        ),
        ({"hidden_size": 40}, "hidden_size is 40 in the drafter and 48 in the target"),
        ({"vocab_size": 301}, "vocab_size is 301 in the drafter and 300 in the target"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_network_that_is_not_a_drafters_is_named(
    whole: Path, target: Target, change: dict[str, Any], reason: str
) -> None:
    edit_nested(whole, **change)
    assert reason in refused(whole, target)


def test_the_targets_layers_come_with_the_target(whole: Path, target: Target) -> None:
    assert load_drafter(whole, target).config.num_target_layers == target.num_layers
    assert read_config(whole, 9).num_target_layers == 9
    with pytest.raises(UserError, match="does not tell the target's layers"):
        read_config(whole)


def test_an_lm_head_of_its_own_does_not_fit_the_native_format(
    reduced: Path, target_path: Path, target: Target, tmp_path: Path
) -> None:
    """Converted, the drafter would draft with the target's: no longer the same drafter."""
    edit_tensors(reduced, add={"lm_head.weight": torch.randn(60, 48)})
    with pytest.raises(UserError, match=r"lm_head\.weight \[60, 48\] is not the target's"):
        convert(reduced, tmp_path / "out", "native", target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_rounding_alone_makes_no_lm_head_of_its_own(
    reduced: Path, target_path: Path, tmp_path: Path, stored: torch.dtype, loaded: torch.dtype
) -> None:
    head = load_file(reduced / WEIGHTS)["lm_head.weight"]
    edit_tensors(reduced, add={"lm_head.weight": head.to(stored)})
    convert(reduced, tmp_path / "out", "native", load_target(target_path, "cpu", loaded))
    assert "lm_head.weight" not in load_file(tmp_path / "out" / WEIGHTS)


def test_an_lm_head_with_a_bias_does_not_fit_this_format(tmp_path: Path, target_path: Path) -> None:
    target = load_target(target_path, "cpu", torch.float32)
    target.head = replace(target.head, bias=torch.randn(300))
    drafter = make_drafter(target, "vanilla", 60)
    with pytest.raises(UserError, match="LM head has a bias"):
        save_speculators(drafter, tmp_path / "out", target)
    save_drafter(drafter, tmp_path / "native")
    with pytest.raises(UserError, match="LM head has a bias"):
        convert(tmp_path / "native", tmp_path / "out", "speculators", target)
    assert not (tmp_path / "out").exists()


def test_a_conversion_that_makes_no_sense_is_refused(
    tmp_path: Path, target: Target, whole: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="'specualtors' is unknown: did you mean 'speculators'"):
        convert(whole, out, "specualtors", target)
    with pytest.raises(UserError, match="is in the speculators format already"):
        convert(whole, out, "speculators", target)
    with pytest.raises(UserError, match="into itself"):
        convert(whole, tmp_path / "x" / ".." / "whole", "native", target)
    with pytest.raises(UserError, match=r"has no config\.json"):
        convert(tmp_path / "absent", out, "native", target)
    assert not out.exists()
    out.write_text("a file")
    with pytest.raises(UserError, match="cannot write"):
        convert(whole, out, "native", target)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    kind=st.sampled_from(HEADS),
    drafted=st.integers(1, 300),
    seed=st.integers(0, 9),
    sampling=st.lists(
        st.builds(
            Sampling,
            temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
            top_p=st.sampled_from([0.5, 1.0]),
            top_k=st.sampled_from([0, 5]),
        ),
        min_size=ROWS,
        max_size=ROWS,
    ),
)
def test_a_reduced_drafter_stays_in_its_vocabulary(
    tmp_path: Path,
    target: Target,
    kind: str,
    drafted: int,
    seed: int,
    sampling: list[Sampling],
) -> None:
    """Drafts are target ids of the draft vocabulary, which alone has probability."""
    save_speculators(make_drafter(target, kind, drafted, seed), tmp_path, target)
    drafter = load_drafter(tmp_path, target)
    ids = drafter.draft_ids
    draft = drafts(drafter, target, sampling)
    assert torch.isin(draft.tokens, ids).all()
    assert draft.logits.shape == (ROWS, BLOCK, drafted)
    assert drafter.markov_head.markov_w1.weight.shape[0] == target.vocab_size
    if draft.probs is None:
        assert all(row.greedy for row in sampling)
        assert torch.equal(draft.tokens, ids[draft.logits.argmax(-1)])
        return
    outside = torch.ones(target.vocab_size, dtype=torch.bool)
    outside[ids] = False
    assert draft.probs.shape == (ROWS, BLOCK, target.vocab_size)
    assert (draft.probs[..., outside] == 0).all()
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(ROWS, BLOCK))
    assert (draft.probs.gather(-1, draft.tokens[..., None]) > 0).all()


@pytest.mark.parametrize("kind", HEADS)
def test_the_markov_chain_reads_target_ids(tmp_path: Path, target: Target, kind: str) -> None:
    """Fed the draft's own ids instead, it would come to other logits."""
    save_speculators(make_drafter(target, kind, 60), tmp_path, target)
    drafter = load_drafter(tmp_path, target)
    draft = drafts(drafter, target)
    head, base = drafter.markov_head, drafter.lm_head(draft.hidden)
    own_ids = torch.searchsorted(drafter.draft_ids, draft.tokens)
    chains = []
    with torch.inference_mode():
        for tokens in (draft.tokens, own_ids):
            previous = torch.cat([ANCHORS[:, None], tokens[:, :-1]], dim=1)
            chains.append(base + head.bias(head.block_latents(draft.hidden, previous)))
    torch.testing.assert_close(chains[0], draft.logits, atol=1e-4, rtol=0)
    assert (chains[1] - draft.logits).abs().max() > 0.1
