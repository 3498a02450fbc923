"""The whole chain on tiny targets: from nothing to a calibrated drafter, at once or stage by stage."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_helpers import SHAPE, decoded, own_words

from dspark.config import (
    ConfidenceLabel,
    DrafterConfig,
    ModelsConfig,
    ModelSource,
    Precision,
    TargetConfig,
    TrainConfig,
)
from dspark.data.builtin import builtin_prompts
from dspark.errors import UserError
from dspark.models.calibration import Calibration, read_calibration
from dspark.models.checkpoint import load_drafter
from dspark.models.target import load_target
from dspark.train import chain, synthesize
from dspark.train.cache import StateCache
from dspark.train.calibrate import calibrate
from dspark.train.chain import STAGES, run_chain
from dspark.train.curve import read_curve
from dspark.train.synthesize import read_conversations
from tiny_models import EOS, save_tiny_target

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden" / "target"
# A random target seldom ends a turn: many tokens count as an end here.
ENDS = list(range(EOS, 300, 16))
OWN = ["How do whales sleep?", "Name three rivers.", "Who was Ada Lovelace?"]


@pytest.fixture(scope="module", autouse=True)
def small() -> Any:
    """One thread, and few prompts between two writes, of few tokens each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthesize, "CHUNK", 48)
        patch.setattr(synthesize, "PROMPT_TOKENS", 48)
        patch.setattr(chain, "set_threads", lambda _threads: torch.set_num_threads(1))
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelsConfig:
    """A target that ends its turns, and a training of some steps with prompts of one's own."""
    folder = tmp_path_factory.mktemp("chain")
    path = save_tiny_target(folder / "target", max_position_embeddings=1024)
    generation = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": ENDS}))
    prompts = [json.dumps({"id": str(i), "turns": [text]}) for i, text in enumerate(OWN)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    train = TrainConfig(
        shape=replace(SHAPE, draft_vocab_size=100),
        prompts=26,
        prompt_files=[str(folder / "prompts.jsonl")],
        max_new_tokens=32,
        precision=Precision.float32,
        shard_tokens=2000,
        held_out=8,
        calibration=8,
        batch=2,
        anchors=8,
        epochs=2.0,
        validate_every=4,
        confidence_label=ConfidenceLabel.agreement,
    )
    return make_models(path, train)


def make_models(path: Path, train: TrainConfig) -> ModelsConfig:
    return ModelsConfig(
        target=TargetConfig(name="tiny", source=ModelSource.local, path=str(path)),
        drafter=DrafterConfig(name="mine", source=ModelSource.train, train=train),
    )


def trained_with(models: ModelsConfig) -> TrainConfig:
    assert models.drafter.train is not None
    return models.drafter.train


@pytest.fixture(scope="module")
def made(models: ModelsConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one call makes of nothing."""
    out = tmp_path_factory.mktemp("made") / "deep" / "out"
    run_chain(models, out.parent / "store", out)
    return out


def contents(out: Path) -> dict[str, bytes]:
    """All files of a training that do not tell its speed."""
    return {
        str(file.relative_to(out)): file.read_bytes()
        for file in sorted(out.rglob("*"))
        if file.is_file() and file.name not in ("curve.jsonl", "progress.safetensors")
    }


def test_one_call_makes_a_calibrated_drafter_of_nothing(models: ModelsConfig, made: Path) -> None:
    train = trained_with(models)
    assert {file.name for file in made.iterdir()} == {
        "conversations.jsonl",
        "cache",
        "best",
        "curve.jsonl",
        "progress.safetensors",
        "drafter",
        "reliability.png",
        "reliability.svg",
    }
    conversations = read_conversations(made / "conversations.jsonl")
    own = [item.user for item in conversations if item.id.startswith("own/")]
    assert own and set(own) <= set(OWN)  # but for answers too short to hold a block
    assert [item.user for item in conversations[: len(own)]] == own
    assert len(conversations) >= train.prompts
    assert len(StateCache(made / "cache")) == train.prompts
    assert read_curve(made / "curve.jsonl")[-1]["step"] == 10  # 2 epochs of 10 conversations, by 2
    assert (made / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (made / "reliability.svg").read_text()


def test_what_validates_is_drawn_from_all_conversations(models: ModelsConfig, made: Path) -> None:
    """Own prompts come first in the file, and what comes first in the cache validates."""
    written = read_conversations(made / "conversations.jsonl")[: trained_with(models).prompts]
    in_file = [item.prompt_ids + item.response_ids for item in written]
    cache = StateCache(made / "cache")
    in_cache = [cache[index].ids.tolist() for index in range(len(cache))]
    assert sorted(in_cache) == sorted(in_file)
    assert in_cache[: len(OWN)] != in_file[: len(OWN)]


def test_the_finished_checkpoint_is_the_best_with_its_calibration(
    models: ModelsConfig, made: Path
) -> None:
    drafter_files = {file.name for file in (made / "drafter").iterdir()}
    assert drafter_files == {"config.json", "model.safetensors", "calibration.json"}
    assert (made / "drafter/config.json").read_bytes() == (made / "best/config.json").read_bytes()
    best, finished = (load_file(made / name / "model.safetensors") for name in ("best", "drafter"))
    assert best.keys() == finished.keys()
    changed = {name for name, value in best.items() if not value.equal(finished[name])}
    # The confidence head is fitted anew.
    assert changed == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    calibration = read_calibration(made / "drafter", SHAPE.block_size)
    assert calibration is not None and calibration.blocks > 0
    assert len(calibration.ece_before) == len(calibration.curves_after) == SHAPE.block_size
    target = load_target(str(models.target.path), "cpu", torch.float32)
    drafter = load_drafter(made / "drafter", target)
    assert drafter.block_size == SHAPE.block_size and len(drafter.draft_ids) == 100
    cache = StateCache(made / "cache")
    assert len(decoded(target, drafter, [cache[0], cache[1]], SHAPE.block_size)) == 2


def test_temperatures_are_fitted_and_measured_on_what_decoding_would_draft(
    models: ModelsConfig, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fitted on the second half of the calibration conversations, measured on the held-out ones.

    The first half has fitted the confidence head.
    """
    given: list[torch.Tensor] = []

    def watched(*outcomes: torch.Tensor) -> Calibration:
        given.extend(outcomes)
        return calibrate(*outcomes)

    monkeypatch.setattr(chain, "calibrate", watched)
    out = shutil.copytree(made, tmp_path / "out")
    run_chain(models, tmp_path, out, "calibrate")
    target = load_target(str(models.target.path), "cpu", torch.float32)
    drafter, cache = load_drafter(made / "best", target), StateCache(made / "cache")
    for indices, (_, survived, valid) in ((range(12, 16), given[:3]), (range(8), given[3:])):
        items = [cache[index] for index in indices]
        steps = [n for row in decoded(target, drafter, items, SHAPE.block_size) for n in row]
        assert survived.sum(1).tolist() == steps and valid.all()
    calibration = read_calibration(out / "drafter")
    assert calibration is not None and calibration.blocks == len(steps)


def test_a_second_call_changes_nothing(models: ModelsConfig, made: Path) -> None:
    kept = [made / "conversations.jsonl", made / "progress.safetensors"]
    kept += [*(made / "cache").glob("shard-*"), *(made / "best").iterdir()]
    before, stamps = contents(made), [file.stat().st_mtime_ns for file in kept]
    curve = (made / "curve.jsonl").read_bytes()
    run_chain(models, made.parent / "store", made)
    assert contents(made) == before
    assert [file.stat().st_mtime_ns for file in kept] == stamps
    assert (made / "curve.jsonl").read_bytes() == curve


def test_stage_by_stage_makes_the_same(models: ModelsConfig, made: Path, tmp_path: Path) -> None:
    results = ["conversations.jsonl", "cache", "best", "drafter"]
    assert STAGES == ("synthesise", "cache", "fit", "calibrate")
    for stage, result in zip(STAGES, results, strict=True):
        run_chain(models, tmp_path / "store", tmp_path, stage)
        there = {file.name for file in tmp_path.iterdir()} & set(results)
        assert there == set(results[: results.index(result) + 1])
    assert contents(tmp_path) == contents(made)


def test_a_kill_while_the_best_was_written_leaves_no_trace_in_the_finished_checkpoint(
    models: ModelsConfig, made: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(made, tmp_path / "out")
    (out / "best" / "model.safetensors.77.part").write_bytes(b"half")
    run_chain(models, tmp_path, out, "calibrate")
    assert {file.name for file in (out / "drafter").iterdir()} == {
        "config.json",
        "model.safetensors",
        "calibration.json",
    }


# --------------------------------------------------------------------------- what is refused


def test_an_unknown_stage_is_refused_with_the_nearest(models: ModelsConfig, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="no training stage 'synthesize': did you mean 'synthesise'"
    ):
        run_chain(models, tmp_path, tmp_path / "out", "synthesize")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stage", "lacks"),
    [
        ("cache", r"conversations\.jsonl"),
        ("fit", "holds no cache"),
        ("calibrate", r"best' has no config\.json"),
    ],
)
def test_a_stage_without_its_input_is_refused(
    models: ModelsConfig, tmp_path: Path, stage: str, lacks: str
) -> None:
    with pytest.raises(UserError, match=lacks) as error:
        run_chain(models, tmp_path, tmp_path / "out", stage)
    assert "\n" not in str(error.value)


def test_a_drafter_without_train_settings_is_refused(models: ModelsConfig, tmp_path: Path) -> None:
    plain = replace(models, drafter=replace(models.drafter, train=None))
    with pytest.raises(UserError, match="drafter 'mine' has no train settings"):
        run_chain(plain, tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"target_layer_ids": [1, 9]}, r"target_layer_ids \[9\] lie outside -1\.\.2"),
        ({"mask_token_id": 300}, "mask_token_id 300 is not in the target's vocabulary"),
        ({"markov_head_type": "gatd"}, "markov_head_type 'gatd' is unknown"),
    ],
    ids=["layer", "mask", "head"],
)
def test_a_shape_that_cannot_work_is_refused_before_hours_of_work(
    models: ModelsConfig, tmp_path: Path, shape: dict[str, Any], message: str
) -> None:
    train = replace(trained_with(models), shape=replace(SHAPE, **shape))
    with pytest.raises(UserError, match=message):
        run_chain(make_models(Path(str(models.target.path)), train), tmp_path, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_another_target_under_the_same_path_is_not_taken_for_this_one(
    models: ModelsConfig, made: Path, tmp_path: Path
) -> None:
    """A fine-tune of some linear layers: its states are others."""
    path = Path(shutil.copytree(str(models.target.path), tmp_path / "target"))
    out = shutil.copytree(made, tmp_path / "out")
    target = load_target(path, "cpu", torch.float32)
    for layer in target.decoder.layers:
        layer.mlp.down_proj.weight.mul_(1.5)
    target.model.save_pretrained(path)
    run_chain(make_models(path, trained_with(models)), tmp_path, out, "cache")
    before, after = StateCache(made / "cache")[0], StateCache(out / "cache")[0]
    assert before.ids.equal(after.ids) and not before.final.equal(after.final)


def test_under_torchrun_fit_alone_can_run(
    models: ModelsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    for stage in (None, "synthesise", "cache", "calibrate"):
        with pytest.raises(UserError, match="add --stage fit"):
            run_chain(models, tmp_path, tmp_path / "out", stage)


def test_the_projects_own_prompts_are_not_trained_on(models: ModelsConfig, tmp_path: Path) -> None:
    prompt = builtin_prompts("mt_bench")[3].turns[1]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "a", "turns": [prompt]}) + "\n")
    train = replace(trained_with(models), prompt_files=[str(tmp_path / "prompts.jsonl")])
    config = make_models(Path(str(models.target.path)), train)
    with pytest.raises(UserError, match="is one of an evaluation set: do not train on it"):
        run_chain(config, tmp_path, tmp_path / "out")


