"""Drafter checkpoints: a directory with config.json and safetensors, in either of two formats.

The native one is DeepSpec's; models/speculators.py translates the other. A checkpoint may leave out
`embed_tokens` and `lm_head`: they are the target's. Where they are stored they must have the target's
shapes, and the target's are used all the same. One stored LM head is used: that of a `speculators`
checkpoint with a reduced draft vocabulary, which may have been trained away from the target's rows.

V vocabulary, Vd draft vocabulary, D hidden size.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from dspark.errors import UserError, nearest
from dspark.files import write_text, written_aside
from dspark.models import calibration, speculators
from dspark.models.directory import corrupt, weight_files
from dspark.models.drafter import DSparkDrafter
from dspark.models.head import LMHead
from dspark.models.target import Target

REQUIRED = ("block_size", "target_layer_ids", "mask_token_id", "markov_rank", "num_target_layers")
DEFAULTS: dict[str, Any] = {
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
FORMATS = ("native", "speculators")


@dataclass(frozen=True)
class Checkpoint:
    """What a directory of either format holds, checked and in native terms."""

    format: str  # one of FORMATS
    config: Qwen3Config
    tensors: dict[str, Tensor]  # the drafter's own, as they are stored
    head: Tensor | None  # [Vd, D]: the LM head to use; None: the target's


def read_config(path: str | Path, num_target_layers: int | None = None) -> Qwen3Config:
    """Read a config.json of either format as a native config.

    Args:
        num_target_layers: the target's, which only the native format tells.

    Raises:
        UserError: the file is absent or broken, or a field is missing or has a value that no
            drafter can have, or asks for what the decoder does not have.
    """
    return _config_of(Path(path) / "config.json", _read_json(path), num_target_layers)


def _config_of(file: Path, raw: dict[str, Any], num_target_layers: int | None) -> Qwen3Config:
    speculators.check_anchor_first(file, raw)
    if speculators.is_speculators(raw):
        if num_target_layers is None:
            raise UserError(
                f"drafter config '{file}' is of the speculators format, which does not tell the "
                "target's layers: convert it to the native one"
            )
        raw = speculators.native_fields(file, raw, num_target_layers)
    missing = [name for name in REQUIRED if name not in raw]
    if missing:
        raise UserError(
            f"drafter config '{file}' lacks {', '.join(missing)}: is it a DSpark drafter?"
        )
    for name in REQUIRED:
        _check_value(file, name, raw[name])
    try:
        config = Qwen3Config(**{**DEFAULTS, **raw})
    except Exception as error:  # its validators raise several kinds
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"drafter config '{file}' is not valid ({reason}): fetch the drafter again"
        ) from error
    _settle_vocabulary(file, config)
    windowed = sorted(set(config.layer_types or ()) - {"full_attention"})
    if windowed:
        raise UserError(
            f"drafter config '{file}': layer_types has {', '.join(windowed)}, and this decoder's "
            "drafters have full_attention alone: use such a drafter"
        )
    return config


def _read_json(path: str | Path) -> dict[str, Any]:
    file = Path(path) / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"drafter '{path}' has no config.json: give a checkpoint directory"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"drafter config '{file}' is not JSON ({error}): fetch it again") from error
    if not isinstance(raw, dict):
        raise UserError(f"drafter config '{file}' is not a JSON object: is it a DSpark drafter?")
    return raw


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
        raise UserError(
            f"drafter config '{file}': {name} is {value!r}, expected {wanted}: fetch the drafter again"
        )


def _settle_vocabulary(file: Path, config: Qwen3Config) -> None:
    """Keep draft_vocab_size only where the draft vocabulary is a part of the target's."""
    if not hasattr(config, "draft_vocab_size"):
        return
    size = config.draft_vocab_size
    if size is not None and not (type(size) is int and 1 <= size <= config.vocab_size):
        raise UserError(
            f"drafter config '{file}': draft_vocab_size is {size!r}, expected a whole number in "
            f"1..{config.vocab_size} (vocab_size): fetch the drafter again"
        )
    if size is None or size == config.vocab_size:
        del config.draft_vocab_size


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
            f"drafter '{name}': target_layer_ids {wrong} lie outside -1..{top} of this target: use the "
            "drafter that was trained for it"
        )
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise UserError(
            f"drafter '{name}': mask_token_id {config.mask_token_id} is not in the target's "
            f"vocabulary of {target.vocab_size}: use the drafter that was trained for it"
        )


