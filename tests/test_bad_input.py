"""What a user can get wrong, through the command line: one line, exit status 1, nothing half written.

Each case runs a stage in this process on tiny models that it may break.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark import cli
from dspark.config import (
    DatasetConfig,
    Device,
    DrafterConfig,
    EngineConfig,
    JobConfig,
    Mode,
    ModelsConfig,
    ModelSource,
    PromptSource,
    RunConfig,
    TargetConfig,
    to_yaml,
)
from tiny_models import save_tiny_drafter, save_tiny_target

WEIGHTS = "model.safetensors"
ROOT = Path(__file__).parents[1]
NOBODY = 65534  # a user who owns nothing
Dspark = Callable[..., str]


@pytest.fixture
def dspark(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Dspark]:
    """Run a command that must fail; its one line, without the name of the program."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(*args: str | Path, status: int = 1) -> str:
        monkeypatch.setattr(sys, "argv", ["dspark", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr().err
        assert ended.value.code == status, said
        assert "Traceback" not in said
        *before, last = said.strip().splitlines()
        assert last.startswith("dspark: "), said
        assert not any(line.startswith("dspark: ") for line in before), said
        return last.removeprefix("dspark: ")

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Inputs:
    """What a bench job of one dataset reads, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target, self.drafter = folder / "target", folder / "drafter"
        self.prompts, self.out = folder / "prompts.jsonl", folder / "out"
        self.prompts.write_text('{"id": "a", "turns": ["One two three"]}\n')
        self.job = JobConfig(
            experiment="tiny",
            dataset=DatasetConfig(name="mine", source=PromptSource.file, max_new_tokens=4),
            runs={"baseline": RunConfig(), "dspark": RunConfig(mode=Mode.speculative, k=2)},
            engine=EngineConfig(device=Device.cpu, threads=1, concurrency=2, warmup=0),
        )
        self.models = ModelsConfig(
            target=TargetConfig(name="t", source=ModelSource.local, path=str(self.target)),
            drafter=DrafterConfig(name="d", source=ModelSource.local, path=str(self.drafter)),
        )

    def prepare(self) -> list[str | Path]:
        (self.folder / "models.yaml").write_text(to_yaml(self.models))
        config, out = self.folder / "models.yaml", self.folder / "models"
        return ["prepare", "--config", config, "--store", self.folder / "store", "--out", out]

    def read(self) -> list[str | Path]:
        """The command that reads the user's prompts."""
        self.job.dataset.path = str(self.prompts)
        (self.folder / "dataset.yaml").write_text(to_yaml(self.job))
        return ["prompts", "--config", self.folder / "dataset.yaml", "--out", self.out / "p.jsonl"]

    def bench(self) -> list[str | Path]:
        (self.folder / "job.yaml").write_text(to_yaml(self.job))
        paths = {"config": "job.yaml", "models": "models", "profiles": "profiles", "out": "out"}
        args = [arg for name, file in paths.items() for arg in (f"--{name}", self.folder / file)]
        return ["bench", *args, "--prompts", self.prompts]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_target(folder / "target", layers=3)
    save_tiny_drafter(folder / "drafter", folder / "target", block_size=4)
    return folder


@pytest.fixture
def inputs(pair: Path, tmp_path: Path) -> Inputs:
    for name in ("target", "drafter"):
        shutil.copytree(pair / name, tmp_path / name)
    return Inputs(tmp_path)


@pytest.fixture
def ready(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    """Inputs whose models are prepared."""
    monkeypatch.setattr(sys, "argv", ["dspark", *map(str, inputs.prepare())])
    cli.cli.main([str(arg) for arg in inputs.prepare()], standalone_mode=False)
    return inputs


def left(inputs: Inputs) -> set[str]:
    """Files of the job's folder that mean something."""
    return {path.name for path in inputs.out.glob("*")} - {".lock"}


def test_the_untouched_inputs_run(ready: Inputs) -> None:
    """Or each refusal below might have another cause."""
    cli.cli.main([str(arg) for arg in ready.read()], standalone_mode=False)
    cli.cli.main([str(arg) for arg in ready.bench()], standalone_mode=False)
    assert {"requests.parquet", "environment.json", "lossless.json"} <= left(ready)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def flip(file: Path) -> None:
    """Change a byte of the last tensor."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 0xFF
    file.write_bytes(content)


def forget(file: Path) -> None:
    file.unlink()


def header(file: Path) -> None:
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


@pytest.mark.parametrize("model", ["target", "drafter"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, f"{WEIGHTS}' are corrupt ("),
        (header, f"{WEIGHTS}' are corrupt ("),
        (forget, f"lacks {WEIGHTS}: weights are read from safetensors alone"),
    ],
)
def test_weights_that_cannot_be_read_are_refused_before_any_job(
    inputs: Inputs, dspark: Dspark, model: str, damage: Callable[[Path], None], said: str
) -> None:
    damage(inputs.folder / model / WEIGHTS)
    message = dspark(*inputs.prepare())
    assert said in message and message.startswith(model)
    assert not (inputs.folder / "models" / f"{model}.json").exists()


@pytest.mark.parametrize("model", ["target", "drafter"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "has changed since it was prepared: sha256"),
        (flip, "has changed since"),
        (forget, "gone"),
    ],
)
def test_weights_that_changed_since_are_refused_by_the_job(
    ready: Inputs, dspark: Dspark, model: str, damage: Callable[[Path], None], said: str
) -> None:
    file = ready.folder / model / WEIGHTS
    damage(file)
    message = dspark(*ready.bench())
    assert f"model '{ready.models.target.name if model == 'target' else 'd'}': '{file}'" in message
    assert said in message and "run again" in message
    assert left(ready) == set()


def test_a_drafter_of_another_target_is_told_field_and_both_values(
    ready: Inputs, dspark: Dspark
) -> None:
    config = ready.drafter / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_target_layers": 9}))
    message = dspark(*ready.bench())
    assert "config.json' has changed since it was prepared" in message
    cli.cli.main([str(arg) for arg in ready.prepare()], standalone_mode=False)
    message = dspark(*ready.bench())
    assert "num_target_layers is 9 in the drafter and 3 in the target" in message
    assert left(ready) == set()


MODELING = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_of_bad_input"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_target_with_code_of_its_own_runs_when_the_user_says_so(
    inputs: Inputs, dspark: Dspark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers adds its cache to it
    for module in ("transformers.dynamic_module_utils", "transformers.utils.hub"):
        monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(inputs.folder / "modules"))
    (inputs.target / "modeling_own.py").write_text(MODELING)
    config = inputs.target / "config.json"
    classes = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    }
    fields = {"model_type": "own_of_bad_input", "auto_map": classes}
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    message = dspark(*inputs.prepare())
    assert (
        "brings code of its own (auto_map in config.json), which is not run: set target" in message
    )
    inputs.models.target.trust_remote_code = True
    for command in (inputs.prepare, inputs.bench):
        cli.cli.main([str(arg) for arg in command()], standalone_mode=False)
    assert "requests.parquet" in left(inputs)


LONG = json.dumps({"id": "long", "turns": ["word " * 600]})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"id": "a", "turns": ["x"]}\n{"id": "b", \n', "prompts.jsonl, line 2: not JSON ("),
        (b'{"id": "a", "turns": [""]}\n', "prompts.jsonl, line 1: turn 1 is blank: write"),
        (b'{"id": "a", "turns": ["x"]}\n' * 2, "line 2: id 'a' is taken by line 1: give every"),
        (b'{"id": 3, "turns": ["x"]}\n', "line 1: 'id' is a number: it must be text"),
        (b'{"id": "a", "turns": "x"}\n', "line 1: 'turns' is text: it must be a list"),
        (b'{"id": "a", "turns": ["\xff"]}\n', "line 1: byte 0xff is not UTF-8: save the file as"),
        ('{"id": "a", "turns": ["x"]}\n'.encode("utf-16"), "line 1: byte 0xff is not UTF-8"),
        (b"\xef\xbb\xbf\n", "line 1: the line is blank: remove it"),
        (b"", "prompts.jsonl holds no prompts: a line is"),
    ],
    ids=["json", "blank", "twice", "id", "turns", "latin", "utf16", "bom", "empty"],
)
def test_bad_prompts_are_told_by_their_line(
    inputs: Inputs, dspark: Dspark, content: bytes, said: str
) -> None:
    inputs.prompts.write_bytes(content)
    assert said in dspark(*inputs.read())
    assert not inputs.out.exists()


def test_a_prompt_beyond_the_context_is_named(ready: Inputs, dspark: Dspark) -> None:
    ready.prompts.write_text(f"{LONG}\n")
    message = dspark(*ready.bench())
    assert "dataset 'mine' prompt 'long' turn 1 may reach" in message
    assert "do not fit the target's context of 512: leave it out or lower" in message
    assert left(ready) == set()


def test_logits_that_are_not_finite_stop_the_job(ready: Inputs, dspark: Dspark) -> None:
    """Found by the request that meets them: the token that makes them is not in the check's own."""
    file = ready.target / WEIGHTS
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][ord("T") - 33 + 4] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    cli.cli.main([str(arg) for arg in ready.prepare()], standalone_mode=False)
    ready.prompts.write_text('{"id": "a", "turns": ["One Two three"]}\n')
    message = dspark(*ready.bench())
    assert message == (
        "request 'a#0', its prompt: the target's logits are not finite, first in the embeddings: fetch "
        "the model again"
    )
    assert "requests.parquet" not in left(ready)


def test_more_requests_than_any_memory_holds_are_refused(ready: Inputs, dspark: Dspark) -> None:
    ready.job.engine.concurrency = 10**9
    message = dspark(*ready.bench())
    assert message.startswith("out of memory: the KV caches of 1000000000 requests at once take")
    assert "set engine.concurrency=" in message
    assert left(ready) == set()
    fitting = int(message.rsplit("=", 1)[1])
    assert 0 < fitting < 10**9


def test_a_device_that_runs_full_names_what_would_fit(
    ready: Inputs, dspark: Dspark, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch.Tensor, "new_zeros", full)  # with which the caches are allocated
    message = dspark(*ready.bench())
    assert "the KV caches of 2 requests at once take" in message
    assert "of weights: set engine.concurrency=1" in message
    assert "requests.parquet" not in left(ready)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_gpu_that_is_not_there_is_named_by_its_field(
    ready: Inputs, dspark: Dspark, no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready.job.engine.device = Device.cuda
    assert dspark(*ready.bench()).startswith(
        "engine.device is cuda but no GPU can be used: set engine"
    )
    monkeypatch.chdir(ROOT)
    train = ("train", "--out", ready.folder / "training", "--store", ready.folder / "store")
    message = dspark(*train, "drafter.train.device=cuda")
    assert message.startswith(
        "drafter.train.device is cuda but no GPU can be used: set drafter.train"
    )
    assert not (ready.folder / "training").exists() and not (ready.folder / "store").exists()


@pytest.fixture
def unprivileged(pair: Path) -> Iterator[Inputs]:
    """Prepared inputs that this process may read and not write, even where the tests run as root."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, source in (("target", pair), ("drafter", pair), ("config", ROOT)):
            shutil.copytree(source / name, folder / name)
        inputs = Inputs(folder)
        cli.cli.main([str(arg) for arg in inputs.prepare()], standalone_mode=False)
        for command in (inputs.read, inputs.bench):  # they write configs
            command()
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        user = os.geteuid()
        if user == 0:
            os.seteuid(NOBODY)
        yield inputs
        os.seteuid(user)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)


@pytest.mark.parametrize("stage", ["prepare", "prompts", "bench"])
def test_a_folder_that_cannot_be_written_is_named(
    unprivileged: Inputs, dspark: Dspark, stage: str
) -> None:
    folder, out = unprivileged.folder, unprivileged.out
    config = {"prepare": "models.yaml", "prompts": "dataset.yaml", "bench": "job.yaml"}[stage]
    args: list[str | Path] = [stage, "--config", folder / config, "--out", out]
    if stage == "bench":
        args += ["--prompts", unprivileged.prompts, "--models", folder / "models"]
    message = dspark(*args)
    assert f"'{out}" in message and "ermission denied" in message
    assert not out.exists()


def test_a_checkout_that_cannot_be_written_is_named(
    unprivileged: Inputs, dspark: Dspark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(unprivileged.folder)
    message = dspark("run", "demo")
    assert message == f"'{unprivileged.folder}' cannot be written: run in a checkout of your own"


def test_a_profile_that_is_not_there_is_not_gone_without(
    dspark: Dspark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    message = dspark("run", "demo", "--profile", "profiles/slum")
    assert message == "no profile folder 'profiles/slum': did you mean 'profiles/slurm'?"


def test_a_training_where_no_folder_can_be_is_named(
    inputs: Inputs, dspark: Dspark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    own = ["target.name=t", "target.source=local", f"target.path={inputs.target}"]
    message = dspark("train", "--out", inputs.prompts / "out", *own)  # under a file
    assert f"'{inputs.prompts / 'out'}': Not a directory: check the path" in message


def test_an_option_that_does_not_fit_is_one_line(inputs: Inputs, dspark: Dspark) -> None:
    (inputs.folder / "models").write_text("a file where a folder is wanted")
    assert "Directory" in dspark(*inputs.prepare(), status=2)
    message = dspark("prepare", "--confg", "x", status=2)
    assert message.startswith("No such option '--confg'. Did you mean '--config'? (see ")
    assert message.endswith("prepare --help)")