def test_a_cache_with_too_little_room_is_trained_on_as_far_as_it_goes(
    models: ModelsConfig, made: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(made / "conversations.jsonl", out)
    tokens = sum(len(item.ids) for item in (StateCache(made / "cache")[i] for i in range(20)))
    room = tokens * StateCache(made / "cache").bytes_per_token
    config = make_models(
        Path(str(models.target.path)), replace(trained_with(models), cache_gb=room / 1e9 + 1e-8)
    )
    run_chain(config, tmp_path, out, "cache")
    assert len(StateCache(out / "cache")) == 20
    run_chain(config, tmp_path, out, "fit")
    assert read_curve(out / "curve.jsonl")[-1]["step"] == 4


# --------------------------------------------------------------------------- another target


def test_the_golden_target_gets_a_drafter(tmp_path: Path) -> None:
    """It has no tokenizer: the stages after synthesis, on words of its own."""
    if not GOLDEN.is_dir():
        pytest.skip(f"the golden checkpoints are not at {GOLDEN}")
    target, out = load_target(GOLDEN, "cpu", torch.float32), tmp_path / "out"
    out.mkdir()
    lines = [json.dumps(asdict(item)) for item in own_words(target, prompts=40, length=24)]
    (out / "conversations.jsonl").write_text("\n".join(lines) + "\n")
    train = TrainConfig(
        shape=replace(SHAPE, block_size=3, markov_head_type="gated"),
        prompts=40,
        precision=Precision.float32,
        held_out=8,
        calibration=8,
        batch=4,
        anchors=8,
        epochs=3.0,
        lr=2e-2,
    )
    for stage in STAGES[1:]:
        run_chain(make_models(GOLDEN, train), tmp_path, out, stage)
    drafter, cache = load_drafter(out / "drafter", target), StateCache(out / "cache")
    steps = [n for row in decoded(target, drafter, [cache[i] for i in range(8)], 3) for n in row]
    line = read_curve(out / "curve.jsonl")[-1]
    assert 1 + sum(steps) / len(steps) == pytest.approx(line["accept_len_k3"], abs=0.05)
    assert line["accept_len_k3"] > 1.2
