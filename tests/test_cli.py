"""The command line: help, and every failure as one line with a non-zero exit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from dspark.cli import cli
from dspark.config import DrafterShape
from dspark.errors import UserError
from dspark.models.calibration import Calibration, write_calibration
from dspark.models.checkpoint import load_drafter, save_drafter
from dspark.models.target import load_target
from dspark.train.start import new_drafter
from tiny_models import save_tiny_target

ROOT = Path(__file__).parents[1]


def dspark(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dspark.cli", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("verb", [[], *([name] for name in sorted(cli.commands))])
def test_every_verb_has_help(verb: list[str]) -> None:
    done = CliRunner().invoke(cli, [*verb, "--help"])
    assert done.exit_code == 0
    assert "Usage:" in done.output


def test_the_list_of_verbs_cuts_no_sentence() -> None:
    done = CliRunner().invoke(cli, ["--help"], terminal_width=80)
    told = done.output.partition("Commands:\n")[2].splitlines()
    assert len(told) == len(cli.commands)
    assert [line for line in told if not line.endswith(".") or line.endswith("...")] == []


@pytest.mark.parametrize("verb", sorted(cli.commands))
def test_every_option_is_explained(verb: str) -> None:
    options = [param for param in cli.commands[verb].params if isinstance(param, click.Option)]
    assert [option.name for option in options if not option.help] == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["benhc"], "no command 'benhc': did you mean 'bench'?"),
        (["config", "demmo"], "did you mean 'demo'?"),
        (["run", "demmo"], "did you mean 'demo'?"),
        (["table", "nowhere.json", "--out", "t.md"], "nowhere.json"),
        (["merge", "nowhere"], "config file 'nowhere/config.yaml' does not exist"),
        (["prompts", "--config", "nowhere.yaml", "--out", "p.jsonl"], "does not exist"),
        (["track", "nowhere"], "nowhere"),
        (["train", "--out", "x", "drafter.train.promts=3"], "did you mean 'prompts'?"),
        (["train", "--out", "x", "--config", "c.yaml", "seed=1"], "not both"),
        (["train", "--out", "x", "--config", "c.yaml"], "config file 'c.yaml' does not exist"),
    ],
)
def test_a_failure_is_one_line(args: list[str], said: str) -> None:
    done = dspark(*args)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--stage", "fitt"], "no training stage 'fitt': did you mean 'fit'?"),
        (["drafter=smollm2_135m"], "drafter 'smollm2_135m' has no train settings"),
    ],
)
def test_a_refused_training_leaves_no_folder(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(cli, ["train", "--out", str(tmp_path / "x"), *args])
    assert isinstance(done.exception, UserError) and said in str(done.exception)
    assert not (tmp_path / "x").exists()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 target, and a drafter for it that drafts from a part of the vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_target(folder / "target", dtype="bfloat16")
    target = load_target(folder / "target", "cpu", torch.bfloat16)
    shape = DrafterShape(layers=1, taps=2, block_size=4)
    drafter = new_drafter(shape, target, 0, torch.arange(5, 205))
    save_drafter(drafter, folder / "drafter", torch.bfloat16)
    write_calibration(folder / "drafter", Calibration([1.5, 1.0, 0.5, 2.0]))
    return folder


def convert(pair: Path, drafter: Path, out: Path, *more: str) -> Result:
    target = ["--target", str(pair / "target")]
    return CliRunner().invoke(cli, ["convert", str(drafter), str(out), *target, *more])


def test_convert_there_and_back(pair: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "speculators", tmp_path / "native"
    verifier = ["--verifier", "someone/target"]
    assert convert(pair, pair / "drafter", there, "--to", "speculators", *verifier).exit_code == 0
    assert convert(pair, there, back, "--to", "native").exit_code == 0
    for name in ("model.safetensors", "calibration.json"):
        assert (back / name).read_bytes() == (pair / "drafter" / name).read_bytes()
    config = json.loads((there / "config.json").read_text())
    assert config["speculators_model_type"] == "dspark"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/target"
    stored = load_file(there / "model.safetensors")
    rows = load_file(pair / "target" / "model.safetensors")["lm_head.weight"][5:205]
    assert stored["lm_head.weight"].equal(rows)  # in the target's own dtype
    target = load_target(pair / "target", "cpu", torch.bfloat16)
    assert load_drafter(there, target).temperatures == [1.5, 1.0, 0.5, 2.0]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--to", "speculator"], "format 'speculator' is unknown: did you mean 'speculators'?"),
        (["--to", "native"], "is in the native format already"),
        (["--to", "native", "--target", "nowhere"], "target 'nowhere' has no config.json"),
    ],
)
def test_a_conversion_that_cannot_be_is_refused(
    pair: Path, tmp_path: Path, args: list[str], said: str
) -> None:
    done = convert(pair, pair / "drafter", tmp_path / "out", *args)
    assert isinstance(done.exception, UserError) and said in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_outside_the_checkout_it_says_where_to_run(tmp_path: Path) -> None:
    done = dspark("config", "demo", cwd=tmp_path)
    assert done.returncode != 0
    assert "run from the top of the checkout" in done.stderr


def test_quick_verbs_do_not_load_torch() -> None:
    code = "import sys, dspark.cli; print('torch' in sys.modules, 'mlflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"]
