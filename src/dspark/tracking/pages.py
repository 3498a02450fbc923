"""How MLflow's pages show an experiment and its cells before anybody has chosen anything.

A view is a choice of columns and their order that MLflow offers to everybody under "Views". Without
one the run list has no numbers, and hides the cells under the run of their execution.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

KIND_TAG = "mlflow.experimentKind"  # asked for on every visit where it is not set
KIND = "custom_model_development"
VIEW = "dspark"  # in the view's address: ...?viewStateShareKey=dspark
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"  # where MLflow keeps one, and in which form
VIEW_NAME = "Cells"
VIEW_COLUMNS = (
    "metrics.`output_tok_s`",
    "metrics.`speedup`",
    "metrics.`latency_ms_mean`",
    "metrics.`ttft_ms_mean`",
    "metrics.`accept_len`",
    "params.`concurrency`",
    "params.`k`",
    "params.`schedule`",
)
# By any order but that of their start, runs are listed one below the other, and not under parents.
VIEW_ORDER = "tags.`mlflow.runName`"
PALEST = 0.6  # share of white that no dataset's colours reach


def experiment_tags() -> dict[str, str]:
    """The tags of a new MLflow experiment."""
    state = {"selectedColumns": VIEW_COLUMNS, "orderByKey": VIEW_ORDER, "orderByAsc": True}
    view = {"name": VIEW_NAME, "createdAt": 0, "updatedAt": 0, "state": json.dumps(state)}
    return {KIND_TAG: KIND, VIEW_TAG: json.dumps(view)}


def colors_of(cells: Sequence[tuple[str, str]]) -> list[str]:
    """A colour for each (dataset, run), as #rrggbb: that of the run in our plots, paler from dataset to
    dataset. MLflow's own depend on a run's id, so that two arms may have the same."""
    from dspark.report.style import looks_of

    looks = looks_of(list(dict.fromkeys(run for _, run in cells)))
    datasets = list(dict.fromkeys(dataset for dataset, _ in cells))
    white = {name: PALEST * place / len(datasets) for place, name in enumerate(datasets)}
    return [_paler(looks[run].color, white[dataset]) for dataset, run in cells]


def _paler(color: str, white: float) -> str:
    """A colour with a share of white, as #rrggbb."""
    from matplotlib.colors import to_hex, to_rgb

    red, green, blue = (part + (1 - part) * white for part in to_rgb(color))
    return to_hex((red, green, blue))
