"""Measured speedups beside what acceptance and step times predict: is anything lost between steps?

    python benchmarks/predicted.py results/demo

C requests in flight cost C prefills and (n - 1) / L steps: n tokens a request, L tokens delivered a step.
So an arm takes C * TTFT + (n - 1) / L * step for them, and the predicted speedup is the baseline's time
over the arm's.
"""

from __future__ import annotations

from pathlib import Path

import click

from dspark.metrics.cell import BASELINE, CellSummary, read_summary


def seconds(cell: CellSummary, step_ms: float, tokens_a_step: float) -> float:
    """Time of as many requests as are in flight at once."""
    tokens = cell.output_tokens / cell.requests
    return (cell.concurrency * cell.ttft_ms_mean + (tokens - 1) / tokens_a_step * step_ms) / 1000


@click.command()
@click.argument("results", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(results: Path) -> None:
    """Print a line for each cell with a draft."""
    cells = [read_summary(path) for path in sorted(results.glob("*/*/summary.json"))]
    baselines = {cell.dataset: cell for cell in cells if cell.run == BASELINE}
    click.echo("| dataset | run | delivered | break-even | predicted | measured | apart |")
    click.echo("| --- | --- | --- | --- | --- | --- | --- |")
    for cell in cells:
        if cell.accept_len_delivered is None or cell.step_ms_spec is None:
            continue
        base = baselines[cell.dataset]
        assert cell.step_ms_baseline is not None
        predicted = seconds(base, cell.step_ms_baseline, 1.0) / seconds(
            cell, cell.step_ms_spec, cell.accept_len_delivered
        )
        click.echo(
            f"| {cell.dataset} | {cell.run} | {cell.accept_len_delivered:.3f} "
            f"| {cell.break_even_accept_len:.3f} | {predicted:.3f}x | {cell.speedup:.3f}x "
            f"| {cell.speedup / predicted - 1:+.1%} |"
        )


if __name__ == "__main__":
    main()
