"""The thread that runs the model: it executes commands between steps, computes steps, and reports
the results.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import torch

from slime.plugins.embedded.protocol import GenerateRequest, SamplingParams
from slime.plugins.embedded.runner import Logits, Runner
from slime.plugins.embedded.sampling import sample_tokens, score_prompt
from slime.plugins.embedded.scheduler import Plan, SampledToken, Scheduler
from slime.plugins.embedded.sequence import Sequence, aborted
from slime.plugins.embedded.served import Listener, TooManyRequests, WeightError
from slime.plugins.embedded.weights import Memory, Weights

logger = logging.getLogger(__name__)
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

IDLE_SECONDS = 0.5
HALF_WRITTEN = "half-written"
"""The weight version after an update that failed before it had written all tensors."""
MAX_WAITING = 65536  # requests
# after so many failed steps that no single sequence causes again, the engine stops
MAX_UNEXPLAINED = 3


class Engine:
    """Everything between the HTTP routes and the model. See the section comments for the thread of
    each method.

    Attributes:
        halted: The reasons for which no step is computed although generation is not paused: an open
            weight update, a weight update that failed, or released memory.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, weights: Weights, default_seed: int | None
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.weights = weights
        self.memory = Memory(runner)
        # for requests without a seed; with None each of them gets a different seed
        self.default_seed = default_seed
        self.halted: set[str] = set()
        self.last_step = time.monotonic()
        self.failure: BaseException | None = None
        self._unexplained = 0  # consecutive failed steps without a sequence that failed again alone
        # sequences of a failed step, to compute alone and before all others
        self._suspects: list[Sequence] = []
        # the first suspect: a short sequence that is known to be good
        self._probe: Sequence | None = None
        self._blamed = False  # whether one of the suspects failed again alone
        self._seeds = threading.Lock()
        self._next_seed = time.time_ns() & (2**62 - 1)
        self._listeners: dict[Sequence, Listener] = {}
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    # --- from the event loop -------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    @property
    def resting(self) -> bool:
        """Whether steps are suspended intentionally."""
        return self.scheduler.paused or bool(self.halted)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def stop(self) -> None:
        """End the thread after the current step."""
        self.inbox.put(None)
        self._thread.join(timeout=30)

    async def call(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Run ``function`` on the model thread between two steps and return its result.

        Raises:
            RuntimeError: The model thread has ended.
        """
        assert self._loop is not None
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                if self.failure is not None:
                    raise RuntimeError(f"the engine thread has ended: {self.failure!r}")
                result = function(*arguments)
            # an exception in a command must not end the model thread
            except BaseException as error:
                self._post(_fail, future, error)
            else:
                self._post(_succeed, future, result)

        self.inbox.put(run)
        # The thread sets ``failure`` before it empties the inbox for the last time. If it is set
        # here, the put may have come too late for that. So the command also runs here, where it
        # fails; the future keeps the first result.
        if self.failure is not None:
            run()
        return await future

    async def submit(self, request: GenerateRequest, listener: Listener) -> Sequence:
        """Queue a request. ``listener`` is called on the event loop when the request makes
        progress.

        Raises:
            BadRequest: The prompt is too long for this engine, or the adapter that it names is not
                loaded.
            TooManyRequests: The queue is full.
        """
        if len(self.scheduler.waiting) >= MAX_WAITING:
            raise TooManyRequests(f"the queue is full: {MAX_WAITING} requests are waiting")
        sequence = Sequence(request, 0, self._seed(request))

        def add() -> None:
            sequence.adapter_key = self.runner.adapters.key(request.lora_path)
            self.scheduler.add(sequence)
            self._listeners[sequence] = listener

        await self.call(add)
        return sequence

    def _seed(self, request: GenerateRequest) -> int:
        if request.params.sampling_seed is not None:
            return request.params.sampling_seed
        if self.default_seed is not None:
            return self.default_seed
        with self._seeds:
            self._next_seed += 1
            return self._next_seed

    # --- on the model thread, as arguments of call() -------------------------------------------

    def abort(self, rid: str | None, exact: bool = False) -> None:
        self._finish(self.scheduler.abort(rid, exact))

    def pause(self, mode: str) -> None:
        self._finish(self.scheduler.pause(mode))

    def change_weights(self, write: Callable[[], T], version: str | None) -> T:
        """Run ``write``, which changes weights, and update the weight version and the caches.

        If ``write`` fails after it has written some tensors, the weights belong to no version, and
        nothing is computed until updates have written all tensors. In every case, KV of the old
        weights is no longer shared.
        """
        named = None
        # The version changes only after all tensors are written, so tokens sampled before keep the
        # old version.
        try:
            result = write()
            named = version if version != self.scheduler.weight_version else None
        finally:
            broken = bool(self.weights.stale)
            self._halt(HALF_WRITTEN, broken)
            self.runner.weights_changed()
            self.scheduler.weights_changed(HALF_WRITTEN if broken else named)
        return result

    def rename_version(self, version: str) -> None:
        """Change the version of the weights without changing the weights.

        Raises:
            WeightError: The last update failed, so the weights belong to no version.
        """
        if self.weights.stale:
            raise WeightError(
                f"the last update did not write {len(self.weights.stale)} tensors: repeat it first"
            )
        if version != self.scheduler.weight_version:
            self.scheduler.name_version(version)

    def release(self, tags: list[str]) -> None:
        """Release memory. If the KV cache is released, running requests are queued and computed
        again after resume.
        """
        if "kv_cache" in tags:
            self._retract_all()
        self.memory.release(tags)
        self._halt("memory", bool(self.memory.released))

    def _retract_all(self) -> None:
        """Put all running sequences back into the queue, and forget the contents of all slots."""
        paused = self.scheduler.paused
        self.scheduler.pause("retract")
        self.scheduler.paused = paused
        self.scheduler.drop_slots()

    def forget_computed(self) -> None:
        """Drop the KV cache, because the model computes differently from now on. Running requests
        are queued again.
        """
        self._retract_all()
        self.runner.cache.clear()

    def resume(self, tags: list[str]) -> None:
        self.memory.resume(tags)
        self._halt("memory", bool(self.memory.released))

    def _halt(self, reason: str, on: bool) -> None:
        (self.halted.add if on else self.halted.discard)(reason)

    def begin_update(self) -> bool:
        """Open a weight update. Nothing is computed until it ends. Return False if an update is
        open already.
        """
        if "update" in self.halted:
            return False
        self.halted.add("update")
        return True

    def end_update(self) -> bool:
        opened = "update" in self.halted
        self.halted.discard("update")
        return opened

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_commands(block=not self._step()):
                pass
        except BaseException as error:
            logger.exception("the engine thread failed")
            self.failure = error
            # each of them fails now; otherwise its caller would wait forever
            self._take_commands(block=False)
            for sequence in list(self._listeners):
                sequence.finish_reason = aborted(repr(error), 500)
                self._finish([sequence])
            raise

    def _take_commands(self, block: bool) -> bool:
        """Run the commands in the inbox; with ``block``, wait for the first. Return False if the
        thread must end.
        """
        while True:
            try:
                command = self.inbox.get(block, IDLE_SECONDS if block else None)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            block = False

    def _step(self) -> bool:
        """Compute one step, and return whether there was anything to compute."""
        self._next_suspect()
        plan = None if self.halted else self.scheduler.plan()
        if plan is None:
            return False
        try:
            sampled = self.compute(plan)
            finished = self.scheduler.commit(plan, sampled)
        except Exception as error:
            self._isolate(plan, error)
            return True
        self.last_step = time.monotonic()
        for sequence in plan.sampled:
            if sequence.request.stream and sequence.finish_reason is None:
                self._tell(sequence)
        self._finish(finished)
        self._clear(plan.sampled)
        return True

    # --- when a step fails ---------------------------------------------------------------------

    def _isolate(self, plan: Plan, error: Exception) -> None:
        """Handle a failed step: find the sequence that caused the failure, and abort only this
        sequence.

        The KV cache is emptied and all sequences are computed again: first a probe that is known to
        be good, then each sequence of the plan alone. The same tokens are sampled again, because
        sampling depends only on seed and position.

        Raises:
            Exception: The engine itself has failed: the probe failed as well, or
                :data:`MAX_UNEXPLAINED` consecutive failures could not be repeated with any single
                sequence.
        """
        involved = [seq for work in plan.works for seq in (work.sequence, *work.followers)]
        alone = self.scheduler.alone
        if involved[0] is self._probe or (alone is None and self._unexplained >= MAX_UNEXPLAINED):
            raise error
        logger.exception("a step with %d sequences failed", len(involved))
        if alone is None:
            self._blamed = False
            self._suspects = involved
        elif alone.finish_reason is None:
            self._blamed = True
            alone.finish_reason = aborted(
                f"computing this request failed: {type(error).__name__}: {error}", 500
            )
        # If the commit failed halfway, some sequences have a finish reason but still hold their
        # slots.
        done = [seq for seq in involved if seq.finish_reason is not None]
        for sequence in done:
            self.scheduler.leave(sequence)
        self._finish(done)
        self._retract_all()
        self.runner.cache.clear()
        request = GenerateRequest(
            "probe", [0], SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        )
        self._probe = Sequence(request, -1, 0)
        self.scheduler.waiting.appendleft(self._probe)
        self._suspects.insert(0, self._probe)
        self.scheduler.alone = None

    def _next_suspect(self) -> None:
        """Choose the sequence that the next steps compute alone, or none after all suspects got a
        token.
        """
        scheduler = self.scheduler
        while True:
            alone = scheduler.alone
            if alone is not None and alone.finish_reason is None and not scheduler.waits(alone):
                return
            scheduler.alone = self._suspects.pop(0) if self._suspects else None
            if scheduler.alone is None:
                return

    def _clear(self, sampled: list[Sequence]) -> None:
        """After a successful step, clear the suspect that got a token in it."""
        if self.scheduler.alone is None:
            self._unexplained = 0
        elif self.scheduler.alone in sampled:
            self.scheduler.alone = None
            if not self._suspects and not self._blamed:
                self._unexplained += 1

    def compute(self, plan: Plan) -> list[SampledToken]:
        """Return the sampled tokens of a plan, in the order of its works, each with its followers
        right after it.
        """
        rows: dict[int, torch.Tensor] = {}  # the logits to sample from, by index of the work
        for logits in self.runner.run(plan):
            if plan.decode and len(logits.owners) == len(plan.works):
                # All rows are wanted and in order: sample without a copy of the logits.
                return self._sample(logits.values, plan)
            self._score(plan, logits)
            for row, (owner, position) in enumerate(
                zip(logits.owners, logits.positions, strict=True)
            ):
                if plan.works[owner].sample and position == plan.works[owner].end - 1:
                    rows[owner] = logits.values[row]
        picked = [
            rows[i]
            for i, work in enumerate(plan.works)
            if work.sample
            for _ in (0, *work.followers)
        ]
        if not picked:
            return []
        return self._sample(self.runner.stack(picked), plan)

    def _sample(self, logits: torch.Tensor, plan: Plan) -> list[SampledToken]:
        ends = self.scheduler.eos_token_ids
        return sample_tokens(logits, plan.sampled, ends, self.runner.kernels)

    def _score(self, plan: Plan, logits: Logits) -> None:
        """Compute the prompt log-probs of the sequences whose requests ask for them."""
        for owner, work in enumerate(plan.works):
            sequence = work.sequence
            if not sequence.wants_input_logprobs:
                continue
            mine = [
                (row, position)
                for row, (o, position) in enumerate(
                    zip(logits.owners, logits.positions, strict=True)
                )
                if o == owner and sequence.score_from <= position < sequence.prompt_len - 1
            ]
            if mine:
                score_prompt(
                    logits.values[[row for row, _ in mine]],
                    sequence,
                    [position for _, position in mine],
                    self.runner.kernels,
                )

    # --- results -------------------------------------------------------------------------------

    def _finish(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._tell(sequence)
            self._listeners.pop(sequence, None)

    def _tell(self, sequence: Sequence) -> None:
        listener = self._listeners.get(sequence)
        if listener is not None:
            version = self.scheduler.weight_version
            self._post(listener, sequence, sequence.num_output, sequence.finish_reason, version)

    def _post(self, function: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # the caller may have cancelled it
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if future.done():  # the caller cancelled it, or call() has already set this failure
        return
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
        return
    # A future does not accept StopIteration, and SystemExit or KeyboardInterrupt would end the
    # event loop.
    failed = RuntimeError(f"{type(error).__name__}: {error}")
    failed.__cause__ = error
    future.set_exception(failed)
