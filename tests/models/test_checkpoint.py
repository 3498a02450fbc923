"""Native checkpoints: what is written, what is read, and one line for everything that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dspark.config import DrafterShape
from dspark.errors import UserError
from dspark.models.checkpoint import load_drafter, read_config, save_drafter
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target, load_target
from dspark.train.start import new_drafter

WEIGHTS = "model.safetensors"
EditConfig = Callable[..., None]


def edit_tensors(
    folder: Path, add: dict[str, torch.Tensor] | None = None, drop: str = "nothing"
) -> None:
    """Add or replace tensors, and drop those whose name begins with `drop`."""
    tensors = load_file(folder / WEIGHTS) | (add or {})
    kept = {name: value for name, value in tensors.items() if not name.startswith(drop)}
    save_file(kept, folder / WEIGHTS)


def refused(folder: Path, target: Target) -> str:
    """The one line that says why a checkpoint is not loaded."""
    with pytest.raises(UserError) as caught:
        load_drafter(folder, target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same_weights(one: DSparkDrafter, other: DSparkDrafter) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.builds(
        DrafterShape,
        layers=st.integers(1, 2),
        target_layer_ids=st.lists(st.integers(-1, 2), min_size=1, max_size=4, unique=True),
        block_size=st.integers(1, 9),
        markov_rank=st.integers(1, 16),
        markov_head_type=st.sampled_from(["vanilla", "gated", "rnn"]),
        confidence_head_with_markov=st.booleans(),
        mask_token_id=st.integers(0, 299),
    ),
    seed=st.integers(0, 5),
)
def test_a_saved_drafter_loads_as_it_was(
    tmp_path: Path, target: Target, shape: DrafterShape, seed: int
) -> None:
    drafter = new_drafter(shape, target, seed)
    save_drafter(drafter, tmp_path)
    again = load_drafter(tmp_path, target)
    assert same_weights(drafter, again)
    assert again.target_layer_ids == shape.target_layer_ids
    assert again.block_size == shape.block_size
    assert again.config.mask_token_id == shape.mask_token_id
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", WEIGHTS]


def test_a_saved_checkpoint_has_the_native_fields_and_names(golden: Path, tmp_path: Path) -> None:
    """A golden drafter that is loaded and saved is the golden drafter, to the last field."""
    target = load_target(golden / "target", "cpu", torch.float32)
    save_drafter(load_drafter(golden / "rnn_confmarkov", target), tmp_path)
    before, after = (
        json.loads((folder / "config.json").read_text())
        for folder in (golden / "rnn_confmarkov", tmp_path)
    )
    assert {name: after[name] for name in before} == before
    before, after = (
        load_file(folder / WEIGHTS) for folder in (golden / "rnn_confmarkov", tmp_path)
    )
    assert set(before) - set(after) <= {"embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(before[name], value) for name, value in after.items())


def test_embedding_and_lm_head_are_not_written(checkpoint: Path) -> None:
    names = set(load_file(checkpoint / WEIGHTS))
    assert {"fc.weight", "markov_head.markov_w1.weight", "layers.0.self_attn.q_norm.weight"} < names
    assert not [name for name in names if "embed_tokens" in name or "lm_head" in name]


def test_stored_embedding_and_lm_head_give_way_to_the_targets(
    checkpoint: Path, target: Target
) -> None:
    plain = load_drafter(checkpoint, target)
    shape = (target.vocab_size, target.hidden_size)
    shared = {name: torch.ones(shape) for name in ("embed_tokens.weight", "lm_head.weight")}
    edit_tensors(checkpoint, add=shared)
    drafter = load_drafter(checkpoint, target)
    assert same_weights(plain, drafter)
    assert drafter.embed_tokens is target.embed
    states = torch.randn(1, target.hidden_size)
    assert torch.equal(drafter.lm_head(states), target.logits(states))


def test_sharded_weights_load_through_their_index(checkpoint: Path, target: Target) -> None:
    whole = load_drafter(checkpoint, target)
    tensors = load_file(checkpoint / WEIGHTS)
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for shard in set(names.values()):
        part = {name: tensors[name] for name, file in names.items() if file == shard}
        save_file(part, checkpoint / shard)
    (checkpoint / WEIGHTS).unlink()
    (checkpoint / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": names}))
    assert same_weights(whole, load_drafter(checkpoint, target))

    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    assert "lacks model-00002-of-00002.safetensors" in refused(checkpoint, target)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000],
    ids=["open", "list", "empty", "number", "names", "nested"],
)
def test_a_broken_index_is_named(checkpoint: Path, target: Target, text: str) -> None:
    (checkpoint / WEIGHTS).unlink()
    (checkpoint / f"{WEIGHTS}.index.json").write_text(text)
    assert "model.safetensors.index.json' is broken" in refused(checkpoint, target)


def test_a_checkpoint_without_confidence_head_trusts_every_token(
    checkpoint: Path, target: Target, edit_config: EditConfig
) -> None:
    edit_config(checkpoint, enable_confidence_head=False)
    edit_tensors(checkpoint, drop="confidence_head.")
    drafter = load_drafter(checkpoint, target)
    hidden = torch.zeros(2, 3, target.hidden_size)
    confidence = drafter.confidence_logits(hidden, torch.zeros(2, 3, dtype=torch.long))
    assert confidence.sigmoid().eq(1).all()


def test_weights_take_the_targets_dtype_but_rope_stays_float32(
    checkpoint: Path, target_path: Path, target: Target
) -> None:
    """bfloat16 frequencies would be whole radians off some hundred positions on."""
    half = load_target(target_path, "cpu", torch.bfloat16)
    drafter = load_drafter(checkpoint, half)
    assert {value.dtype for value in drafter.parameters()} == {torch.bfloat16}
    frequencies = load_drafter(checkpoint, target).rotary_emb.inv_freq
    assert drafter.rotary_emb.inv_freq.dtype is torch.float32
    assert torch.equal(drafter.rotary_emb.inv_freq, frequencies)


def test_old_style_rope_theta_gives_the_same_rope(
    checkpoint: Path, target: Target, edit_config: EditConfig
) -> None:
    """Older configs have rope_theta at the top, newer ones inside rope_parameters."""
    drafters = []
    for fields in (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": None},
        {"rope_parameters": None, "rope_theta": 5e5},
    ):
        edit_config(checkpoint, **fields)
        drafters.append(load_drafter(checkpoint, target))
    x, positions = torch.zeros(1, 1, 1), torch.tensor([[0, 1, 400]])
    new, old = (drafter.rotary_emb(x, positions) for drafter in drafters)
    assert torch.equal(new[0], old[0]) and torch.equal(new[1], old[1])
    edit_config(checkpoint, rope_theta=1e4)
    assert not torch.equal(load_drafter(checkpoint, target).rotary_emb(x, positions)[0], new[0])


def test_a_directory_without_config_is_refused(tmp_path: Path, target: Target) -> None:
    assert "has no config.json" in refused(tmp_path, target)
    assert "has no config.json" in refused(tmp_path / "absent", target)


def test_a_file_in_place_of_a_directory_is_refused(checkpoint: Path, target: Target) -> None:
    assert "has no config.json" in refused(checkpoint / "config.json", target)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe{}", b""])
def test_a_config_that_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json' is not JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", ["[]", "3", '"block_size"'])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match="not a JSON object"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "field", ["block_size", "target_layer_ids", "mask_token_id", "markov_rank", "num_target_layers"]
)
def test_a_missing_dspark_field_is_named(
    checkpoint: Path, target: Target, edit_config: EditConfig, field: str
) -> None:
    edit_config(checkpoint, **{field: None})
    assert f"lacks {field}:" in refused(checkpoint, target)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("block_size", "7"),
        ("target_layer_ids", []),
        ("target_layer_ids", "0"),
        ("target_layer_ids", [0.5]),
        ("mask_token_id", -1),
        ("markov_rank", True),
        ("hidden_size", "wide"),
        ("layer_types", ["nonsense"]),
        ("hidden_act", "nonsense"),
        ("rope_parameters", {"rope_type": "nonsense", "rope_theta": 1.0}),
        ("markov_head_type", "nonsense"),
    ],
)
def test_a_senseless_value_is_named(
    checkpoint: Path, target: Target, edit_config: EditConfig, field: str, value: Any
) -> None:
    edit_config(checkpoint, **{field: value})
    message = refused(checkpoint, target)
    assert field in message or "nonsense" in message


@pytest.mark.parametrize(
    ("field", "theirs"), [("hidden_size", 48), ("vocab_size", 300), ("num_target_layers", 4)]
)
def test_a_drafter_of_another_target_is_told_field_and_both_values(
    checkpoint: Path, target: Target, edit_config: EditConfig, field: str, theirs: int
) -> None:
    edit_config(checkpoint, **{field: theirs + 2})
    message = refused(checkpoint, target)
    assert f"{field} is {theirs + 2} in the drafter and {theirs} in the target" in message


@pytest.mark.parametrize("layer", [3, 4, -2])
def test_the_last_layer_and_those_beyond_cannot_be_tapped(
    checkpoint: Path, target: Target, edit_config: EditConfig, layer: int
) -> None:
    """Of four layers 0..3, the last is tapped by some before the final norm, by others after."""
    edit_config(checkpoint, target_layer_ids=[0, layer])
    assert f"target_layer_ids [{layer}] lie outside -1..2" in refused(checkpoint, target)


def test_a_mask_token_outside_the_vocabulary_is_refused(
    checkpoint: Path, target: Target, edit_config: EditConfig
) -> None:
    edit_config(checkpoint, mask_token_id=300)
    assert "mask_token_id 300 is not in the target's vocabulary of 300" in refused(
        checkpoint, target
    )


def test_a_missing_tensor_is_named_with_its_shape(checkpoint: Path, target: Target) -> None:
    edit_tensors(checkpoint, drop="hidden_norm.weight")
    assert "tensor hidden_norm.weight [48] is missing" in refused(checkpoint, target)


def test_a_misshapen_tensor_is_named_with_both_shapes(checkpoint: Path, target: Target) -> None:
    edit_tensors(checkpoint, add={"norm.weight": torch.ones(47)})
    assert "tensor norm.weight is [47], expected [48]" in refused(checkpoint, target)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_stored_shared_tensor_must_have_the_targets_shape(
    checkpoint: Path, target: Target, name: str
) -> None:
    edit_tensors(checkpoint, add={name: torch.ones(299, 48)})
    assert f"tensor {name} is [299, 48], expected [300, 48]" in refused(checkpoint, target)


def test_an_unknown_tensor_is_named(checkpoint: Path, target: Target) -> None:
    edit_tensors(checkpoint, add={"mtp.0.weight": torch.ones(3)})
    assert "tensor mtp.0.weight is not one of a DSpark drafter's" in refused(checkpoint, target)


def test_a_stored_mapping_of_a_whole_vocabulary_must_leave_tokens_where_they_are(
    checkpoint: Path, target: Target
) -> None:
    plain = load_drafter(checkpoint, target)
    edit_tensors(checkpoint, add={"d2t": torch.zeros(300, dtype=torch.long)})
    again = load_drafter(checkpoint, target)
    assert again.d2t is None and same_weights(plain, again)
    edit_tensors(checkpoint, add={"d2t": torch.ones(300, dtype=torch.long)})
    assert "d2t moves tokens though draft_vocab_size is the whole" in refused(checkpoint, target)
    edit_tensors(checkpoint, add={"d2t": torch.zeros(40, dtype=torch.long)})
    assert "tensor d2t is [40], expected [300]" in refused(checkpoint, target)


@pytest.fixture
def reduced(checkpoint: Path, edit_config: EditConfig) -> Path:
    """A checkpoint that drafts every third token of the first 120 alone."""
    weight = load_file(checkpoint / WEIGHTS)["markov_head.markov_w2.weight"]
    offsets = 2 * torch.arange(40)
    edit_config(checkpoint, draft_vocab_size=40)
    edit_tensors(checkpoint, add={"markov_head.markov_w2.weight": weight[:40], "d2t": offsets})
    return checkpoint


def test_a_reduced_vocabulary_takes_the_targets_rows(
    reduced: Path, target: Target, tmp_path: Path
) -> None:
    drafter = load_drafter(reduced, target)
    assert drafter.draft_ids.tolist() == list(range(0, 120, 3))
    states = torch.randn(2, target.hidden_size)
    torch.testing.assert_close(drafter.lm_head(states), target.logits(states)[:, 0:120:3])
    assert drafter.markov_head.markov_w1.weight.shape[0] == target.vocab_size

    save_drafter(drafter, tmp_path / "again")
    assert same_weights(drafter, load_drafter(tmp_path / "again", target))
    assert read_config(tmp_path / "again").draft_vocab_size == 40


@pytest.mark.parametrize("rows", [40, 300])
def test_a_stored_lm_head_of_a_reduced_vocabulary_gives_way_to_the_targets(
    reduced: Path, target: Target, rows: int
) -> None:
    edit_tensors(reduced, add={"lm_head.weight": torch.ones(rows, 48)})
    states = torch.randn(2, target.hidden_size)
    logits = load_drafter(reduced, target).lm_head(states)
    torch.testing.assert_close(logits, target.logits(states)[:, 0:120:3])
    edit_tensors(reduced, add={"lm_head.weight": torch.ones(41, 48)})
    assert "lm_head.weight is [41, 48], expected [40, 48] or [300, 48]" in refused(reduced, target)


@pytest.mark.parametrize("size", [300, None])
def test_a_draft_vocabulary_of_all_tokens_is_none(
    checkpoint: Path, target: Target, size: int | None
) -> None:
    fields = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(fields | {"draft_vocab_size": size}))
    assert "draft_vocab_size" not in read_config(checkpoint).to_dict()
    drafter = load_drafter(checkpoint, target)
    assert drafter.d2t is None and drafter.markov_head.markov_w2.weight.shape[0] == 300


@pytest.mark.parametrize("size", [0, -1, 301, "40", True, 40.0])
def test_a_senseless_draft_vocabulary_is_refused(
    checkpoint: Path, target: Target, edit_config: EditConfig, size: Any
) -> None:
    edit_config(checkpoint, draft_vocab_size=size)
    message = refused(checkpoint, target)
    assert f"draft_vocab_size is {size!r}, expected a whole number in 1..300" in message


@pytest.mark.parametrize(
    "offsets",
    [
        pytest.param([0, 0, -1], id="falling"),
        pytest.param([0, 0, 298], id="beyond"),
        pytest.param([-1, 0, 0], id="negative"),
        pytest.param([0, -1, 0], id="twice"),
    ],
)
def test_draft_tokens_must_be_ascending_tokens_of_the_target(
    checkpoint: Path, target: Target, edit_config: EditConfig, offsets: list[int]
) -> None:
    weight = load_file(checkpoint / WEIGHTS)["markov_head.markov_w2.weight"][:3]
    edit_config(checkpoint, draft_vocab_size=3)
    edit_tensors(checkpoint, add={"markov_head.markov_w2.weight": weight})
    assert "tensor d2t [3] is missing" in refused(checkpoint, target)
    edit_tensors(checkpoint, add={"d2t": torch.tensor(offsets)})
    assert "d2t does not give ascending ids below the target's" in refused(checkpoint, target)


def test_a_tensor_of_the_wrong_kind_of_number_is_refused(reduced: Path, target: Target) -> None:
    offsets = load_file(reduced / WEIGHTS)["d2t"]
    edit_tensors(reduced, add={"d2t": offsets.float()})
    assert "tensor d2t is float32, expected whole numbers" in refused(reduced, target)
    int8 = torch.ones(48, dtype=torch.int8)
    edit_tensors(reduced, add={"d2t": offsets, "norm.weight": int8})
    assert "tensor norm.weight is int8, expected unquantised weights" in refused(reduced, target)


def test_what_the_decoder_does_not_have_is_refused_by_name(
    checkpoint: Path, target: Target, edit_config: EditConfig
) -> None:
    edit_config(checkpoint, sample_from_anchor=False)
    assert "sample_from_anchor is False" in refused(checkpoint, target)
    edit_config(checkpoint, sample_from_anchor=True)
    load_drafter(checkpoint, target)
    edit_config(checkpoint, layer_types=["sliding_attention"], sliding_window=8)
    assert "layer_types has sliding_attention" in refused(checkpoint, target)


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.5, 0.999])
def test_truncated_weights_are_corrupt(checkpoint: Path, target: Target, kept: float) -> None:
    content = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes(content[: int(kept * len(content))])
    message = refused(checkpoint, target)
    assert "model.safetensors' are corrupt" in message and "fetch them again" in message


@pytest.mark.parametrize("place", ["model.safetensors", "part.bin"])
def test_pickled_weights_are_never_read(
    checkpoint: Path, target: Target, trap: Callable[[Path], bytes], place: str
) -> None:
    """Neither where they are called safetensors nor where an index names them."""
    mark = checkpoint / "unpickled"
    (checkpoint / WEIGHTS).unlink()
    (checkpoint / place).write_bytes(trap(mark))
    (checkpoint / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"a": "part.bin"}}))
    message = refused(checkpoint, target)
    assert ("model.safetensors' are corrupt" if place == WEIGHTS else "names 'part.bin'") in message
    assert not mark.exists()


def test_a_config_that_cannot_be_read_is_named(checkpoint: Path, target: Target) -> None:
    for text in ("[" * 100_000, None):
        (checkpoint / "config.json").unlink()
        if text is None:
            (checkpoint / "config.json").mkdir()
        else:
            (checkpoint / "config.json").write_text(text)
        assert "config.json' is not JSON (" in refused(checkpoint, target)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_tensor_that_is_not_finite_is_named(
    checkpoint: Path, target: Target, value: float
) -> None:
    name = "markov_head.markov_w2.weight"
    broken = load_file(checkpoint / WEIGHTS)[name].clone()
    broken[3, 5] = value
    edit_tensors(checkpoint, add={name: broken})
    assert f"tensor {name} holds values that are not finite: fetch it" in refused(
        checkpoint, target
    )
