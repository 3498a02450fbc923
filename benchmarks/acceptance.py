"""Acceptance of a drafter on prompt files, for every k at once, without timing.

The target answers each prompt greedily; then every position of its answers is drafted in one go and
the decoder's steps are walked (dspark.train.evaluate), which gives what decoding at any k would have
accepted. 64 prompts of 128 tokens take a minute or two a file on two cores.

    python benchmarks/acceptance.py gsm8k.jsonl math500.jsonl --drafter DIR
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from tqdm import tqdm

from dspark.data.prompts import Prompt, read_prompts
from dspark.decode.engine import Engine, Request, Row
from dspark.decode.loop import closed_loop
from dspark.models.checkpoint import load_drafter
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target, load_target
from dspark.models.tokenizer import ChatTokenizer, load_tokenizer
from dspark.train.cache import CachedConversation
from dspark.train.calibrate import calibration_errors
from dspark.train.evaluate import Drafts, draft_response, visited_blocks, walk
from dspark.train.states import target_states

CONCURRENCY = 32


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--target", "target_path", default="results/models/smollm2_135m", show_default=True)
@click.option("--drafter", "drafter_path", default="src/dspark/assets/drafters/smollm2_135m")
@click.option("--limit", default=64, show_default=True, help="Prompts of each file.")
@click.option("--new", default=128, show_default=True, help="Tokens of an answer.")
@click.option("--dtype", default="bfloat16", show_default=True)
def main(
    files: tuple[Path, ...], target_path: str, drafter_path: str, limit: int, new: int, dtype: str
) -> None:
    """Print a markdown table: acceptance by position at the drafter's block size, accept lengths."""
    target = load_target(target_path, "cpu", getattr(torch, dtype))
    drafter = load_drafter(drafter_path, target)
    target.pack()
    drafter.pack()
    tokenizer = load_tokenizer(target_path)
    size = drafter.block_size
    ks = sorted({1, min(3, size), size})
    positions = "/".join(f"p{t + 1}" for t in range(size))
    lengths = " | ".join(f"accept len k={k}" for k in ks)
    print(
        f"| dataset | requests | {positions} at k={size} | {lengths} | confidence ECE by position |"
    )
    print("| --- | --- | --- |" + " --- |" * (len(ks) + 1))
    for file in files:
        rows = answers(target, tokenizer, read_prompts(file)[:limit], new)
        drafts = [draft(target, drafter, row) for row in tqdm(rows, desc=file.stem, unit="req")]
        walks = {k: walk(drafts, k) for k in ks}
        shares = " ".join(f"{share:.1%}" for share in walks[size].unconditional)
        shown = " | ".join(f"{walks[k].accept_len:.3f}" for k in ks)
        blocks = visited_blocks(drafts, size)
        measured = calibration_errors(*blocks, drafter.temperatures, drafter.shifts)
        errors = " ".join(f"{error:.1%}" for error in measured)
        print(f"| {file.stem} | {len(rows)} | {shares} | {shown} | {errors} |", flush=True)


def answers(target: Target, tokenizer: ChatTokenizer, prompts: list[Prompt], new: int) -> list[Row]:
    """The target's greedy answers to all turns, earlier answers being part of later prompts."""
    turns = {prompt.id: prompt.turns for prompt in prompts}

    def request(name: str, turn: int, earlier: list[list[int]]) -> Request:
        texts = [tokenizer.decode(ids) for ids in earlier]
        tokens = tokenizer.encode_turn(turns[name][: turn + 1], texts, chat=True)
        return Request(name, turn, tokens, new, eos_ids=tokenizer.eos_ids)

    longest = max(
        sum(len(tokenizer.encode_turn([text], [], True)) + new for text in t)
        for t in turns.values()
    )
    engine = Engine(target, concurrency=CONCURRENCY, capacity=longest + new)
    pairs = [(prompt.id, len(prompt.turns)) for prompt in prompts]
    total = sum(count for _, count in pairs)
    return list(tqdm(closed_loop(engine, pairs, request), total=total, desc="answers", unit="req"))


@torch.inference_mode()
def draft(target: Target, drafter: DSparkDrafter, row: Row) -> Drafts:
    """The drafts at every position of one answer."""
    ids = torch.tensor(row.request.tokens + row.output)
    final, taps = target_states(target, ids[None], drafter.target_layer_ids)
    item = CachedConversation(
        row.request.prompt_id,
        ids,
        len(row.request.tokens),
        taps[0],
        final[0],
        final[0, :, 0].float(),
    )
    return draft_response(drafter, item)


if __name__ == "__main__":
    main()
