"""slime's own scheduling on a simulated clock: what asynchronous training gains, for any engines
and lengths.

Rollout loop, standing pool, admission, data source and rewards are those of a run. Engines decode
under a speed curve (``simulated_engines.py``), and the trainer needs a constant time per token.
What ``train_async.py`` and :class:`slime.cluster.prefetch.Prefetcher` do with a thread and Ray is
done here with tasks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.config.args import Args
from slime.data.sample import Sample, flatten
from slime.data.source import RolloutDataSourceWithBuffer
from slime.data.staleness import sample_staleness
from slime.rollout.admission import Admission
from slime.rollout.fully_async_rollout import StandingPool
from slime.rollout.loop import RolloutLoop

from .simulated_engines import H200_CURVE, Engines, Fleet, SimulatedLoop, SpeedCurve


@dataclass(frozen=True)
class Setting:
    """What all modes have in common.

    Attributes:
        slots: Requests that may run on an engine at once.
        batch, samples: Groups per step, and samples of a group.
        lengths: Tokens of responses, of which each sample draws one.
        curve: Output tokens/s of an engine by the number of running requests.
        start_seconds: Time for which the start of a request keeps the other requests of its engine
            waiting.
        refill_seconds: The same, for each running request after a weight update.
    """

    engines: int = 4
    slots: int = 64
    batch: int = 64
    samples: int = 8
    steps: int = 16
    lengths: tuple[int, ...] = (1024,)
    update_seconds: float = 0.1
    seed: int = 1
    curve: tuple[tuple[int, float], ...] = H200_CURVE
    start_seconds: float = 0.0
    refill_seconds: float = 0.0

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def draw(self, count: int) -> list[int]:
        """Return the tokens of ``count`` samples, the same for all modes."""
        return [
            int(length) for length in np.random.default_rng(self.seed).choice(self.lengths, count)
        ]


@dataclass(frozen=True)
class Mode:
    """How generation and training overlap.

    Attributes:
        ahead: What is generated ahead of training: ``nothing``, ``rollouts`` (one by one), or
            ``groups`` (of a pool).
        buffer: ``--async-buffer-size``.
        interval: ``--update-weights-interval``.
        staleness: ``--max-weight-staleness``.
        drains: ``--update-weight-pause-mode drain``.
    """

    name: str
    ahead: str = "groups"
    buffer: int = 4
    interval: int = 2
    staleness: int | None = None
    drains: bool = False


SYNCHRONOUS = Mode("synchronous", "nothing", 0, 1)


class Prompts:
    """A data set without end."""

    def __len__(self) -> int:
        return 1 << 40

    def shuffle(self, epoch_id: int) -> None:
        """They are all the same."""

    def __getitem__(self, place: int) -> Sample:
        return Sample(prompt="", label="")


class Run:
    """One mode in one setting, on a :class:`SimulatedLoop`.

    Args:
        train_seconds: Per token.

    Attributes:
        asked, trained: Indices of samples, in their order.
        staleness: Of each step, the largest.
        generating: Seconds of the synchronous loop's rollouts.
        ended: When each step had trained, in seconds since the start.
    """

    def __init__(self, setting: Setting, mode: Mode, train_seconds: float) -> None:
        self.setting = setting
        self.mode = mode
        self.train_seconds = train_seconds
        settings: dict[str, Any] = dict(
            rollout_batch_size=setting.batch,
            n_samples_per_prompt=setting.samples,
            rollout_num_gpus=setting.engines,
            rollout_num_gpus_per_engine=1,
            sglang_server_concurrency=setting.slots,
            rollout_max_response_len=setting.longest,
            async_buffer_size=mode.buffer,
            update_weights_interval=mode.interval,
            max_weight_staleness=mode.staleness,
            custom_generate_function_path="slime.plugins.tools.plan.simulated_engines.generate",
            rm_type="random",
            phase_timeout=1e7,  # simulated
        )
        # The functions of a run find the engines and the lengths in the loop, since a run knows
        # them only by name.
        self.engines = Engines(setting.engines, SpeedCurve(setting.curve), setting.start_seconds)
        samples = (setting.steps + mode.buffer + 2) * setting.batch * setting.samples
        self.lengths = setting.draw(samples * 3 // 2)
        self.args: Any = Args(**settings)
        self.fleet = Fleet(self.engines, self.lengths)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        loop.fleet = self.fleet
        self.source = RolloutDataSourceWithBuffer(self.args, Prompts())
        self.now = loop.time
        self.trained: list[int] = []
        self.staleness: list[int] = []
        self.generating = 0.0
        self.ended: list[float] = []

    @property
    def asked(self) -> list[int]:
        return list(range(self.source.sample_index))

    async def go(self) -> None:
        if self.mode.ahead == "nothing":
            await self._in_turn()
        elif self.mode.ahead == "rollouts":
            await self._ahead(self._rollout)
        else:
            # A standing pool is opened once and advances with the trainer.
            pool = StandingPool(self.args, self.source, 0, self.setting.steps)
            await pool.advance(0)
            await self._ahead(pool.take, pool)
            await pool.close()

    async def _rollout(self, step: int) -> Any:
        return await RolloutLoop(self.args, step, self.source).run()

    async def _in_turn(self) -> None:
        for step in range(self.setting.steps):
            started = self.now()
            output = await self._rollout(step)
            self.generating += self.now() - started
            await self._train(step, output.samples)
            await self._update(step)

    async def _train(self, step: int, groups: list[Any]) -> None:
        samples: list[Any] = flatten(groups)
        ages: list[Any] = [sample_staleness(sample, step) for sample in samples]
        self.trained += [sample.index for sample in samples]
        self.staleness.append(max(ages))
        await asyncio.sleep(self.train_seconds * sum(sample.response_length for sample in samples))
        self.ended.append(self.now())

    async def _update(self, step: int) -> None:
        await self.engines.pause(self.setting.update_seconds, self.setting.refill_seconds)
        self.fleet.held_step = step + 1

    async def _ahead(
        self, generate: Callable[[int], Awaitable[Any]], pool: StandingPool | None = None
    ) -> None:
        admission = Admission(1, self.mode.buffer, self.mode.interval, self.mode.staleness)
        changed = asyncio.Condition()
        finished: deque[Any] = deque()
        generating = holding = False

        # The side of generation: as far ahead of training as the admission allows.
        async def work() -> None:
            nonlocal generating
            for step in range(self.setting.steps):
                async with changed:
                    await changed.wait_for(lambda: admission.room() > 0 and not holding)
                    admission.admit()
                    generating = True
                output = await generate(step)
                async with changed:
                    generating = False
                    finished.append(output)
                    changed.notify_all()

        # The side of training, which updates the weights of the engines every few steps.
        worker = asyncio.create_task(work())
        for step in range(self.setting.steps):
            async with changed:
                await changed.wait_for(lambda: finished)
                output = finished.popleft()
                admission.taken()
            if pool is not None:
                await pool.advance(self.fleet.held_step, taken=True)
            await self._train(step, output.samples)
            async with changed:
                if (step + 1) % self.mode.interval == 0:
                    # Without a pool, weights are updated between two rollouts.
                    if pool is None:
                        holding = True
                        await changed.wait_for(lambda: not generating)
                    elif self.mode.drains:
                        await pool.drain()
                    await self._update(step)
                holding = False
                admission.version_changed(self.fleet.held_step)
                admission.trained()
                changed.notify_all()
            if pool is not None:
                await pool.advance(self.fleet.held_step, trained=True)
        await worker


def simulate(
    setting: Setting, mode: Mode, train_seconds: float = 0.0, kind: type[Run] = Run
) -> Run:
    """Run it to its end, on a clock of its own."""
    loop = SimulatedLoop()

    async def go() -> Run:
        run = kind(setting, mode, train_seconds)
        await run.go()
        return run

    try:
        return loop.run_until_complete(go())
    finally:
        loop.close()
