"""What the decoder says about each finished request: the raw facts that every metric comes from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RequestRecord:
    """One finished request.

    All times are seconds of one monotonic clock, read after the device has finished the step. The
    first output token comes out of the prefill at `t_first`; step j then emits `step_emitted[j]`
    tokens at `step_t[j]`, so `output_tokens == 1 + sum(step_emitted)` and `t_last` is the last step's
    time (or `t_first` when the first token ended the request).

    A step is *cut* when its whole block could not have been emitted: fewer than verified + 1 tokens
    of the budget were left before it, or EOS or a stop string ended the request inside it.
    """

    prompt_id: str
    turn: int  # 0 for the first user message of the prompt
    dataset: str
    run: str
    window: int  # measured window: the requests of one arm that ran together without a break
    prompt_tokens: int
    output_tokens: int
    output_token_ids: list[int]
    finish_reason: str  # "stop" (EOS or stop string) or "length"
    t_submit: float
    t_first: float
    t_last: float
    step_t: list[float] = field(default_factory=list)
    step_emitted: list[int] = field(default_factory=list)
    step_drafted: list[int] = field(default_factory=list)  # draft tokens made; 0 in a baseline step
    step_verified: list[int] = field(default_factory=list)  # of them, given to the target
    step_accepted: list[int] = field(default_factory=list)  # of them, accepted (before any cut)
    step_cut: list[bool] = field(default_factory=list)
    error: str | None = None
    shard: int = 1  # part of the dataset, from 1; each has a device, a clock and windows of its own

    @property
    def request_id(self) -> str:
        """Unique within a run: the prompt's id and the turn."""
        return f"{self.prompt_id}#{self.turn}"
