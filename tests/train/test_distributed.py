"""Two processes that train together make what one makes of as many passes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_helpers import Predictable, settings

from dspark.config import to_yaml
from dspark.models.checkpoint import load_drafter
from dspark.train.curve import read_curve
from dspark.train.resume import FILE
from dspark.train.trainer import World, fit

# Each process of torchrun would import all of this again: here one process is forked into both.
PROGRAM = """
import os, sys
from pathlib import Path
import torch
from dspark.config import TrainConfig, from_yaml
from dspark.models.target import load_target
from dspark.train.cache import StateCache
from dspark.train.trainer import fit

torch.set_num_threads(1)
target_path, cache, port, *folders = sys.argv[1:]
rank = 0 if os.fork() else 1
os.environ |= {
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)
}
target = load_target(target_path, "cpu", torch.float32)
for folder in map(Path, folders):
    # The second process has a folder of its own: it is to write nothing.
    out = folder / ("out" if rank == 0 else "nothing")
    fit(target, StateCache(Path(cache)), from_yaml(TrainConfig, folder / "config.yaml"), out)
torch.distributed.destroy_process_group()
if rank == 1:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
FIELDS = {"batch": 2, "anchors": 8, "lr": 1e-3, "validate_every": 3}
EPOCHS = 0.34  # six steps of two passes
# At a rate of 0 nothing gets better: the first process alone sees it, and both must stop.
STOPPED = {**FIELDS, "lr": 0.0, "epochs": 1.0, "patience": 1}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def together(predictable: Predictable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders "1", "2" (passes a step and process) and "stopped", each with what two made."""
    root = tmp_path_factory.mktemp("together")
    configs = {
        "1": settings(**FIELDS, epochs=EPOCHS),
        "2": settings(**FIELDS, epochs=2 * EPOCHS, accumulate=2),
        "stopped": settings(**STOPPED),
    }
    for name, config in configs.items():
        (root / name).mkdir()
        (root / name / "config.yaml").write_text(to_yaml(config))
    arguments = [predictable.path, predictable.states.folder, free_port()]
    arguments += [root / name for name in configs]
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_train_as_one_with_twice_the_passes(
    predictable: Predictable, together: Path, tmp_path: Path, accumulate: int
) -> None:
    config = settings(**FIELDS, epochs=accumulate * EPOCHS, accumulate=2 * accumulate)
    fit(predictable.target, predictable.states, config, tmp_path)
    two, one = together / str(accumulate) / "out", tmp_path
    ours, theirs = load_file(two / FILE), load_file(one / FILE)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-5, msg=name)
    curves = [read_curve(folder / "curve.jsonl") for folder in (two, one)]
    steps = [[line["step"] for line in curve] for curve in curves]
    assert steps[0] == steps[1] and max(steps[0]) == 6
    for ours_at, theirs_at in zip(*curves, strict=True):
        assert ours_at.get("accept_len_k3") == pytest.approx(theirs_at.get("accept_len_k3"))
    load_drafter(two / "best", predictable.target)


def test_only_the_first_process_writes(together: Path) -> None:
    for folder in together.iterdir():
        assert sorted(file.name for file in folder.iterdir()) == ["config.yaml", "out"]
    for folder in together.glob("*/out"):
        assert sorted(x.name for x in folder.iterdir()) == ["best", "curve.jsonl", FILE]


def test_all_processes_stop_when_the_first_sees_no_gain(together: Path) -> None:
    steps = [line["step"] for line in read_curve(together / "stopped" / "out" / "curve.jsonl")]
    assert steps == [1, 2, 3, 3, 4, 5, 6, 6]


def test_without_torchrun_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert World.join(torch.device("cpu")) == World(0, 1)
