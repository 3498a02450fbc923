"""Drafter checkpoints in DeepSpec's native format: a directory with config.json and safetensors.

A checkpoint may leave out `embed_tokens` and `lm_head`: they are the target's. Where they are stored
they must have the target's shapes, and the target's are used all the same, as every engine does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from dspark.errors import UserError
from dspark.files import write_text
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target

REQUIRED = ("block_size", "target_layer_ids", "mask_token_id", "markov_rank", "num_target_layers")
DEFAULTS: dict[str, Any] = {
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
SHARED = ("embed_tokens.weight", "lm_head.weight")


def read_config(path: str | Path) -> Qwen3Config:
    """Read a native config.json.

    Raises:
        UserError: the file is absent or broken, or a field is missing or has a value that no
            drafter can have.
    """
    file = Path(path) / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"drafter '{path}' has no config.json: give a checkpoint directory"
        ) from error
    except ValueError as error:
        raise UserError(f"drafter config '{file}' is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"drafter config '{file}' is not a JSON object: is it a DSpark drafter?")
    missing = [name for name in REQUIRED if name not in raw]
    if missing:
        raise UserError(
            f"drafter config '{file}' lacks {', '.join(missing)}: is it a DSpark drafter?"
        )
    for name in REQUIRED:
        _check_value(file, name, raw[name])
    try:
        return Qwen3Config(**{**DEFAULTS, **raw})
    except Exception as error:  # its validators raise several kinds
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"drafter config '{file}': {reason}") from error


def _check_value(file: Path, name: str, value: Any) -> None:
    """A field of DSpark's own is a whole number, or for target_layer_ids a list of them."""
    if name == "target_layer_ids":
        fits = isinstance(value, list) and value != [] and all(type(item) is int for item in value)
        wanted = "a list of layer numbers"
    else:
        least = 1 if name == "block_size" else 0
        fits = type(value) is int and value >= least
        wanted = f"a whole number of at least {least}"
    if not fits:
        raise UserError(f"drafter config '{file}': {name} is {value!r}, expected {wanted}")


def check_fits(config: Qwen3Config, target: Target, name: str | Path) -> None:
    """Refuse a drafter that was made for another target, naming the field and both values.

    Raises:
        UserError: hidden size, vocabulary, layer count or tapped layers do not fit the target.
    """
    pairs = {
        "hidden_size": (config.hidden_size, target.hidden_size),
        "vocab_size": (config.vocab_size, target.vocab_size),
        "num_target_layers": (config.num_target_layers, target.num_layers),
    }
    for field, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise UserError(
                f"drafter '{name}' does not fit the target: {field} is {ours} in the drafter and "
                f"{theirs} in the target; use the drafter that was trained for this target"
            )
    # The last layer is forbidden: some implementations tap it before the final norm, some after.
    top = target.num_layers - 2
    wrong = [layer for layer in config.target_layer_ids if not -1 <= layer <= top]
    if wrong:
        raise UserError(
            f"drafter '{name}': target_layer_ids {wrong} lie outside -1..{top} of this target"
        )
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise UserError(
            f"drafter '{name}': mask_token_id {config.mask_token_id} is not in the target's "
            f"vocabulary of {target.vocab_size}"
        )


def load_drafter(path: str | Path, target: Target) -> DSparkDrafter:
    """Load a native checkpoint for `target`, in the target's dtype and on its device.

    Raises:
        UserError: it does not fit the target; a file is corrupt; a tensor is missing or misshapen.
    """
    config = read_config(path)
    check_fits(config, target, path)
    tensors = _read_tensors(Path(path))
    try:
        with torch.device("meta"):
            drafter = DSparkDrafter(config, target.embed, target.logits)
    except (KeyError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise UserError(f"drafter '{path}': its config makes no network ({error!r})") from error
    _check_tensors(tensors, drafter, target, path)
    for name in SHARED:
        tensors.pop(name, None)
    drafter = drafter.to_empty(device="cpu")
    drafter.load_state_dict(tensors)
    drafter.to(dtype=target.dtype)
    # Its buffers are computed, not stored, and stay float32: rounded frequencies are off by whole
    # radians some hundred positions on.
    drafter.rotary_emb = type(drafter.rotary_emb)(config)
    return drafter.to(device=target.device).eval()


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    index = path / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"drafter index '{index}' is broken ({error}): fetch it again"
            ) from error
    files = sorted(path / name for name in names)
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise UserError(
            f"drafter '{path}' lacks {', '.join(absent)}: weights are read from safetensors alone"
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                tensors.update({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise UserError(
                f"drafter weights '{file}' are corrupt ({error}): fetch them again"
            ) from error
    return tensors


def _check_tensors(
    tensors: dict[str, torch.Tensor], drafter: DSparkDrafter, target: Target, path: str | Path
) -> None:
    expected = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    for name, shape in expected.items():
        if name not in tensors:
            raise UserError(f"drafter '{path}': tensor {name} {list(shape)} is missing")
    for name in SHARED:
        expected[name] = (target.vocab_size, target.hidden_size)
    for name, value in tensors.items():
        if name not in expected:
            raise UserError(f"drafter '{path}': tensor {name} is not one of a DSpark drafter's")
        if tuple(value.shape) != expected[name]:
            raise UserError(
                f"drafter '{path}': tensor {name} is {list(value.shape)}, expected "
                f"{list(expected[name])}"
            )


def save_drafter(
    drafter: DSparkDrafter, path: str | Path, dtype: torch.dtype | None = None
) -> None:
    """Write a native checkpoint without embedding and LM head (they are the target's).

    Both files are written aside and renamed, the config last, so a killed writer leaves no
    checkpoint that looks whole.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or next(drafter.parameters()).dtype
    tensors = {
        name: value.detach().to("cpu", dtype).contiguous()
        for name, value in drafter.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors.part", metadata={"format": "pt"})
    os.chmod(folder / "model.safetensors.part", 0o644)  # it is written for its owner alone
    os.replace(folder / "model.safetensors.part", folder / "model.safetensors")
    raw = drafter.config.to_dict()
    raw["architectures"] = ["Qwen3DSparkModel"]
    raw["dtype"] = str(dtype).removeprefix("torch.")
    write_text(folder / "config.json", json.dumps(raw, indent=2, sort_keys=True) + "\n")
