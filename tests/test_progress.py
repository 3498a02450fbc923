"""What a running job says of itself, on a terminal and in a log file."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from dspark import progress
from dspark.decode.records import RequestRecord
from dspark.progress import Bar, arm_progress


def record(t_submit: float, steps: list[tuple[float, int, int, bool]]) -> RequestRecord:
    """A request whose steps are (time, drafted, accepted, cut), its first token half a second in."""
    tokens = 1 + sum(1 + accepted for _, _, accepted, _ in steps)
    return RequestRecord(
        prompt_id="p",
        turn=0,
        dataset="gsm8k",
        run="any",
        window=0,
        prompt_tokens=3,
        output_tokens=tokens,
        output_token_ids=[7] * tokens,
        finish_reason="length",
        t_submit=t_submit,
        t_first=t_submit + 0.5,
        t_last=steps[-1][0] if steps else t_submit + 0.5,
        step_t=[t for t, *_ in steps],
        step_emitted=[1 + accepted for _, _, accepted, _ in steps],
        step_drafted=[drafted for _, drafted, _, _ in steps],
        step_verified=[drafted for _, drafted, _, _ in steps],
        step_accepted=[accepted for _, _, accepted, _ in steps],
        step_cut=[cut for *_, cut in steps],
    )


def test_an_arm_is_told_by_its_throughput_and_its_accept_length() -> None:
    first = record(0.0, [(1.0, 3, 2, False), (2.0, 3, 0, False)])  # 5 tokens
    second = record(1.0, [(3.0, 3, 1, False), (4.0, 3, 3, True)])  # 7 tokens
    # From the first submit to the last token; the cut step is no trial.
    assert arm_progress("dspark_k3", [first, second]) == "dspark_k3 3.0 tok/s, accept len 2.00"


def test_an_arm_that_drafts_nothing_has_no_accept_length() -> None:
    assert arm_progress("baseline", [record(0.0, [(1.0, 0, 0, False)])]) == "baseline 2.0 tok/s"


def test_a_request_without_a_step_has_a_throughput_alone() -> None:
    assert arm_progress("dspark_k3", [record(0.0, [])]) == "dspark_k3 2.0 tok/s"
    instant = record(0.0, [])
    instant.t_last = 0.0
    assert arm_progress("dspark_k3", [instant]) == "dspark_k3"


def test_in_a_file_the_progress_is_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.0)
    with Bar(desc="gsm8k", initial=3, total=6, unit="req") as bar:
        for _ in range(3):
            bar.set_postfix_str("dspark_k3 3.0 tok/s, accept len 2.00", refresh=False)
            bar.update()
    text = log.getvalue()
    assert "\r" not in text and text.endswith("left\n") and "\n\n" not in text
    lines = text.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"gsm8k: {n}/6 req" for n in (3, 4, 5, 6)]
    assert re.fullmatch(
        r"gsm8k: 6/6 req, dspark_k3 3\.0 tok/s, accept len 2\.00, [\d.]+req/s, "
        r"00:00 elapsed, 00:00 left",
        lines[-1],
    )


def test_in_a_file_a_quick_job_says_only_how_it_begins_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with Bar(desc="gsm8k", total=500, unit="req") as bar:
        for _ in range(500):
            bar.update()
    assert [line.split(",")[0] for line in log.getvalue().splitlines()] == [
        "gsm8k: 0/500 req",
        "gsm8k: 500/500 req",
    ]


def test_on_a_terminal_a_bar_is_drawn_over_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Bar(desc="gsm8k", total=2, unit="req") as bar:
            bar.set_postfix_str("baseline 2.0 tok/s")
            bar.update(2)
        terminal.flush()
        shown = ""
        while not shown.endswith("\r\n"):
            shown += os.read(ours, 65536).decode()
    os.close(ours)
    assert shown.count("\r") > shown.count("\n")
    assert "100%" in shown and "baseline 2.0 tok/s" in shown


def test_what_is_written_beside_a_plain_line_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    for _ in Bar(range(2), desc="fit"):
        Bar.write("validated", file=log)
    text = log.getvalue()
    assert "\r" not in text and "\n\n" not in text
    assert text.splitlines().count("validated") == 2


def test_in_a_file_the_libraries_show_no_bars(tmp_path: Path) -> None:
    code = (
        "import sys; from dspark.cli import main; sys.argv = ['dspark', '--version']; main()\n"
        f"from tiny_models import save_tiny_target; save_tiny_target({str(tmp_path)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "model.safetensors").is_file()