def load_drafter(path: str | Path, target: Target) -> DSparkDrafter:
    """Load a checkpoint of either format for `target`, in the target's dtype and on its device.

    Raises:
        UserError: it does not fit the target; a file is corrupt; a tensor is missing or misshapen;
            it asks for what the decoder does not have.
    """
    stored = read_checkpoint(path, target)
    drafter = _empty_drafter(stored.config, target, path).to_empty(device="cpu")
    drafter.load_state_dict(stored.tensors)
    drafter.to(dtype=target.dtype)
    # Its buffers are computed, not stored, and stay float32: rounded frequencies are off by whole
    # radians some hundred positions on.
    drafter.rotary_emb = type(drafter.rotary_emb)(stored.config)
    drafter = drafter.to(device=target.device).eval()
    if drafter.d2t is not None:
        use_draft_vocabulary(drafter, target, drafter.d2t, path)
    if stored.head is not None:
        weight = stored.head.to(device=target.device, dtype=target.dtype)
        drafter.__dict__["lm_head"] = replace(target.head, weight=weight, bias=None, packed=None)
    measured = calibration.read_calibration(path, drafter.block_size)
    if measured is not None:
        drafter.temperatures, drafter.shifts = measured.temperatures, measured.shifts
    return drafter


def read_checkpoint(path: str | Path, target: Target) -> Checkpoint:
    """Read a checkpoint of either format and check it against `target`.

    Raises:
        UserError: as `load_drafter`.
    """
    raw = _read_json(path)
    config = _config_of(Path(path) / "config.json", raw, target.num_layers)
    check_fits(config, target, path)
    theirs = speculators.is_speculators(raw)
    tensors = _read_tensors(Path(path))
    reduced: int | None = getattr(config, "draft_vocab_size", None)
    whole, width = target.vocab_size, target.hidden_size
    heads = {reduced or whole} if theirs else {reduced or whole, whole}
    optional: dict[str, list[tuple[int, ...]]] = {
        EMBEDDINGS: [(whole, width)],
        HEAD: [(rows, width) for rows in sorted(heads)],
        "d2t": [(whole,)],
        "t2d": [(whole,)],
    }
    if theirs:
        tensors = speculators.without_verifier(tensors)
    _check_tensors(tensors, _empty_drafter(config, target, path), optional, path)
    tensors = speculators.without_mask(tensors, whole, reduced is not None, path)
    if reduced:
        tensors["d2t"] = tensors["d2t"].long()
        _draft_ids(tensors["d2t"], whole, path)
    head = tensors.pop(HEAD, None) if theirs and reduced else None
    own = {name: value for name, value in tensors.items() if name not in (EMBEDDINGS, HEAD)}
    return Checkpoint("speculators" if theirs else "native", config, own, head)


