"""Continuous batching: the scheduler selects the tokens that the next forward computes.

This file is pure logic without torch, clock or HTTP. A step either extends, which means that it
computes prompts of newly admitted sequences, or it decodes one token for every running sequence.
Sequences are admitted in the order of arrival. A sequence is admitted when its longest possible
length fits, so no sequence has to be evicted later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from slime.plugins.embedded.kv_cache import Move, SlotTable
from slime.plugins.embedded.sequence import FinishReason, Sequence, VersionEvent, aborted
from slime.plugins.http.server import BadRequest

MatchStop = Callable[[Sequence], str | None]
"""Returns the stop string that the end of a sequence's output contains, or None."""


@dataclass(frozen=True)
class Work:
    """The computation of ``tokens[start:end]`` of a sequence in one step.

    Attributes:
        sample: Whether a token is sampled, because ``end`` is the end of the sequence.
        followers: Sequences with the same tokens. They get a copy of the KV and sample from the
            same logits.
    """

    sequence: Sequence
    start: int
    end: int
    sample: bool
    followers: tuple[Sequence, ...] = ()


@dataclass
class Plan:
    """One step: first the moves between slots, in order, then the forward of all works."""

    moves: list[Move]
    works: list[Work]
    decode: bool
    capacity: int
    num_slots: int

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences for which a token is sampled, in the order of the sampler's rows."""
        return [
            seq for work in self.works if work.sample for seq in (work.sequence, *work.followers)
        ]


@dataclass
class SampledToken:
    """The token that was sampled for one sequence in a step, with its log-probs."""

    token: int
    logprob: float
    top: list[tuple[float, int]] = field(default_factory=list)
    chosen: list[tuple[float, int]] = field(default_factory=list)
    nucleus: list[int] = field(default_factory=list)


