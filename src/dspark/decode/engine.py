"""The speculative decoder: continuous batching over slots, one engine for both modes.

A step drafts k tokens for every row, verifies them in one target pass and emits what was accepted
plus one token of the target's. With k = 0 there is nothing to draft and the same step is plain
decoding, so the baseline and the speculative arm share all code but the draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.decode.batch import Batch
from dspark.decode.cache import SlotCache, causal_mask
from dspark.decode.draft import Draft, Worth, check_k, confident_prefix, propose, write_context
from dspark.decode.finite import check_step, likeliest, marked, marked_draft, target_error
from dspark.decode.graphs import Graphs
from dspark.decode.memory import check_slots, slot_bytes
from dspark.decode.pause import Pause
from dspark.decode.sampling import Sampling, draw, draw_uniforms, probabilities, request_generator
from dspark.decode.schedule import StepCurve, schedule
from dspark.decode.static import ALIGNED, StaticSteps
from dspark.decode.verify import accept_greedy, accept_sampled
from dspark.errors import UserError
from dspark.models.attention import Packing
from dspark.models.calibration import apply_temperatures
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target

PREFILL = 512  # prompt tokens of one pass: its attention scores grow with them times the context


@dataclass(frozen=True)
class Request:
    """One turn to be answered."""

    prompt_id: str
    turn: int
    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    eos_ids: frozenset[int] = frozenset()  # empty: EOS is ignored
    stop: tuple[str, ...] = ()


@dataclass
class Step:
    """What one decoding step did to one row."""

    t: float  # seconds, monotonic, after the device finished
    emitted: int
    drafted: int
    verified: int
    accepted: int
    cut: bool  # its whole block could not have been emitted: see RequestRecord


@dataclass(eq=False)
class Row:
    """A request in flight (or just finished)."""

    request: Request
    t_submit: float
    generator: torch.Generator
    output: list[int] = field(default_factory=list)
    t_first: float = 0.0
    steps: list[Step] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def budget(self) -> int:
        return self.request.max_new_tokens - len(self.output)

    @property
    def newest(self) -> int:
        """The last emitted token: the anchor, which the target has not seen yet."""
        return self.output[-1]

    @property
    def start(self) -> int:
        """The anchor's position; the caches hold positions below it."""
        return len(self.request.tokens) + len(self.output) - 1


def calibrated(confidence: Tensor, drafter: DSparkDrafter) -> Tensor:
    """Confidence logits [R, n] with the drafter's calibration."""
    return apply_temperatures(confidence, drafter.temperatures, drafter.shifts)


def _policy(
    drafter: DSparkDrafter | None, threshold: float, curve: StepCurve | None
) -> Worth | None:
    """How many of each row's draft tokens to verify, given their confidences; None for all.

    What it says of a token depends on no later one: that keeps the output the target's.
    """
    if drafter is None or (curve is None and threshold == 0):
        return None

    def decide(confidence: Tensor) -> Tensor:
        logits = calibrated(confidence, drafter)
        if curve is not None:
            return schedule(logits.sigmoid(), curve)
        return confident_prefix(logits, threshold)

    return decide


def _no_lap(_part: str) -> None:
    """Nobody times the parts of a step."""


