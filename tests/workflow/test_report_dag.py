"""The end of the real DAG: a table of speedups that mean something, and MLflow, be it there or not."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path

import pytest
from checkout import DATASETS, RUNS, Checkout

from browser import browser

TINY = ("--config", "experiment=tiny")


def tiny(*overrides: str) -> tuple[str, ...]:
    return (*TINY, f"overrides={' '.join(overrides)}")


@pytest.fixture
def copied(fresh: Checkout, finished: Checkout) -> Checkout:
    """A finished run that a test may change."""
    shutil.rmtree(fresh.path)
    shutil.copytree(finished.path, fresh.path)
    return fresh


def said_by(checkout: Checkout, rule: str) -> str:
    return (checkout.results / "logs" / f"{rule}.log").read_text()


def test_one_local_rule_alone_writes_to_mlflow(finished: Checkout) -> None:
    done = finished.snakemake("--dry-run", "--forceall", "--printshellcmds", *TINY)
    commands = re.findall(r"Shell command: dspark (\w+)", done.stdout + done.stderr)
    assert commands.count("bench") == len(DATASETS)
    assert commands.count("track") == 1
    local = (finished.path / "Snakefile").read_text().split("localrules:")[1].split("\n\n")[0]
    assert "track" in re.findall(r"\w+", local)


def test_a_server_that_is_down_fails_nothing_but_its_rule(copied: Checkout) -> None:
    table = copied.results / "table.md"
    before = (table.read_bytes(), table.stat().st_mtime_ns)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    elsewhere = tiny(f"tracking.uri=http://127.0.0.1:{port}")
    done = copied.snakemake(*elsewhere, check=False)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert re.findall(r"Error in rule (\w+)", said) == ["track"]
    assert "Traceback" not in said
    (line,) = said_by(copied, "track").splitlines()
    assert "Connection refused; nothing is lost, the records stay under 'results/tiny'" in line
    assert "then `dspark track results/tiny` uploads them" in line
    assert (table.read_bytes(), table.stat().st_mtime_ns) == before
    assert copied.planned(*elsewhere) == {"track": 1, "all": 1}


def make_unpaired(checkout: Checkout) -> None:
    """As if one arm's summary had been brought from another machine."""
    path = checkout.results / DATASETS[0] / RUNS[1] / "summary.json"
    summary = json.loads(path.read_text())
    summary["settings"]["device"] = "a card of another time"
    path.write_text(json.dumps(summary))


def test_a_speedup_between_two_devices_is_refused_unless_it_is_marked(copied: Checkout) -> None:
    make_unpaired(copied)
    earlier = (copied.results / "table.md").read_text()
    done = copied.snakemake(*TINY, check=False)
    assert done.returncode != 0
    (line,) = said_by(copied, "table").splitlines()
    cell = f"{DATASETS[0]}/{RUNS[1]}"
    assert f'{cell}: not measured as baseline was: device "a card of another time" against' in line
    assert "allow_unpaired=true" in line

    copied.snakemake(*tiny("allow_unpaired=true"))
    marked = (copied.results / "table.md").read_text()
    assert re.findall(r"^\| (\w+) \| (\w+) \| 6 .*x † \|", marked, re.M) == [(DATASETS[0], RUNS[1])]
    assert f"\n- † {cell}: not measured as baseline was: device" in marked
    without = re.sub(r" †|\n- † .*", "", marked)
    assert without.splitlines()[:8] == earlier.splitlines()[:8]  # the numbers are the same


def link(name: str) -> str:
    """JavaScript that finds an entry of the report's menu."""
    return f"[...document.querySelectorAll('a')].find(a => a.innerText.trim() === '{name}')"


def button(result: str, icon: str) -> str:
    """JavaScript that finds a button beside a result: the eye shows it, the other tells of it."""
    row = f"[...document.querySelectorAll('tr')].find(r => r.innerText.trim() === '{result}')"
    return f"{row}?.querySelector('a[iconname={icon}]')"


def test_the_report_shows_table_and_plots(finished: Checkout, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    finished.snakemake(*TINY, "--report", str(report))
    # 0 of a picture that cannot be drawn
    drawn = "document.querySelector('img[src^=\"data:image/svg\"]')?.naturalWidth"
    with browser(tmp_path) as chromium:
        chromium.open(report.as_uri(), "All datasets", *DATASETS)
        chromium.click(link(DATASETS[0]))
        chromium.click(button("Acceptance by position", "eye"))
        chromium.wait_for(drawn)
        chromium.click(button("Acceptance by position", "information-circle"))
        chromium.read("How far the target follows the draft.")

        chromium.open(report.as_uri(), "All datasets")
        chromium.click(link("All datasets"))
        chromium.click(button("Table", "eye"))
        page = chromium.wait_for("document.querySelector('iframe')?.src")
        rows = [f"{dataset} {run} 6" for dataset in DATASETS for run in RUNS]
        chromium.open(page, "Dataset Run Req Output tok/s Speedup", *rows)