def _empty_drafter(config: Qwen3Config, target: Target, path: str | Path) -> DSparkDrafter:
    """The network that `config` describes, without memory for its tensors."""
    try:
        with torch.device("meta"):
            return DSparkDrafter(config, target.embed, target.head)
    except (KeyError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise UserError(
            f"drafter '{path}': its config makes no network ({error!r}): fetch the drafter again"
        ) from error


def use_draft_vocabulary(
    drafter: DSparkDrafter, target: Target, d2t: Tensor, name: str | Path
) -> None:
    """Draft from the target's tokens i + d2t[i] alone, with the target's LM head of those.

    Raises:
        UserError: the ids are not ascending ids of the target.
    """
    ids = _draft_ids(d2t, target.vocab_size, name)
    drafter.d2t = d2t
    drafter.__dict__["lm_head"] = target.head.rows(ids)


def _draft_ids(d2t: Tensor, vocab_size: int, name: str | Path) -> Tensor:
    """The target's ids [Vd] that offsets [Vd] lead to."""
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    if len(ids) and not (ids[0] >= 0 and ids[-1] < vocab_size and (ids.diff() > 0).all()):
        raise UserError(
            f"drafter '{name}': d2t does not give ascending ids below the target's vocabulary of "
            f"{vocab_size}: fetch it again"
        )
    return ids


def _read_tensors(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in weight_files(path, "drafter"):
        try:
            with safe_open(file, framework="pt") as handle:
                tensors.update({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise corrupt(file, "drafter", error) from error
    return tensors


def _check_tensors(
    tensors: dict[str, Tensor],
    drafter: DSparkDrafter,
    optional: dict[str, list[tuple[int, ...]]],
    path: str | Path,
) -> None:
    """Compare names, shapes and kinds of number with a drafter's.

    Args:
        optional: shapes of tensors that may be stored besides; the drafter's own come first.
    """
    expected = drafter.state_dict()
    for name, value in expected.items():
        if name not in tensors:
            raise UserError(
                f"drafter '{path}': tensor {name} {list(value.shape)} is missing: fetch the drafter again"
            )
    shapes = optional | {name: [tuple(value.shape)] for name, value in expected.items()}
    for name, value in tensors.items():
        if name not in shapes:
            raise UserError(
                f"drafter '{path}': tensor {name} is not one of a DSpark drafter's: use another drafter"
            )
        if tuple(value.shape) not in shapes[name]:
            wanted = " or ".join(str(list(shape)) for shape in shapes[name])
            raise UserError(
                f"drafter '{path}': tensor {name} is {list(value.shape)}, expected {wanted}: use the "
                "drafter that was trained for this target"
            )
        if value.is_floating_point() == (name in ("d2t", "t2d")):
            found = str(value.dtype).removeprefix("torch.")
            wanted = "whole numbers" if value.is_floating_point() else "unquantised weights"
            raise UserError(
                f"drafter '{path}': tensor {name} is {found}, expected {wanted}: fetch the drafter again"
            )
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(
                f"drafter '{path}': tensor {name} holds values that are not finite: fetch it again, or "
                "train it anew"
            )


def save_drafter(
    drafter: DSparkDrafter, path: str | Path, dtype: torch.dtype | None = None
) -> None:
    """Write a native checkpoint without embedding and LM head (they are the target's).

    Both files are written aside and renamed, the config last, so a killed writer leaves no
    checkpoint that looks whole.

    Args:
        dtype: of the floating-point tensors; None: the drafter's.

    Raises:
        UserError: a file cannot be written.
    """
    tensors = _stored(drafter.state_dict().items(), dtype or next(drafter.parameters()).dtype)
    _write(Path(path), tensors, _native_fields(drafter.config, tensors["fc.weight"].dtype))


def save_speculators(
    drafter: DSparkDrafter,
    path: str | Path,
    target: Target,
    dtype: torch.dtype | None = None,
    verifier: str | None = None,
) -> None:
    """Write a checkpoint of the `speculators` format, as `save_drafter` does a native one.

    A reduced draft vocabulary takes its LM head and the target's embeddings along: engines that
    read the format need them. What the target does to its logits (scale, soft cap) is not stored.

    Args:
        dtype: of the floating-point tensors; None: the drafter's.
        verifier: name of the target on the hub, which engines load it by; None: where it was loaded
            from.

    Raises:
        UserError: a file cannot be written, or the target's LM head has what the format lacks.
    """
    tensors = dict(drafter.state_dict())
    if drafter.d2t is not None:
        tensors |= _reduced_tensors(drafter.d2t, drafter.lm_head, target, path)
    tensors = _stored(tensors.items(), dtype or next(drafter.parameters()).dtype)
    _write(Path(path), tensors, _speculators_fields(drafter.config, tensors, target, verifier))


def convert(
    path: str | Path, out: str | Path, to: str, target: Target, verifier: str | None = None
) -> None:
    """Write the checkpoint at `path` to the directory `out` in the other format.

    Tensors keep their values and dtypes; an LM head and embeddings that the other format needs
    besides are in the target's dtype. A calibration.json is copied along.

    Args:
        to: one of FORMATS.
        verifier: as in `save_speculators`.

    Raises:
        UserError: an unknown format, or the one that the checkpoint has; a checkpoint that cannot be
            loaded for `target`; an LM head of its own, which the native format does not have; a
            file that cannot be written.
    """
    if to not in FORMATS:
        raise UserError(f"checkpoint format '{to}' is unknown: {nearest(to, FORMATS)}")
    folder = Path(out)
    if folder.resolve() == Path(path).resolve():
        raise UserError(f"cannot convert '{path}' into itself: give another directory")
    stored = read_checkpoint(path, target)
    if stored.format == to:
        raise UserError(f"drafter '{path}' is in the {to} format already: use it as it is")
    tensors, d2t = dict(stored.tensors), stored.tensors.get("d2t")
    if d2t is not None:
        rows = target.head.rows(_draft_ids(d2t, target.vocab_size, path).to(target.device))
        if stored.head is not None:
            _check_is_targets(stored.head, rows, path)
        if to == "speculators":
            tensors |= _reduced_tensors(d2t, rows, target, out)
    tensors = _stored(tensors.items())
    if to == "native":
        fields = _native_fields(stored.config, tensors["fc.weight"].dtype)
    else:
        fields = _speculators_fields(stored.config, tensors, target, verifier)
    _copy_calibration(Path(path), folder)
    _write(folder, tensors, fields)


def _check_is_targets(head: Tensor, rows: LMHead, path: str | Path) -> None:
    """Refuse an LM head [Vd, D] that is not the target's `rows`, in the coarser dtype of the two."""
    ours, theirs = head.to(rows.weight.device), rows.weight
    same = torch.equal(ours, theirs.to(ours.dtype)) or torch.equal(ours.to(theirs.dtype), theirs)
    if not same or rows.bias is not None:
        raise UserError(
            f"drafter '{path}': its {HEAD} {list(head.shape)} is not the target's, and the native "
            "format has none of its own; use the drafter as it is"
        )


def _reduced_tensors(
    d2t: Tensor, head: LMHead, target: Target, path: str | Path
) -> dict[str, Tensor]:
    """What the `speculators` format stores besides for a reduced vocabulary of offsets [Vd]."""
    if head.bias is not None:
        raise UserError(
            f"cannot write '{path}': the target's LM head has a bias, which the speculators format "
            "does not store; keep the native format"
        )
    embeddings: Any = target.embed.weight
    return speculators.reduced_tensors(d2t, head.weight, embeddings, target.vocab_size)


def _stored(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Tensors as a file takes them; those of floating point in `dtype`, None: in their own."""
    return {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else None).contiguous()
        for name, value in tensors
    }


def _native_fields(config: Qwen3Config, dtype: torch.dtype) -> dict[str, Any]:
    fields = config.to_dict()
    fields["architectures"] = ["Qwen3DSparkModel"]
    fields["dtype"] = str(dtype).removeprefix("torch.")
    return fields


def _speculators_fields(
    config: Qwen3Config, tensors: dict[str, Tensor], target: Target, verifier: str | None
) -> dict[str, Any]:
    name = verifier or target.model.name_or_path or None
    dtype = tensors["fc.weight"].dtype
    return speculators.speculators_fields(config, target.model.config, name, dtype)


def _write(folder: Path, tensors: dict[str, Tensor], fields: dict[str, Any]) -> None:
    """Write weights and then the config, each aside first."""
    with written_aside(folder / "model.safetensors") as aside:
        save_file(tensors, aside, metadata={"format": "pt"})
        os.chmod(aside, 0o644)  # it is written for its owner alone
    write_text(folder / "config.json", json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _copy_calibration(source: Path, folder: Path) -> None:
    """Give `folder` the calibration of `source`, and none where that has none."""
    if (source / calibration.FILE).is_file():
        with written_aside(folder / calibration.FILE) as aside:
            shutil.copyfile(source / calibration.FILE, aside)
    elif (folder / calibration.FILE).is_file():
        (folder / calibration.FILE).unlink()
