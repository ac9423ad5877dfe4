"""Engines and a clock for ``simulation.py``: what schedules is real, only what it waits for is not.

:class:`SimulatedLoop` is asyncio's event loop with a clock that jumps to the next thing that is
due, so hours of generation pass in the CPU time of the code that schedules them. :class:`Engines`
decode under a measured speed curve.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.data.sample import Sample

H200_CURVE = ((1, 271.0), (64, 9690.0), (256, 15660.0))
"""Output tokens/s of one H200 by the number of running requests: Qwen3-4B shape, bf16, SGLang
0.5.15, 256 tokens in.
"""


class _JumpingSelector(selectors.SelectSelector):
    """Waits for nothing: the clock goes on at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError(
                "the schedule is stuck: nothing is in progress, so nothing will ever happen"
            )
        self.now += max(timeout, 0.0)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose ``time()`` is simulated seconds since its start. Threads and sockets
    would never be heard.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        self.fleet: Fleet | None = None
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class SpeedCurve:
    """Seconds of one decode step by the number of running requests, linear between the measured
    points.
    """

    def __init__(self, points: Sequence[tuple[int, float]] = H200_CURVE) -> None:
        # Seconds and not rates are interpolated, because they are nearly linear in the number of
        # requests.
        running, rate = np.array(points, dtype=np.float64).T
        self.most = int(running[-1])
        self._seconds: list[float] = np.interp(
            np.arange(self.most + 1), running, running / rate
        ).tolist()

    def step_seconds(self, running: int) -> float:
        """Raises IndexError beyond what was measured."""
        return self._seconds[running]

    def rate(self, running: int) -> float:
        """Output tokens/s."""
        return running / self.step_seconds(running)


class _Engine:
    """Requests that share the steps of one engine: a token each per step."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps = 0.0  # done until ``since``
        self.since = 0.0
        # a heap by the step that ends each
        self.running: list[tuple[float, int, asyncio.Future[None]]] = []
        self.plan = 0  # its newest in Engines._due


class Engines:
    """A fleet behind a router that gives each request to an engine with the fewest.

    Args:
        start_seconds: For so long the start of a request keeps its engine from decoding.
    """

    def __init__(self, count: int, curve: SpeedCurve, start_seconds: float = 0.0) -> None:
        self.loop = asyncio.get_running_loop()
        self.curve = curve
        self.start_seconds = start_seconds
        self.engines = [_Engine(number) for number in range(count)]
        self.paused = False
        self._requests = 0
        self._least = [(0, number) for number in range(count)]  # a heap; entries may be out of date
        self._due: list[tuple[float, int, _Engine]] = []  # likewise: when, which plan, whose
        self._plans = 0
        # one for all: asyncio's cost more the more there are
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, tokens: int) -> None:
        """Until ``tokens`` are decoded."""
        await self.begin(tokens)

    def begin(self, tokens: int) -> asyncio.Future[None]:
        """Send a request, and return the future of its end."""
        engine = self._choose()
        self._catch_up(engine)
        engine.since = max(engine.since, self.loop.time()) + self.start_seconds
        done = self.loop.create_future()
        self._requests += 1
        heapq.heappush(engine.running, (engine.steps + tokens, self._requests, done))
        self._changed(engine)
        return done

    async def pause(self, seconds: float, refill_seconds: float = 0.0) -> None:
        """Let all stand still, as they do while they get new weights; then every request goes on.

        Args:
            refill_seconds: For each of its running requests, an engine computes the KV cache again
                for so long.
        """
        # What was decoded until now counts, then nothing goes on.
        for engine in self.engines:
            self._catch_up(engine)
        self.paused = True
        for engine in self.engines:
            self._plan(engine)
        await asyncio.sleep(seconds)
        self.paused = False
        for engine in self.engines:
            engine.since = self.loop.time() + refill_seconds * len(engine.running)
            self._plan(engine)

    def _choose(self) -> _Engine:
        # Entries of the heap that are out of date are dropped when they come to the top.
        while True:
            running, number = self._least[0]
            if running == len(self.engines[number].running):
                return self.engines[number]
            heapq.heappop(self._least)

    def _catch_up(self, engine: _Engine) -> None:
        now = self.loop.time()
        if now < engine.since:  # requests start, and nothing is decoded
            return
        if engine.running and not self.paused:
            engine.steps += (now - engine.since) / self.curve.step_seconds(len(engine.running))
        engine.since = now

    def _changed(self, engine: _Engine) -> None:
        heapq.heappush(self._least, (len(engine.running), engine.number))
        self._plan(engine)

    def _plan(self, engine: _Engine) -> None:
        """Note when the next of its requests ends."""
        self._plans += 1
        engine.plan = self._plans
        if engine.running and not self.paused:
            steps = max(engine.running[0][0] - engine.steps, 0.0)
            seconds = steps * self.curve.step_seconds(len(engine.running))
            heapq.heappush(
                self._due, (max(engine.since, self.loop.time()) + seconds, engine.plan, engine)
            )
        self._set_timer()

    def _set_timer(self) -> None:
        while self._due and self._due[0][1] != self._due[0][2].plan:
            heapq.heappop(self._due)
        if self._timer is not None:
            if self._due and self._due[0][0] == self._timer.when():
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(self._due[0][0], self._end) if self._due else None

    def _end(self) -> None:
        """End the requests of the engine that is due."""
        self._timer = None
        engine = heapq.heappop(self._due)[2]
        self._catch_up(engine)
        while engine.running and engine.running[0][0] <= engine.steps + 1e-6:
            done = heapq.heappop(engine.running)[2]
            if not done.done():
                done.set_result(None)
        self._changed(engine)


@dataclass
class Fleet:
    """What the functions of a run find in its :class:`SimulatedLoop`.

    Attributes:
        lengths: Tokens by the index of a sample.
        held_step: How many steps had trained the weights that the engines hold.
        divided: Number of responses that a weight update went through.
    """

    engines: Engines
    lengths: list[int]
    held_step: int = 0
    divided: int = 0


async def generate(args: Args, sample: Sample, sampling_params: dict[str, object]) -> Sample:
    """The generate function of a simulated run (``--custom-generate-function-path``)."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop) and loop.fleet is not None
    fleet = loop.fleet
    assert sample.index is not None
    length = fleet.lengths[sample.index]
    step = fleet.held_step
    sample.weight_versions.append(f"0.{step}")
    sample.version_spans.append((f"0.{step}", 0, length))  # of its oldest token
    await fleet.engines.generate(length)
    fleet.divided += fleet.held_step != step
    sample.response = "-"
    sample.response_length = length
    tokens: Any = range(length)  # as long as the answer, and no memory for each
    sample.tokens = tokens
    sample.status = sample.Status.COMPLETED
    return sample
