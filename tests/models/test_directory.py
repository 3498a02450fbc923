"""What of a stranger's model directory is opened: safetensors beside its config, code only on trust."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.errors import UserError
from dspark.models.directory import INDEX, check_code, weight_bytes, weight_files
from dspark.models.target import load_target
from dspark.models.tokenizer import load_tokenizer

EditConfig = Callable[..., None]
Trap = Callable[[Path], bytes]


def refused(folder: Path, **trust: bool) -> str:
    """The one line that says why a target is not loaded."""
    with pytest.raises(UserError) as caught:
        load_target(folder, "cpu", torch.float32, **trust)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def shard(folder: Path, *names: str) -> dict[str, torch.Tensor]:
    """Spread the weights over shards of these names, with an index; returns all tensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: names[i % len(names)] for i, name in enumerate(tensors)}
    for file in names:
        part = {name: tensors[name] for name, place in places.items() if place == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": places, "metadata": {}}))
    return tensors


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_shards_are_read_through_their_index(target_copy: Path) -> None:
    tensors = shard(target_copy, *SHARDS)
    assert weight_files(target_copy, "target") == [target_copy / name for name in SHARDS]
    target = load_target(target_copy, "cpu", torch.float32)
    assert target.lm_head.weight.equal(tensors["lm_head.weight"])


def test_a_missing_shard_is_named(target_copy: Path) -> None:
    shard(target_copy, *SHARDS)
    (target_copy / SHARDS[1]).unlink()
    assert f"lacks {SHARDS[1]}, which its index names: fetch the model again" in refused(
        target_copy
    )


def test_a_truncated_shard_is_named(target_copy: Path) -> None:
    shard(target_copy, *SHARDS)
    file = target_copy / SHARDS[0]
    file.write_bytes(file.read_bytes()[:-100])
    assert f"target weights '{file}' are corrupt (" in refused(target_copy)


@pytest.mark.parametrize("name", ["../other.safetensors", "/x.safetensors", "weights.bin", "a/.."])
def test_an_index_that_names_files_elsewhere_is_refused(target_copy: Path, name: str) -> None:
    """Even where the file is there and sound."""
    tensors = load_file(target_copy / "model.safetensors")
    shutil.move(target_copy / "model.safetensors", target_copy.parent / "other.safetensors")
    (target_copy / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    message = refused(target_copy)
    assert f"names '{name}', and weights are read from safetensors files beside it alone" in message


@pytest.mark.parametrize(
    "place", ["pytorch_model.bin", "model.safetensors", "weights.pt", "adapter_model.bin"]
)
def test_nothing_is_ever_unpickled(
    target_copy: Path, edit_config: EditConfig, trap: Trap, place: str
) -> None:
    mark = target_copy / "unpickled"
    (target_copy / "model.safetensors").unlink()
    (target_copy / place).write_bytes(trap(mark))
    message = refused(target_copy)
    assert f"{place} is a pickle, which is never opened" in message or "are corrupt (" in message
    if place == "adapter_model.bin":  # what transformers opens where the config names it
        shutil.copy(target_copy / "config.json", target_copy / "kept")
        save_file({"x": torch.zeros(1)}, target_copy / "model.safetensors")
        edit_config(target_copy, transformers_weights=place)
        assert "transformers_weights in config.json names 'adapter_model.bin'" in refused(
            target_copy
        )
    assert not mark.exists()


def test_the_trap_would_be_noticed(tmp_path: Path, trap: Trap) -> None:
    pickle.loads(trap(tmp_path / "x"))
    assert (tmp_path / "x").exists()


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_weights_are_counted_as_they_are_loaded(
    target_path: Path, dtype: torch.dtype, width: int
) -> None:
    files = weight_files(target_path, "target")
    elements = sum(tensor.numel() for tensor in load_file(files[0]).values())
    assert weight_bytes(files, dtype) == width * elements
    assert weight_bytes(files) == files[0].stat().st_size
    assert load_target(target_path, "cpu", dtype).weight_bytes == width * elements


MODELING = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({mark!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(target_copy: Path, edit_config: EditConfig, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target whose model type its own code alone knows; the code leaves a file when it runs."""
    code = MODELING.format(mark=str(target_copy.parent / "ran"))
    (target_copy / "modeling_own.py").write_text(code)
    classes = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    }
    edit_config(target_copy, model_type="own", auto_map=classes)
    cache = target_copy.parent / "modules"
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers adds its cache to it
    for module in (
        "transformers.dynamic_module_utils",
        "transformers.utils.hub",
        "transformers.utils",
    ):
        monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(cache), raising=False)
    return target_copy


def test_code_runs_when_the_user_trusts_it_and_not_before(with_code: Path) -> None:
    ran = with_code.parent / "ran"
    message = refused(with_code)
    assert f"target '{with_code}' brings code of its own (auto_map in config.json)" in message
    assert "set target.trust_remote_code=true if you trust it" in message
    with pytest.raises(UserError, match=r"auto_map in config\.json"):
        load_tokenizer(with_code)
    assert not ran.exists()
    target = load_target(with_code, "cpu", torch.float32, trust_remote_code=True)
    assert target.config.model_type == "own" and ran.exists()
    assert load_tokenizer(with_code, trust_remote_code=True).decode([40, 41])


def test_a_tokenizers_code_is_not_run_either(target_copy: Path) -> None:
    file = target_copy / "tokenizer_config.json"
    classes = {"AutoTokenizer": [None, "modeling_own.OwnTokenizer"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": classes}))
    (target_copy / "modeling_own.py").write_text(MODELING.format(mark=str(target_copy / "ran")))
    with pytest.raises(UserError, match=r"auto_map in tokenizer_config\.json"):
        load_tokenizer(target_copy)
    assert not (target_copy / "ran").exists()


@pytest.mark.parametrize(
    "entry",
    [
        {"AutoConfig": "other/repo--modeling_own.OwnConfig"},
        {"AutoTokenizer": [None, "other/repo--modeling_own.OwnTokenizer"]},
        ["other/repo--modeling_own.OwnTokenizer", None],
        "other/repo--modeling_own.OwnConfig",
    ],
    ids=["config", "tokenizer", "list", "text"],
)
def test_code_of_another_repo_is_refused_even_when_trusted(
    target_copy: Path, edit_config: EditConfig, entry: Any
) -> None:
    edit_config(target_copy, auto_map=entry)
    with pytest.raises(UserError, match="brings code of its own"):
        check_code(target_copy, trusted=False)
    with pytest.raises(
        UserError, match=r"names 'other/repo--.*that no revision pins: copy the code"
    ):
        check_code(target_copy, trusted=True)


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"auto_map": {}}', "[" * 100_000])
def test_a_config_without_code_is_not_this_checks_business(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    check_code(tmp_path, trusted=False)
