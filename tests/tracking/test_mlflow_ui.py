"""MLflow's own pages in a real browser, over a store that `dspark track` filled; and what docs/mlflow.md
says of it, filter by filter and command by command.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from mlflow_serving import free_port, search, serving
from results_tree import write_training

from browser import Browser, browser
from dspark.config import compose_experiment, to_yaml

CONFIGS = Path(__file__).parents[2] / "config"
DOCS = (Path(__file__).parents[2] / "docs" / "mlflow.md").read_text()
ARMS = ("baseline", "dspark_k3", "dspark_k7")
TRAINING = "results/training/mine-1a2b3c4d"


def told(heading: str, number: int = 0) -> str:
    """A block of code under a heading of the page."""
    section = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", DOCS, re.S | re.M)
    assert section is not None, f"docs/mlflow.md has no section '{heading}'"
    return re.findall(r"^```\n(.*?)^```$", section[1], re.S | re.M)[number]


def dspark(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(command)
    beside = str(Path(sys.executable).with_name(program))
    return subprocess.run([beside, *arguments], cwd=cwd, capture_output=True, text=True)


@dataclass
class Served:
    """A store that is served, and a browser to look at it with."""

    folder: Path  # the working directory
    address: str
    ids: dict[str, str]  # of runs by their name
    experiment_id: str

    def url(self, path: str = "", **query: str) -> str:
        """The address of a page of the experiment."""
        asked = "&".join(f"{key}={quote(value)}" for key, value in query.items())
        return f"{self.address}/#/experiments/{self.experiment_id}/runs{path}?{asked}"


@pytest.fixture(scope="module")
def served(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """results/demo, tracked into the default store, which is served as the page says."""
    folder = tmp_path_factory.mktemp("work")
    shutil.copytree(demo, folder / "results" / "demo")
    write_training(folder / TRAINING)
    done = dspark(f"dspark track results/demo --training {TRAINING}", folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    written = json.loads((folder / "results" / "demo" / "mlflow.json").read_text())
    command = shlex.split(told("Looking at it"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the store's address is relative
        with serving(command, folder / "server.log", free_port()) as address:
            ids = {**written["cells"], "demo": written["parent"]}
            yield Served(folder, address, ids, written["experiment_id"])


@pytest.fixture(scope="module")
def chromium(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def test_the_view_lists_the_cells_with_their_numbers(served: Served, chromium: Browser) -> None:
    cells = [name for name in served.ids if "/" in name]
    assert len(cells) == 6
    columns = ["output_tok_s", "speedup", "latency_ms_mean", "ttft_ms_mean", "accept_len", "k"]
    k3 = json.loads((served.folder / "results/demo/gsm8k/dspark_k3/summary.json").read_text())
    chromium.open(
        served.url(viewStateShareKey="dspark"),
        *("Cells", *cells, "train/mine", *columns, str(k3["output_tok_s"])[:6]),
    )


def test_three_arms_are_compared_on_one_page(served: Served, chromium: Browser) -> None:
    names = [f"gsm8k/{arm}" for arm in ARMS]
    runs = quote(json.dumps([served.ids[name] for name in names]))
    experiments = quote(json.dumps([served.experiment_id]))
    chromium.open(
        f"{served.address}/#/compare-runs?runs={runs}&experiments={experiments}",
        "Comparing 3 Runs from 1 Experiment",
        *names,
        *("concurrency", "confidence_threshold", "dataset", "schedule"),  # params
        *("accept_len", "accept_p1", "accept_rate", "break_even_accept_len"),  # the first metrics
        "Parallel Coordinates Plot",
        "k 0 3 7 run baseline dspark_k3 dspark_k7",
        "2.415",  # accept_len of k = 3
    )
    chromium.wait_for("document.querySelectorAll('.js-plotly-plot svg').length")


def test_the_charts_of_three_arms_have_curves_and_colours(
    served: Served, chromium: Browser
) -> None:
    url = served.url(
        compareRunsMode="CHART",
        searchFilter="tags.experiment = 'demo' and tags.dataset = 'gsm8k'",
        orderByKey="tags.`mlflow.runName`",
        orderByAsc="true",
    )
    names = [f"gsm8k/{arm}" for arm in ARMS]
    text = chromium.open(
        url,
        "3 matching runs",
        *names,
        *("over_time (2)", "over_time/output_tok_s", "over_time/requests_done", "Step"),
        *("Model metrics", "accept_len", "System metrics (4)"),
    )
    assert "humaneval" not in text
    chromium.wait_for(
        "[...new Set([...document.querySelectorAll('.js-plotly-plot .scatterlayer .trace path.js-line')]"
        ".map(line => line.style.stroke))].length",
        lambda colours: colours == len(ARMS),
    )


def test_a_parent_shows_the_table_and_its_artifacts(served: Served, chromium: Browser) -> None:
    chromium.open(
        served.url(f"/{served.ids['demo']}"), "demo", "Description", "Dataset", "Run", "Req"
    )
    chromium.open(
        served.url(f"/{served.ids['demo']}/artifacts/cells.json"),
        *("config", "plots", "table.md", "cells.json", "View as table"),
        *("gsm8k", "humaneval", *ARMS, "output_tok_s", "speedup"),
    )


def test_a_cell_shows_its_inputs_tags_and_system_metrics(served: Served, chromium: Browser) -> None:
    run = served.ids["gsm8k/dspark_k3"]
    tags = ("experiment : demo", "precision : float32", "drafter : tiny_dspark", "target : tiny")
    chromium.open(served.url(f"/{run}"), "gsm8k/dspark_k3", "Parent run", "gsm8k (", "+2", *tags)
    chromium.open(
        served.url(f"/{run}/system-metrics"),
        *("cpu_utilization_percentage", "process_memory_megabytes", "Time"),
    )


@pytest.mark.parametrize("condition", told("Filters that work").splitlines())
def test_a_filter_of_the_page_finds_some_runs(served: Served, condition: str) -> None:
    everything = search(served.address, served.experiment_id, "")
    found = search(served.address, served.experiment_id, condition)
    assert 0 < len(found) < len(everything) == 8


def test_a_filter_by_dataset_or_context_finds_the_right_runs(served: Served) -> None:
    names = {
        condition: {
            run["info"]["run_name"]
            for run in search(served.address, served.experiment_id, condition)
        }
        for condition in ("dataset.name = 'gsm8k'", "dataset.context = 'drafter'")
    }
    assert names["dataset.name = 'gsm8k'"] == {f"gsm8k/{arm}" for arm in ARMS}
    assert names["dataset.context = 'drafter'"] == {
        f"{dataset}/{arm}" for dataset in ("gsm8k", "humaneval") for arm in ARMS[1:]
    }


def test_the_page_s_program_prints_the_arms(served: Served) -> None:
    done = subprocess.run(
        [sys.executable, "-c", told("In pandas")],
        cwd=served.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {line.split()[1] for line in done.stdout.splitlines()[1:]} == set(ARMS)


def test_what_a_server_missed_is_uploaded_by_the_page_s_command(served: Served) -> None:
    results = served.folder / "results" / "demo"
    _, _, name, *overrides = shlex.split(told("On a server"))
    config = compose_experiment(name, overrides, CONFIGS).tracking
    host, config.uri = config.uri, f"http://127.0.0.1:{free_port()}"
    (results / "tracking.yaml").write_text(to_yaml(config))
    missed = dspark(told("On a server", 2), served.folder)
    assert missed.returncode == 1
    assert missed.stderr.replace(config.uri, host) == told("On a server", 1)

    config.uri = served.address
    (results / "tracking.yaml").write_text(to_yaml(config))
    done = dspark(told("On a server", 2), served.folder)
    assert (done.returncode, done.stderr) == (0, "")
    written = json.loads((results / "mlflow.json").read_text())
    assert written["experiment_id"] != served.experiment_id
    assert len(search(served.address, written["experiment_id"], "")) == 7
