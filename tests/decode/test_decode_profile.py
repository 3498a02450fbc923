"""Timing of engine steps: what is timed, and that it is timed once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from decode_helpers import (
    alone,
    counting_target,
    make_bigram_drafter,
    make_drafter,
    make_target,
    request,
)

from dspark.decode import profile
from dspark.decode.engine import Engine, Row
from dspark.decode.profile import CONTEXT, ROUNDS, profile_steps, step_curve
from dspark.decode.schedule import StepCurve, fit_curve
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target

TEXT = list(range(3, 40))
IDENTITY = {"device": "some cpu", "threads": 1, "target": {"model.safetensors": "ab"}}
Models = tuple[Target, DSparkDrafter]


@cache
def models(positions: int = 512) -> Models:
    target = make_target(embed=20, max_position_embeddings=positions)
    return target, make_drafter(target, layers=1)


class Watch:
    """Counts the steps by rows, tokens of the target's pass and whether they draft.

    And how full the engine is.
    """

    def __init__(self) -> None:
        self.kinds: Counter[tuple[int, int, bool]] = Counter()
        self.starts: list[int] = []

    def __enter__(self) -> Watch:
        step = Engine.step

        def watched(engine: Engine, drafting: bool = True) -> list[Row]:
            rows = [row for row in engine.slots if row is not None]
            self.starts += [row.start for row in rows]
            finished = step(engine, drafting)
            tokens = sum(row.steps[-1].verified + 1 for row in rows)
            self.kinds[len(rows), tokens, drafting] += 1
            return finished

        self.patch = patch.object(Engine, "step", watched)
        self.patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


def sizes(k: int, concurrency: int) -> list[int]:
    every = [concurrency * (width + 1) for width in range(k + 1)]
    return sorted({1, k + 1, *every})


def kinds(k: int, concurrency: int) -> set[tuple[int, int, bool]]:
    """Rows, tokens and drafting of all steps that are to be timed."""
    drafted = {(concurrency, concurrency * (width + 1)) for width in range(k + 1)}
    drafted |= {(1, 1), (1, k + 1)}
    return {(*kind, True) for kind in drafted} | {(n, n, False) for n in (1, concurrency)}


def check(curve: StepCurve, k: int, concurrency: int) -> None:
    assert curve.plain is not None
    assert curve.plain.tokens == sorted({1, concurrency})
    assert curve.tokens == sizes(k, concurrency)
    assert len(curve.seconds) == len(curve.fitted) == len(curve.tokens)
    assert min(curve.seconds) > 0
    assert curve.fitted == sorted(curve.fitted)


# ---------------------------------------------------------------------------------- what is timed


@pytest.mark.parametrize(("k", "concurrency"), [(1, 1), (3, 1), (3, 2), (2, 5), (7, 3)])
def test_each_width_is_timed_at_full_concurrency_and_the_lone_rows(
    k: int, concurrency: int
) -> None:
    """As many times each: a row that ends before the last round would make its steps smaller."""
    with Watch() as watch:
        curve = profile_steps(*models(), k, concurrency, TEXT)
    check(curve, k, concurrency)
    # The first calls are not timed.
    assert watch.kinds == dict.fromkeys(kinds(k, concurrency), ROUNDS + 1)
    assert min(watch.starts) == CONTEXT


def test_the_timed_steps_draft_as_the_run_does() -> None:
    target, drafter = models()
    with patch.object(drafter, "block_hidden", wraps=drafter.block_hidden) as drafts:
        curve = profile_steps(target, drafter, 2, 2, TEXT)
    assert curve.tokens == [1, 2, 3, 4, 6]
    assert drafts.call_count == (ROUNDS + 1) * len(curve.tokens)


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_short_context_is_enough(k: int, concurrency: int) -> None:
    with Watch() as watch:
        curve = profile_steps(*models(64), k, concurrency, TEXT)
    check(curve, k, concurrency)
    assert watch.kinds == dict.fromkeys(kinds(k, concurrency), ROUNDS + 1)
    assert max(watch.starts) < 64


@pytest.mark.parametrize("positions", [64, 512])
def test_a_drafter_that_is_always_right_is_timed_too(positions: int) -> None:
    """Its rows grow by a whole block a step."""
    target = counting_target(max_position_embeddings=positions)
    drafter = make_bigram_drafter(target, layers=1)
    with torch.no_grad():
        drafter.markov_head.markov_w2.weight.mul_(1000)
    row = alone(target, request("right", [5], 9), drafter, 7)
    assert [step.accepted for step in row.steps] == [7]
    with Watch() as watch:
        curve = profile_steps(target, drafter, 7, 2, TEXT)
    check(curve, 7, 2)
    assert watch.kinds == dict.fromkeys(kinds(7, 2), ROUNDS + 1)


@pytest.mark.parametrize("text", [[7], list(range(40)) * 30], ids=["one-token", "long"])
def test_any_amount_of_text_makes_contexts(text: list[int]) -> None:
    check(profile_steps(*models(), 1, 2, text), 1, 2)


def test_more_work_takes_more_time() -> None:
    """The seconds are those of the steps: one that waits takes as much longer."""
    step, clock = Engine.step, [0.0]

    def slow(engine: Engine, drafting: bool = True) -> list[Row]:
        rows = [row for row in engine.slots if row is not None]
        finished = step(engine, drafting)
        clock[0] += sum(row.steps[-1].verified + 1 for row in rows) - (0 if drafting else 0.5)
        return finished

    with (
        patch.object(Engine, "step", slow),
        patch.object(Engine, "clock", lambda _engine: clock[0]),
    ):
        curve = profile_steps(*models(), 3, 2, TEXT)
    assert curve.seconds == curve.fitted == curve.tokens == [1, 2, 4, 6, 8]
    assert curve.plain == fit_curve([1, 2], [0.5, 1.5])


def test_rows_of_a_timed_step_differ_as_the_schedules_do() -> None:
    """Rows of unequal lengths go a way of their own through the target."""
    step, seen = Engine.step, set()

    def watched(engine: Engine, drafting: bool = True) -> list[Row]:
        rows = [row for row in engine.slots if row is not None]
        finished = step(engine, drafting)
        seen.add(tuple(row.steps[-1].verified for row in rows))
        return finished

    with patch.object(Engine, "step", watched):
        profile_steps(*models(), 3, 3, TEXT)
    assert seen == {(0,), (3,), (0, 0, 0), (2, 0, 1), (3, 1, 2), (3, 3, 3)}


def test_nothing_is_left_behind() -> None:
    target, drafter = models()
    parts = (target.model, drafter)
    before = [{n: v.clone() for n, v in part.state_dict().items()} for part in parts]
    text = alone(target, request("a", TEXT, 12), drafter, 3).output
    random, temperatures = torch.get_rng_state(), list(drafter.temperatures)
    profile_steps(target, drafter, 3, 2, TEXT)
    assert torch.equal(torch.get_rng_state(), random)
    assert drafter.temperatures == temperatures
    for part, old in zip(parts, before, strict=True):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in part.modules())
        assert all(torch.equal(value, old[name]) for name, value in part.state_dict().items())
    assert alone(target, request("a", TEXT, 12), drafter, 3).output == text


# ---------------------------------------------------------------------------------- timed once


def stored(folder: Path, identity: dict[str, Any], k: int = 2, concurrency: int = 2) -> StepCurve:
    return step_curve(folder, identity, *models(), k, concurrency, TEXT)


def never(*_args: object) -> StepCurve:
    raise AssertionError("steps are timed though their curve is stored")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """k and concurrency of each measurement, which takes no time and never gives the same twice."""
    calls: list[tuple[int, int]] = []

    def fake(
        _target: Target,
        _drafter: DSparkDrafter,
        k: int,
        concurrency: int,
        _tokens: list[int],
        _graphs: object,
    ) -> StepCurve:
        calls.append((k, concurrency))
        return fit_curve([1, 2], [1.0, 1.0 + len(calls)])

    monkeypatch.setattr(profile, "profile_steps", fake)
    return calls


def test_a_curve_is_measured_once_and_then_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "profiles"
    first = stored(folder, IDENTITY)
    check(first, 2, 2)
    (file,) = folder.iterdir()
    assert f"timing engine steps (k = 2, concurrency 2) for '{file}'" in capsys.readouterr().err
    monkeypatch.setattr(Engine, "__init__", never)
    assert stored(folder, IDENTITY) == first
    assert capsys.readouterr().err == ""
    assert json.loads(file.read_text())["identity"] == {**IDENTITY, "k": 2, "concurrency": 2}


@pytest.mark.parametrize(
    "change",
    [
        lambda: {"identity": IDENTITY | {"device": "another cpu"}},
        lambda: {"identity": IDENTITY | {"target": {"model.safetensors": "cd"}}},
        lambda: {"identity": IDENTITY | {"more": True}},
        lambda: {"k": 3},
        lambda: {"concurrency": 4},
    ],
    ids=["device", "weights", "one-more", "k", "concurrency"],
)
def test_another_identity_is_measured_again_and_both_are_kept(
    tmp_path: Path, timed: list[tuple[int, int]], change: Callable[[], dict[str, Any]]
) -> None:
    usual: dict[str, Any] = {"identity": IDENTITY, "k": 2, "concurrency": 2}
    first = stored(tmp_path, **usual)
    second = stored(tmp_path, **usual | change())
    assert len(timed) == 2 and first != second
    assert stored(tmp_path, **usual) == first
    assert stored(tmp_path, **usual | change()) == second
    assert len(timed) == 2


def test_the_order_of_the_facts_does_not_matter(
    tmp_path: Path, timed: list[tuple[int, int]]
) -> None:
    first = stored(tmp_path, IDENTITY)
    assert stored(tmp_path, dict(reversed(IDENTITY.items()))) == first
    assert timed == [(2, 2)]


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_a_broken_file_is_measured_again(
    tmp_path: Path, timed: list[tuple[int, int]], text: str
) -> None:
    stored(tmp_path, IDENTITY)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    again = stored(tmp_path, IDENTITY)
    assert len(timed) == 2
    assert stored(tmp_path, IDENTITY) == again
    assert len(timed) == 2 and list(tmp_path.iterdir()) == [file]
