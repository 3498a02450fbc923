"""Muon beside AdamW: who steps what, and that a training with both learns and can go on."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_helpers import SHAPE, Predictable, settings

from dspark.config import TrainConfig, TrainOptimizer
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target
from dspark.train.curve import read_curve
from dspark.train.optimizers import make_optimizers, set_rate
from dspark.train.resume import Progress, load_progress, save_progress
from dspark.train.start import new_drafter
from dspark.train.trainer import fit

MUON = TrainConfig(optimizer=TrainOptimizer.muon, lr=0.02)


def some_steps(drafter: DSparkDrafter, optimizers: list[torch.optim.Optimizer], count: int) -> None:
    for _ in range(count):
        sum(value.square().sum() for value in drafter.parameters()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_muon_steps_the_matrices_of_the_layers_and_adamw_the_rest(target: Target) -> None:
    drafter = new_drafter(SHAPE, target, 0)
    names = {id(value): name for name, value in drafter.named_parameters()}
    muon, adamw = make_optimizers(drafter, MUON)
    theirs, rest = (
        [names[id(value)] for group in optimizer.param_groups for value in group["params"]]
        for optimizer in (muon, adamw)
    )
    assert set(Counter(theirs + rest).values()) == {1} and len(theirs + rest) == len(names)
    projections = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "fc",
    )
    assert {name.split(".")[-2] for name in theirs} == set(projections)
    assert "markov_head.markov_w1.weight" in rest and "norm.weight" in rest


def test_adamw_alone_has_everything(target: Target) -> None:
    drafter = new_drafter(SHAPE, target, 0)
    (adamw,) = make_optimizers(drafter, TrainConfig())
    assert isinstance(adamw, torch.optim.AdamW)
    taken = [id(value) for group in adamw.param_groups for value in group["params"]]
    assert sorted(taken) == sorted(id(value) for value in drafter.parameters())


@pytest.mark.parametrize("optimizer", list(TrainOptimizer))
def test_weight_decay_shrinks_the_matrices_alone(target: Target, optimizer: TrainOptimizer) -> None:
    """Without a gradient a step of rate 0.1 and decay 0.5 leaves 95 % of them, and all of the rest."""
    drafter = new_drafter(SHAPE, target, 0)
    before = copy.deepcopy(drafter.state_dict())
    config = TrainConfig(optimizer=optimizer, lr=0.1, weight_decay=0.5)
    optimizers = make_optimizers(drafter, config)
    for value in drafter.parameters():
        value.grad = torch.zeros_like(value)
    for one in optimizers:
        one.step()
    after = drafter.state_dict()
    for name in ("fc.weight", "layers.0.mlp.up_proj.weight", "layers.0.self_attn.o_proj.weight"):
        torch.testing.assert_close(after[name], 0.95 * before[name])
    for name in ("norm.weight", "markov_head.markov_w1.weight", "confidence_head.proj.weight"):
        assert after[name].equal(before[name])


def test_a_rate_is_everyones(target: Target) -> None:
    """At a rate of nothing nothing moves."""
    drafter = new_drafter(SHAPE, target, 0)
    before = copy.deepcopy(drafter.state_dict())
    optimizers = make_optimizers(drafter, MUON)
    set_rate(optimizers, 0.0)
    some_steps(drafter, optimizers, 1)
    assert all(value.equal(before[name]) for name, value in drafter.state_dict().items())


def test_both_optimizers_go_on_where_they_were(target: Target, tmp_path: Path) -> None:
    drafter = new_drafter(SHAPE, target, 0)
    optimizers = make_optimizers(drafter, MUON)
    some_steps(drafter, optimizers, 3)
    save_progress(tmp_path, Progress("mine", step=3), drafter, optimizers)
    other = new_drafter(SHAPE, target, 1)
    fresh = make_optimizers(other, MUON)
    load_progress(tmp_path, "mine", other, fresh)
    some_steps(drafter, optimizers, 2)
    some_steps(other, fresh, 2)
    assert all(
        value.equal(other.state_dict()[name]) for name, value in drafter.state_dict().items()
    )


def test_muon_on_drawn_slots_learns(predictable: Predictable, tmp_path: Path) -> None:
    """A fifth of a token a step more than the bigrams that training starts from."""
    config = settings(
        shape=replace(SHAPE, draft_vocab_size=150),
        optimizer=TrainOptimizer.muon,
        draw_slots=True,
    )
    lengths = []
    for name, rate, epochs in (("untrained", 0.0, 0.1), ("trained", 5e-3, 3)):
        changed = replace(config, lr=rate, epochs=epochs)
        fit(predictable.target, predictable.states, changed, tmp_path / name)
        lengths.append(read_curve(tmp_path / name / "curve.jsonl")[-1]["accept_len_k3"])
    assert 1.2 < lengths[0] < lengths[1] - 0.2