class Engine:
    """Decodes up to `concurrency` requests at once.

    Args:
        target: the model whose output is wanted.
        drafter: needed when k > 0.
        k: draft tokens a step, 0 for plain decoding.
        concurrency: slots.
        capacity: greatest prompt plus output length of any request.
        confidence_threshold: verify only up to the first draft token less confident than this.
        curve: verify as many draft tokens as pay by this curve (Algorithm 1 of the paper), and, when
            it knows plain steps, draft only while that pays.
        detokenize: ids to text; needed for stop strings.
        trace: called with each draft, before verification (for tests).
        lap: called with the name of each part of the work, when it has been given to the device (for
            profiles). Steps are not static then: the parts of one piece can't be told from each other.
        static: steps of fixed shapes (see `StaticSteps`) instead of no more work than the rows need.
        graphs: what runs these as CUDA graphs, shared by the engines of a job.

    Raises:
        UserError: k is larger than the drafter's block, the context does not hold `capacity`, or the
            device does not hold the caches.
    """

    def __init__(
        self,
        target: Target,
        drafter: DSparkDrafter | None = None,
        *,
        k: int = 0,
        concurrency: int = 1,
        capacity: int,
        confidence_threshold: float = 0.0,
        curve: StepCurve | None = None,
        detokenize: Callable[[list[int]], str] | None = None,
        trace: Callable[[Draft], None] | None = None,
        lap: Callable[[str], None] = _no_lap,
        static: bool = False,
        graphs: Graphs | None = None,
    ) -> None:
        if k and drafter is None:
            raise UserError(f"k is {k} but there is no drafter: give one, or set k to 0")
        if drafter is not None:
            check_k(k, drafter)
        if capacity > target.max_positions:
            raise UserError(
                f"a prompt and its output need {capacity} positions but the target's context is "
                f"{target.max_positions}: shorten the prompts or lower max_new_tokens"
            )
        self.target, self.drafter, self.k = target, drafter if k else None, k
        self.decide = _policy(self.drafter, confidence_threshold, curve)
        self.pause: Pause | None = None
        if self.drafter is not None and curve is not None and curve.plain is not None:
            self.pause = Pause(curve)
        self.detokenize, self.trace, self.lap = detokenize, trace, lap
        block = self.drafter.block_size if self.drafter is not None else 0
        positions = capacity + k + 1 + block
        static = static or graphs is not None
        if static:
            positions = -(-positions // ALIGNED) * ALIGNED
        check_slots(target, slot_bytes(target, self.drafter, positions), concurrency)
        self.slots: list[Row | None] = [None] * concurrency
        self.capacity = capacity
        self.cache = SlotCache(target.num_layers, concurrency, positions)
        self.taps: Sequence[int] = self.drafter.target_layer_ids if self.drafter else ()
        layers = len(self.drafter.layers) if self.drafter else 0
        self.draft_cache = SlotCache(layers, concurrency, positions)
        self.static: StaticSteps | None = None
        if static:
            ahead = max(k + 1, block)
            self.static = StaticSteps(concurrency, k, ahead, positions, target.device, graphs)

    @property
    def active(self) -> int:
        return sum(row is not None for row in self.slots)

    @property
    def free(self) -> int:
        return len(self.slots) - self.active

    def clock(self) -> float:
        """Seconds of a monotonic clock, after the device has finished what it was given."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @torch.inference_mode()
    def admit(self, request: Request, t_submit: float) -> Row:
        """Prefill a request into a free slot and emit its first token.

        Returns:
            its row; the request is over already when finish_reason is set.

        Raises:
            UserError: an empty prompt, one that does not fit the capacity, no tokens wanted, or logits
                that are not finite.
        """
        length = len(request.tokens)
        if length == 0:
            raise UserError(f"prompt '{request.prompt_id}' turn {request.turn} has no tokens")
        if request.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {request.max_new_tokens}: it must be at least 1")
        if length + request.max_new_tokens > self.capacity:
            raise UserError(
                f"prompt '{request.prompt_id}' turn {request.turn} has {length} tokens and may grow "
                f"by {request.max_new_tokens}, but the engine holds {self.capacity} positions: "
                "shorten the prompt or lower max_new_tokens"
            )
        self.lap("host")
        slot = self.slots.index(None)
        device = self.target.device
        tokens = torch.tensor([request.tokens], device=device)
        positions, here = torch.arange(length, device=device)[None], slice(slot, slot + 1)
        for begin in range(0, length, PREFILL):
            end = min(begin + PREFILL, length)
            part = positions[:, begin:end]
            states, taps = self.forward(here, tokens[:, begin:end], part, end)
            if self.drafter is not None and taps is not None:
                write_context(self.drafter, self.draft_cache, here, taps, part)
        row = Row(request, t_submit, request_generator(request.sampling, self._id(request)))
        logits = self.target.logits(states[:, -1:])
        if request.sampling.greedy:
            token = likeliest(logits)
        else:
            uniforms = draw_uniforms([row.generator], 1, device)
            token = draw(probabilities(logits, [request.sampling]), uniforms)
            token = marked(token[0], token.new_zeros(1), logits)
        first = int(token)
        if first < 0:
            raise target_error(self, f"request '{self._id(request)}', its prompt")
        row.t_first = self.clock()
        self.lap("prefill")
        self._emit(row, [first])
        if row.finish_reason is None:
            self.slots[slot] = row
        return row

    @torch.inference_mode()
    def step(self, drafting: bool = True) -> list[Row]:
        """Decode one step of every row in flight; returns the rows that it finished.

        Args:
            drafting: False leaves the draft out of this step, as a pause does.

        Raises:
            UserError: the target's logits or the drafter's states are not finite.
        """
        self._compact()
        rows = [row for row in self.slots if row is not None]
        uniforms = None  # not needed where every row is greedy
        if not all(row.request.sampling.greedy for row in rows):
            generators = [row.generator for row in rows]
            uniforms = draw_uniforms(generators, 2 * self.k + 1, torch.device("cpu"))
        if self.pause is not None and self.pause.skips(len(rows)):
            drafting = False
        if self.static is not None and self.lap is _no_lap:
            outcomes, made = self.static.step(self, rows, uniforms, drafting)
            if all(token >= 0 for *_, token in outcomes):
                return self._record(rows, outcomes, made)
            # A token is marked: once more, as a step that reads nothing stale and can be looked into.
        batch = self._batch(rows, uniforms)
        self.lap("host")
        outcomes, made = self._step(batch, drafting)
        check_step(self, batch, rows, outcomes)
        return self._record(rows, outcomes, made)

    @torch.inference_mode()
    def capture(self, sampling: Sampling) -> None:
        """Where there are graphs, capture those that requests with this sampling can come to need.

        Not while a request is in flight: what is in the slots is overwritten.
        """
        assert self.active == 0, "a capture overwrites what is in the slots"
        if self.static is not None:
            self.static.capture(self, sampling)

    def _batch(self, rows: Sequence[Row], uniforms: Tensor | None) -> Batch:
        device = self.target.device
        return Batch(
            torch.tensor([row.newest for row in rows], device=device),
            torch.tensor([row.start for row in rows], device=device),
            max(row.start for row in rows),
            [row.request.sampling for row in rows],
            None if uniforms is None else uniforms.to(device),
        )

    def _step(self, batch: Batch, drafting: bool) -> tuple[list[list[int]], int]:
        """A step of no more work than its rows need: their outcomes (see `verify`), and n drafted."""
        draft, limits, lengths = self._draft(batch, drafting)
        width = max(lengths)
        drafted = batch.anchors.new_empty(len(lengths), 0)
        if draft is not None:
            drafted = draft.tokens[:, :width]
        packing = None
        if self.target.packs and min(lengths) < width:
            packing = Packing.of([length + 1 for length in lengths], drafted.device)
        outcomes: list[list[int]] = self.verify(batch, draft, drafted, limits, packing).tolist()
        self.lap("accept")
        return outcomes, 0 if draft is None else draft.tokens.shape[1]

    def _draft(self, batch: Batch, drafting: bool) -> tuple[Draft | None, Tensor, list[int]]:
        """A draft, and how many of its tokens to verify of each row: on the device and here."""
        if self.drafter is None or not drafting:
            return None, torch.zeros_like(batch.anchors), [0] * len(batch.sampling)
        # Elsewhere than on a CPU, asking after each token would make the host wait for the device.
        early = self.trace is None and batch.anchors.device.type == "cpu"
        draft = self.propose(batch, self.decide if early else None)
        self.lap("Markov loop")
        return draft, *self.judge(draft)

    def propose(self, batch: Batch, worth: Worth | None = None) -> Draft:
        """Draft k tokens a row, or as many as are `worth` it. Without that the host waits for nothing."""
        assert self.drafter is not None, "k is not 0"
        return propose(
            self.drafter,
            self.draft_cache,
            batch.anchors,
            batch.starts,
            batch.length(self.drafter.block_size) - self.drafter.block_size,
            self.k,
            batch.sampling,
            batch.uniforms,
            worth,
            self.lap,
        )

    def judge(self, draft: Draft) -> tuple[Tensor, list[int]]:
        """How many tokens of a draft to verify of each row: [R] on the device, and here."""
        if self.trace is not None:
            self.trace(draft)
        if self.decide is None:
            limits = draft.tokens.new_full(draft.tokens.shape[:1], self.k)
            return limits, [self.k] * len(limits)
        limits = self.decide(draft.confidence)
        if self.pause is not None and self.drafter is not None:
            self.pause.drafted(calibrated(draft.confidence, self.drafter).sigmoid(), limits)
        lengths: list[int] = limits.tolist()
        self.lap("schedule")
        return limits, lengths

    def verify(
        self,
        batch: Batch,
        draft: Draft | None,
        drafted: Tensor,
        limits: Tensor,
        packing: Packing | None = None,
    ) -> Tensor:
        """Run the target over anchors and `drafted` [R, W], of which `limits` [R] of a row count.

        The host waits for nothing.

        Returns:
            what a step's transfer to the host holds of each row: how many draft tokens were accepted,
            its limit, the draft tokens and the token that follows (marked where something is not
            finite, see `finite`): [R, W + 3] integers.
        """
        accepted, following = self._accept(batch, draft, drafted, limits, packing)
        if draft is not None:
            following = marked_draft(following, draft.hidden)
        return torch.cat([accepted[:, None], limits[:, None], drafted, following[:, None]], dim=1)

    def _accept(
        self,
        batch: Batch,
        draft: Draft | None,
        drafted: Tensor,
        limits: Tensor,
        packing: Packing | None,
    ) -> tuple[Tensor, Tensor]:
        """Accepted counts and next tokens [R]; see `verify`."""
        rows, width = drafted.shape
        positions = batch.starts[:, None] + torch.arange(width + 1, device=drafted.device)
        tokens = torch.cat([batch.anchors[:, None], drafted], dim=1)
        here = slice(0, rows)
        states, taps = self.forward(here, tokens, positions, batch.length(width + 1), packing)
        self.lap("verify: layers")
        if self.drafter is not None and taps is not None:
            owners = None
            if packing is not None:
                positions, owners = packing.pack(positions)[None], packing.owners
            write_context(self.drafter, self.draft_cache, here, taps, positions, owners)
            self.lap("drafter's context")
        logits = self.target.logits(states)
        self.lap("verify: LM head")
        if batch.uniforms is None:
            choice = likeliest(logits)
            choice = choice if packing is None else packing.spread(choice[0])
            return accept_greedy(choice, drafted, limits)
        logits = logits if packing is None else packing.spread(logits[0])
        target_probs = probabilities(logits, batch.sampling)
        draft_probs = target_probs[:, :0]
        if draft is not None and draft.probs is not None:
            draft_probs = draft.probs[:, :width]
        uniforms = batch.uniforms
        tests = torch.cat([uniforms[:, self.k : self.k + width], uniforms[:, -1:]], dim=1)
        accepted, following = accept_sampled(target_probs, draft_probs, drafted, limits, tests)
        return accepted, marked(following, accepted, logits)

    def _record(self, rows: list[Row], outcomes: list[list[int]], drafted: int) -> list[Row]:
        """Emit what the step gave each row and free the places of those that it finished."""
        now = self.clock()
        for row, (count, verified, *proposed, bonus) in zip(rows, outcomes, strict=True):
            budget = row.budget
            emitted = self._emit(row, [*proposed[:count], bonus])
            cut = budget < verified + 1 or emitted < count + 1
            row.steps.append(Step(now, emitted, drafted, verified, count, cut))
        finished = [row for row in rows if row.finish_reason is not None]
        self.slots = [None if row in finished else row for row in self.slots]
        return finished

    def forward(
        self,
        rows: slice,
        tokens: Tensor,
        positions: Tensor,
        length: int,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One target pass of slots `rows` over tokens [R, T]; final states and taps (see Target).

        With a packing the pass holds no token that a shorter row has not, and the states are packed.
        """
        self.latest = (rows, tokens, positions, length, packing)
        masks = {
            kind: causal_mask(positions, length, window)
            for kind, window in self.target.windows.items()
        }
        owners = None
        if packing is not None:
            tokens, positions = packing.pack(tokens)[None], packing.pack(positions)[None]
            owners = packing.owners
        self.cache.select(rows, positions, length, owners)
        return self.target.forward(tokens, positions, self.cache, masks, self.taps, packing)

    def _compact(self) -> None:
        """Move rows down over free slots, so that the active ones are slots 0..n-1."""
        for slot in range(self.active):
            if self.slots[slot] is None:
                last = max(i for i, row in enumerate(self.slots) if row is not None)
                self.cache.move(last, slot)
                self.draft_cache.move(last, slot)
                self.slots[slot], self.slots[last] = self.slots[last], None

    def _emit(self, row: Row, tokens: list[int]) -> int:
        """Append tokens up to EOS, a stop string or the budget; returns how many were emitted."""
        for count, token in enumerate(tokens, start=1):
            row.output.append(token)
            if token in row.request.eos_ids or self._stopped(row):
                row.finish_reason = "stop"
            elif row.budget == 0:
                row.finish_reason = "length"
            if row.finish_reason is not None:
                return count
        return len(tokens)

    def _stopped(self, row: Row) -> bool:
        """Whether the output so far holds a stop string; checked after each token, so the earliest
        one ends the request wherever in a block it is completed."""
        if not row.request.stop:
            return False
        assert self.detokenize is not None, "stop strings need a detokenizer"
        text = self.detokenize(row.output)
        return any(stop in text for stop in row.request.stop)

    @staticmethod
    def _id(request: Request) -> str:
        return f"{request.prompt_id}#{request.turn}"
