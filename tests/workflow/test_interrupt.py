"""Ctrl-C on a terminal: all that the run has started gets it, and what a job says of it is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from checkout import SNAKEMAKE, Checkout

# Long enough to be in the middle of, at any moment of a second.
LONG = "datasets.gsm8k.max_new_tokens=200 sampling.ignore_eos=true ~datasets.mt_bench"
COMMAND = ("--config", "experiment=tiny", f"overrides={LONG}")
SOON_S = 120.0


def test_ctrl_c_leaves_the_journal_and_says_so_in_the_log(fresh: Checkout) -> None:
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
    assert any(folder.glob("journal-*.jsonl"))
    assert not (folder / "requests.parquet").exists()
