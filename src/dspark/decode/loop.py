"""The closed loop: a finished request's place is taken at once by the next one.

A prompt's turns follow each other: turn t+1 is submitted when turn t has been answered, because it
may be asked with that answer before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from dspark.decode.engine import Engine, Request, Row
from dspark.errors import UserError


def closed_loop(
    engine: Engine,
    prompts: Sequence[tuple[str, int]],
    make_request: Callable[[str, int, list[list[int]]], Request],
    answered: dict[str, list[list[int]]] | None = None,
) -> Iterator[Row]:
    """Run all turns of all prompts, keeping every slot of the engine busy; yields finished rows.

    Args:
        prompts: (prompt id, number of turns), in the order in which they are submitted.
        make_request: builds turn `t` of a prompt from the outputs of its earlier turns.
        answered: outputs of turns that were answered before this call, by prompt id.

    Raises:
        UserError: the engine's clock went backwards, so that no time of a request can be trusted.
    """
    turns = dict(prompts)
    answers = {name: list((answered or {}).get(name, [])) for name in turns}
    waiting = deque(name for name, _ in prompts)
    latest = float("-inf")
    while waiting or engine.active:
        finished: list[Row] = []
        # All free places are taken at the same moment: who is prefilled second has waited for it.
        submitted = engine.clock()
        _require_forward(latest, submitted)
        latest = submitted
        for _ in range(min(engine.free, len(waiting))):
            name = waiting.popleft()
            row = engine.admit(make_request(name, len(answers[name]), answers[name]), submitted)
            if row.finish_reason is not None:
                finished.append(row)
        # Places that a first token has already freed are taken before anyone's next step.
        finished = finished or engine.step()
        for row in finished:
            name = row.request.prompt_id
            answers[name].append(row.output)
            times = (row.t_submit, row.t_first, *(step.t for step in row.steps))
            _require_forward(*times)
            latest = max(latest, times[-1])
            if len(answers[name]) < turns[name]:
                waiting.appendleft(name)
            yield row


def _require_forward(*times: float) -> None:
    for before, after in pairwise(times):
        if after < before:
            raise UserError(
                f"this machine's monotonic clock went back by {before - after:.6g} s: no time taken "
                "here can be trusted, so run again on another machine, or after restarting this one"
            )
