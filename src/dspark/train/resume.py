"""What a training run needs to go on after a kill: weights, optimizers' state, step, best so far.

One safetensors file, written aside and renamed. Its metadata names the run that it belongs to: with
other settings or other states training starts anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from dspark.files import written_aside

FILE = "progress.safetensors"


@dataclass
class Progress:
    """How far a run has come."""

    run: str  # digest of the settings and the states that it trains on
    step: int = 0  # steps done
    best: float = 0.0  # longest accept length of a validation
    stale: int = 0  # validations since then


def save_progress(
    folder: Path, progress: Progress, model: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Write `folder`/progress.safetensors.

    Raises:
        UserError: it cannot be written.
    """
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer{number}.{index}.{name}": value for name, value in state.items()}
    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    metadata = {"format": "pt", "progress": json.dumps(asdict(progress))}
    with written_aside(folder / FILE) as aside:
        save_file(whole, aside, metadata=metadata)


def load_progress(
    folder: Path, run: str, model: nn.Module, optimizers: Sequence[Optimizer]
) -> Progress:
    """Load what `save_progress` wrote for the same `run`; a fresh start when there is none."""
    try:
        with safe_open(folder / FILE, framework="pt") as handle:
            progress = Progress(**json.loads(handle.metadata()["progress"]))
            if progress.run != run:
                return Progress(run)
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return Progress(run)
    model.load_state_dict(_part(tensors, "model."))
    for number, optimizer in enumerate(optimizers):
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in _part(tensors, f"optimizer{number}.").items():
            index, field = name.split(".")
            states.setdefault(int(index), {})[field] = value
        whole: dict[str, Any] = optimizer.state_dict()
        optimizer.load_state_dict({**whole, "state": states})
    return progress


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
