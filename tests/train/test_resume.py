"""A training that is killed ends with the very weights of one that was not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from train_helpers import SHAPE, Predictable, settings, write_states

from dspark.config import to_yaml
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target
from dspark.train.curve import read_curve
from dspark.train.resume import FILE, Progress, load_progress, save_progress
from dspark.train.start import new_drafter
from dspark.train.trainer import fit

# --------------------------------------------------------------------------- the file


def trained_a_little(target: Target, seed: int) -> tuple[DSparkDrafter, torch.optim.AdamW]:
    """A drafter and an optimizer with moments of its own, after two steps."""
    drafter = new_drafter(replace(SHAPE, markov_rank=4), target, seed, torch.arange(2, 90, 2))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.1)
    for _ in range(2):
        sum(value.square().sum() for value in drafter.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter, optimizer


def test_weights_moments_and_progress_come_back(target: Target, tmp_path: Path) -> None:
    drafter, optimizer = trained_a_little(target, 0)
    progress = Progress("mine", step=7, best=2.25, stale=3)
    save_progress(tmp_path, progress, drafter, [optimizer])
    other, fresh = trained_a_little(target, 1)
    assert load_progress(tmp_path, "mine", other, [fresh]) == progress
    for name, value in drafter.state_dict().items():
        assert other.state_dict()[name].equal(value), name
    states, again = optimizer.state_dict()["state"], fresh.state_dict()["state"]
    assert states.keys() == again.keys() and len(states) == len(list(drafter.parameters()))
    for index, state in states.items():
        assert state.keys() == again[index].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(again[index][name].equal(value) for name, value in state.items())


@pytest.mark.parametrize("broken", ["absent", "other", "cut", "empty"])
def test_what_is_not_this_runs_progress_is_a_fresh_start(
    target: Target, tmp_path: Path, broken: str
) -> None:
    drafter, optimizer = trained_a_little(target, 0)
    save_progress(tmp_path, Progress("mine", step=7), drafter, [optimizer])
    file = tmp_path / FILE
    if broken == "absent":
        file.unlink()
    if broken == "cut":
        os.truncate(file, file.stat().st_size - 1)
    if broken == "empty":
        file.write_bytes(b"")
    run = "other" if broken == "other" else "mine"
    other, fresh = trained_a_little(target, 1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    assert load_progress(tmp_path, run, other, [fresh]) == Progress(run)
    assert all(value.equal(before[name]) for name, value in other.state_dict().items())
    assert asdict(Progress(run)) == {"run": run, "step": 0, "best": 0.0, "stale": 0}


# --------------------------------------------------------------------------- kills

STEPS, EVERY = 9, 3
CONFIG = settings(
    shape=replace(SHAPE, draft_vocab_size=150), epochs=1.0, anchors=8, validate_every=EVERY
)

PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
from dspark.config import TrainConfig, from_yaml
from dspark.models.target import load_target
from dspark.train import resume, trainer
from dspark.train.cache import StateCache

torch.set_num_threads(1)
target_path, cache, config, out, moments = sys.argv[1:]
target = load_target(target_path, "cpu", torch.float32)
train_step, save_progress, save_file = trainer.train_step, trainer.save_progress, resume.save_file

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def killed_at(when, number):
    count = 0

    def step_or_die(*args):
        nonlocal count
        count += 1
        result = train_step(*args)
        if when == "step" and count == number:
            die()
        return result

    def progress_or_die(out, progress, *args):
        if when == "before" and progress.step == number:
            die()
        save_progress(out, progress, *args)
        if when == "after" and progress.step == number:
            die()

    def file_or_die(tensors, path, metadata):
        save_file(tensors, path, metadata)
        if when == "half" and f'"step": {number}' in metadata["progress"]:
            os.truncate(path, os.path.getsize(path) // 2)
            die()

    trainer.train_step = step_or_die
    trainer.save_progress, resume.save_file = progress_or_die, file_or_die

for moment in moments.split():
    child = os.fork()
    if child == 0:
        when, number = moment.split("-")
        killed_at(when, int(number))
        trainer.fit(target, StateCache(Path(cache)), from_yaml(TrainConfig, config), Path(out) / moment)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""
# Before any checkpoint; between two; with the best drafter newer than the checkpoint; with the
# checkpoint half written; right after one; and after the last step.
MOMENTS = {"step-2": 0, "step-5": 3, "before-6": 3, "half-6": 3, "after-6": 6, "before-9": 6}


@pytest.fixture(scope="module")
def undisturbed(predictable: Predictable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    fit(predictable.target, predictable.states, CONFIG, folder)
    return folder


@pytest.fixture(scope="module")
def killed(predictable: Predictable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for each of `MOMENTS`, as the kill left it."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "config.yaml").write_text(to_yaml(CONFIG))
    arguments = [predictable.path, predictable.states.folder, folder / "config.yaml", folder]
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments), " ".join(MOMENTS)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def contents(folder: Path) -> dict[str, Any]:
    """What a training leaves but its curve: files by name, and the checkpoint tensor by tensor.

    safetensors writes metadata in any order, so two equal checkpoints can differ in their bytes.
    """
    files = ("best/config.json", "best/model.safetensors")
    assert {x.name for x in folder.iterdir()} == {"best", "curve.jsonl", FILE}
    assert {x.name for x in (folder / "best").iterdir()} == {"config.json", "model.safetensors"}
    tensors = {name: value.numpy().tobytes() for name, value in load_file(folder / FILE).items()}
    return {
        "progress": progress_of(folder),
        **{name: (folder / name).read_bytes() for name in files},
        **tensors,
    }


def progress_of(folder: Path) -> dict[str, Any]:
    with safe_open(folder / FILE, framework="pt") as handle:
        return json.loads(handle.metadata()["progress"])


def course(folder: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in line.items() if name != "tokens_per_s"}
        for line in read_curve(folder / "curve.jsonl")
    ]


@pytest.mark.parametrize("moment", list(MOMENTS))
def test_killed_and_run_again_gives_the_same_drafter(
    predictable: Predictable, undisturbed: Path, killed: Path, moment: str
) -> None:
    folder = killed / moment
    if MOMENTS[moment] == 0:
        assert not (folder / FILE).exists()
    else:
        assert progress_of(folder)["step"] == MOMENTS[moment]
    fit(predictable.target, predictable.states, CONFIG, folder)
    for leftover in folder.glob("*.part"):  # the killed process was writing it
        leftover.unlink()
    assert contents(folder) == contents(undisturbed)
    assert course(folder) == course(undisturbed)


def test_the_undisturbed_course(undisturbed: Path) -> None:
    steps = [line["step"] for line in course(undisturbed)]
    assert steps == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9]
    tensors = load_file(undisturbed / FILE)
    moments = [value for name, value in tensors.items() if name.endswith("exp_avg")]
    assert moments and all(value.any() for value in moments)
    assert {value.dtype for name, value in tensors.items() if name != "model.d2t"} == {
        torch.float32
    }


def test_a_finished_training_is_left_as_it_is(predictable: Predictable, undisturbed: Path) -> None:
    files = [file for file in undisturbed.rglob("*") if file.is_file()]
    before = {file: file.read_bytes() for file in files}
    fit(predictable.target, predictable.states, CONFIG, undisturbed)
    assert {file: file.read_bytes() for file in undisturbed.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("change", ["settings", "states"])
def test_other_settings_or_states_start_anew(
    predictable: Predictable, undisturbed: Path, tmp_path: Path, change: str
) -> None:
    """What comes out is what they make in a folder of their own."""
    folder = shutil.copytree(undisturbed, tmp_path / "used")
    config, cache = CONFIG, predictable.states
    if change == "settings":
        config = replace(CONFIG, lr=1e-3)
    else:
        talks = predictable.conversations[:90]
        cache = write_states(predictable.target, talks, tmp_path / "cache")
    for out in (folder, tmp_path / "new"):
        fit(predictable.target, cache, config, out)
    assert contents(folder) == contents(tmp_path / "new")
    assert course(folder) == course(tmp_path / "new")