@dataclass
class Scheduler:
    """All sequences of the engine.

    Args:
        max_running: The most sequences to decode together.
        max_total_tokens: The most tokens of KV cache: the number of slots times their capacity.
        context_len: The longest sequence that the model supports.
        eos_token_ids: Tokens that end a sequence unless it has ``ignore_eos``.
        prefill_tokens: The most prompt tokens of one step.
        score_tokens: The same for one sequence with prompt log-probs, which need logits at each
            position.
        share_prefixes: Whether sequences may share the KV of common prefixes.
        whole_prefixes: Whether a prefix is shared only up to the end of what its slot has; see
            :class:`SlotTable`.
    """

    max_running: int
    max_total_tokens: int
    context_len: int
    eos_token_ids: frozenset[int] = frozenset()
    match_stop: MatchStop = lambda sequence: None
    prefill_tokens: int = 2048
    score_tokens: int = 256
    weight_version: str = "default"
    share_prefixes: bool = True
    whole_prefixes: bool = False

    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)  # the index is the slot
    paused: bool = False
    alone: Sequence | None = None  # if it is set, only this sequence is computed
    arrivals: int = 0
    moves: list[Move] = field(default_factory=list)  # for the next plan
    extended_last: bool = False  # whether the last step extended

    def __post_init__(self) -> None:
        self.table = SlotTable(self.max_running, self.max_total_tokens, self.whole_prefixes)

    # --- coming and going --------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            BadRequest: The prompt is too long for this engine.
        """
        limit = min(self.context_len, self.max_total_tokens)
        if sequence.prompt_len >= limit:
            raise BadRequest(
                f"the prompt has {sequence.prompt_len} tokens, but at most {limit - 1} fit "
                f"(context length {self.context_len}, --max-total-tokens {self.max_total_tokens})"
            )
        sequence.order = self.arrivals
        self.arrivals += 1
        self.waiting.append(sequence)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute: there is no sequence, or all sequences wait for
        other weights.
        """
        return all(self._held(sequence) for sequence in [*self.running, *self.waiting])

    def _held(self, sequence: Sequence) -> bool:
        return self.waits(sequence) or (self.alone is not None and sequence is not self.alone)

    def waits(self, sequence: Sequence) -> bool:
        """Return whether the next token of a sequence must come from weights that are not loaded
        yet.
        """
        planned = sequence.planned_version if sequence.request.weight_version_plan else None
        return planned is not None and planned != self.weight_version

    @property
    def held(self) -> int:
        """The number of sequences that have output tokens and wait for other weights to
        continue.
        """
        return sum(
            sequence.num_output > 0 and self.waits(sequence)
            for sequence in [*self.running, *self.waiting]
        )

    def abort(self, rid: str | None, exact: bool = False) -> list[Sequence]:
        """Abort requests and return their sequences.

        Args:
            rid: Abort the requests whose id starts with this string, as in SGLang. None aborts all
                requests.
            exact: Abort only the request whose id is ``rid``.
        """

        def meant(name: str) -> bool:
            return rid is None or (name == rid if exact else name.startswith(rid))

        doomed = [seq for seq in [*self.running, *self.waiting] if meant(seq.request.rid)]
        for sequence in doomed:
            sequence.finish_reason = aborted("Aborted")
            self.leave(sequence)
        return doomed

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue or from its slot."""
        if sequence.slot < 0:  # it has not been admitted, or has left its slot already
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        # The same placeholder tokens may stand for different images, so KV of prompts with images
        # is never shared.
        shared = sequence.computed if self.share_prefixes and not sequence.has_images else 0
        last = self.running[-1]
        self.moves += self.table.free(sequence.slot, sequence.contents, shared, last.computed)
        # As in the table, the last running sequence moves to the slot that becomes free.
        self.running[sequence.slot] = last
        self.running.pop()
        last.slot = sequence.slot
        sequence.slot = -1

    def pause(self, mode: str) -> list[Sequence]:
        """Pause generation, and return the sequences that this ends.

        ``abort`` ends all sequences, ``retract`` puts running sequences back into the queue, and
        ``in_place`` keeps them in their slots.
        """
        self.paused = True
        if mode == "abort":
            return self.abort(None)
        if mode == "retract":
            # The last slot is freed first, so that no other sequence has to be moved.
            for sequence in reversed(self.running.copy()):
                self.leave(sequence)
                sequence.retractions += 1
                sequence.computed = 0
                self.waiting.append(sequence)
            # Retracted sequences arrived before those that were still waiting, so they are admitted
            # first again.
            self.waiting = deque(sorted(self.waiting, key=lambda seq: seq.order))
        return []

    def resume(self) -> None:
        self.paused = False

    # --- weights -----------------------------------------------------------------------------

    def weights_changed(self, version: str | None) -> None:
        """Mark all KV as computed with old weights, so that it is no longer shared, and set
        ``version`` if given.
        """
        self.table.forget_free()
        if version is not None:
            self.name_version(version)

    def name_version(self, version: str) -> None:
        """Set the weight version of all later tokens."""
        # A version event marks a change between two tokens of a response, so a sequence without
        # output needs none.
        for sequence in [*self.running, *self.waiting]:
            if sequence.num_output:
                sequence.version_events.append(
                    VersionEvent(self.weight_version, sequence.num_output)
                )
        self.weight_version = version

    def flush(self) -> bool:
        """Drop all cached prefixes. Return False and drop nothing while requests run or, unless
        paused, wait.
        """
        if self.running or (self.waiting and not self.paused):
            return False
        self.table.forget_free()
        return True

    def drop_slots(self) -> None:
        """Reset all slots, because the KV cache was freed. No sequence may be running."""
        self.moves.clear()
        self.table = SlotTable(self.max_running, self.max_total_tokens, self.whole_prefixes)

    # --- one step ----------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """Return the next step, or None if generation is paused or there is nothing to compute."""
        if self.paused:
            return None
        self._admit()
        running = [seq for seq in self.running if not self._held(seq)]
        # A sequence can be decoded if all its tokens except the last have KV. After a retraction
        # the KV of output tokens is missing, so the sequence is extended again.
        decodable = [
            seq for seq in running if seq.computed == len(seq.tokens) - 1 >= seq.prompt_len
        ]
        extending = (
            [seq for seq in running if seq not in decodable]
            if len(decodable) < len(running)
            else []
        )
        if not running:
            return None
        # New prompts come first, so that they join the batch of the next decode step. Prompts that
        # need several steps alternate with decode steps; otherwise a stream of long prompts would
        # block all running responses.
        decode = not extending or (self.extended_last and bool(decodable) and self._long(extending))
        self.extended_last = not decode
        if decode:
            works = [Work(seq, seq.computed, len(seq.tokens), True) for seq in decodable]
        else:
            works = self._extend(extending)
        # Moves are collected between steps. The runner executes them before the forward, and
        # nothing else does.
        moves = self.moves
        self.moves = []
        return Plan(moves, works, decode, self.table.capacity, len(self.table.slots))

    def _long(self, extending: list[Sequence]) -> bool:
        """Return whether the prompts need several steps."""
        return sum(len(seq.tokens) - seq.computed for seq in extending) > self.prefill_tokens

    def _admit(self) -> None:
        while (
            sequence := next((seq for seq in self.waiting if not self._held(seq)), None)
        ) is not None:
            # Reserve memory for the longest response that the request allows. The alternative, to
            # admit more sequences and to retract some when memory runs out, would compute prompts
            # and responses twice.
            reserve = min(sequence.reserve(self.context_len), self.max_total_tokens)
            if not self.table.fits(reserve):
                # later requests must not overtake it; otherwise a long request might wait forever
                return
            self.waiting.remove(sequence)
            self.table.make_room(reserve)
            tokens = sequence.contents
            # A shared prefix must end before the first position whose logits are needed, because
            # logits are not cached. These are the logits of the last token and those for prompt
            # log-probs.
            limit = min(len(tokens) - 1, sequence.score_from) if self.share_prefixes else 0
            if sequence.has_images:
                tokens = tokens[:0]
                limit = 0
            sequence.slot, sequence.computed, moves = self.table.allocate(tokens, limit)
            self.moves += moves
            sequence.cached_tokens = max(
                sequence.cached_tokens, min(sequence.computed, sequence.prompt_len)
            )
            self.running.append(sequence)

    def _extend(self, extending: list[Sequence]) -> list[Work]:
        """Return works for prompts up to the budget. Sequences with the same tokens become
        followers of the first.
        """
        works: list[Work] = []
        budget = self.prefill_tokens
        leaders: dict[tuple[int, ...], int] = {}
        for sequence in extending:
            key = sequence.adapter_key, *sequence.tokens
            plain = (
                self.share_prefixes
                and not sequence.wants_input_logprobs
                and not sequence.has_images
            )
            # The samples of a group have the same prompt. It is computed once. The followers copy
            # its KV and sample from the same logits, each with its own seed.
            if plain and key in leaders:
                index = leaders[key]
                work = works[index]
                works[index] = Work(
                    work.sequence, work.start, work.end, True, (*work.followers, sequence)
                )
                continue
            if budget <= 0:
                # not break: a later sequence may still become a follower, which costs nothing
                continue
            chunk = min(budget, self.score_tokens if sequence.wants_input_logprobs else budget)
            if sequence.has_images:
                chunk = len(sequence.tokens)  # the placeholders of an image cannot be divided
            end = min(sequence.computed + chunk, len(sequence.tokens))
            budget -= end - sequence.computed
            done = end == len(sequence.tokens)
            works.append(Work(sequence, sequence.computed, end, done))
            # What a pause in place has kept of the prompt is KV of old weights, which no other
            # sequence may get.
            if plain and done and not (sequence.computed and self.table.slots[sequence.slot].stale):
                leaders[key] = len(works) - 1
        return works

    def commit(self, plan: Plan, tokens: list[SampledToken]) -> list[Sequence]:
        """Append the sampled tokens, and return the sequences that finished, which have left their
        slots.
        """
        for work in plan.works:
            work.sequence.computed = work.end
            for follower in work.followers:
                follower.computed = work.end
                follower.cached_tokens = max(
                    follower.cached_tokens, min(work.end, follower.prompt_len)
                )
            for sequence in (work.sequence, *work.followers):
                if not plan.decode:
                    self.table.note_computed(sequence.slot, sequence.computed)
        finished = []
        for sequence, sampled in zip(plan.sampled, tokens, strict=True):
            if sequence.request.params.max_new_tokens > 0:
                self._append(sequence, sampled)
            self._check_finish(sequence)
            if sequence.finish_reason is not None:
                finished.append(sequence)
        for sequence in finished:
            self.leave(sequence)
        return finished

    def _append(self, sequence: Sequence, sampled: SampledToken) -> None:
        sequence.tokens.append(sampled.token)
        sequence.output_logprobs.append(sampled.logprob)
        if sequence.request.top_logprobs_num:
            sequence.output_top.append(sampled.top)
        if sequence.request.token_ids_logprob:
            sequence.output_chosen.append(sampled.chosen)
        if sequence.request.return_top_p_token_ids:
            sequence.output_nuclei.append(sampled.nucleus)

    def _check_finish(self, sequence: Sequence) -> None:
        """Set the finish reason, if any. In SGLang's order: stop string, stop token, length."""
        params = sequence.request.params
        token = sequence.tokens[-1]
        count = sequence.num_output
        stops: FinishReason | None = None
        if count and params.stop and (matched := self.match_stop(sequence)) is not None:
            stops = {"type": "stop", "matched": matched}
        elif (
            count
            and not params.ignore_eos
            and (token in self.eos_token_ids or token in params.stop_token_ids)
        ):
            stops = {"type": "stop", "matched": token}
        elif count >= params.max_new_tokens or len(sequence.tokens) >= min(
            self.context_len, self.max_total_tokens
        ):
            stops = {"type": "length", "length": count}
        sequence.finish_reason = stops
