"""Ctrl-C on a terminal: all that the run has started gets it, and what a job says of it is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from checkout import DATASETS, RUNS, SNAKEMAKE, Checkout

from dspark.report.table import parse_table

# Long enough to be in the middle of, at any moment of a second.
LONG = "datasets.gsm8k.limit=16 datasets.gsm8k.max_new_tokens=200 sampling.ignore_eos=true"
COMMAND = ("--config", "experiment=tiny", f"overrides={LONG}")
SOON_S = 120.0


def test_ctrl_c_says_what_is_kept_and_the_same_command_goes_on(fresh: Checkout) -> None:
    folder = fresh.results / "gsm8k"
    with subprocess.Popen(
        [*SNAKEMAKE, *COMMAND],
        cwd=fresh.path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as run:
        deadline = time.monotonic() + SOON_S
        while not any(path.stat().st_size for path in folder.glob("journal-*.jsonl")):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGINT)
    assert run.returncode != 0
    log = (fresh.results / "logs" / "bench" / "gsm8k.log").read_text()
    assert "dspark: stopped by SIGINT: " in log
    assert "are kept, the same command goes on from there" in log
    assert not (folder / "requests.parquet").exists()

    done = fresh.snakemake(*COMMAND)
    rows = parse_table((fresh.results / "table.md").read_text())
    assert [(row.dataset, row.run) for row in rows] == [(d, r) for d in DATASETS for r in RUNS]
    assert "The table is results/tiny/table.md" in done.stderr
