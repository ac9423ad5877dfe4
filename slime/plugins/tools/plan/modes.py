"""Which is faster on a number of GPUs, the synchronous loop or an asynchronous mode, and how many
GPUs the engines get.

The scheduling is simulated with slime's own code; the speed of engines and trainer is that of the
planner.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from .layouts import divisors, fitting, flags
from .plan import Plan, slots
from .seconds import decode_seconds, prefill_seconds, response_lengths
from .setups import EngineSetup
from .simulation import SYNCHRONOUS, Mode, Run, Setting, simulate

STEPS = 14
FIRST = 2
LAST = 5
"""Simulated steps, and those at the start and at the end that do not count: there, an asynchronous
run fills or drains its pool."""
SAMPLES = 1024
"""Samples of a simulated step. Of a larger one, a share is simulated, with the same share of the
engines.
"""
START_TOGETHER = 1.3e-3
START_ALONE = 2.2e-3
"""Seconds for which the start of a short request keeps the others of its engine waiting, at the
start of a rollout and in a standing pool: 40 tokens at 30k and at 18k tokens/s, in the engine's log
of h200_async_two_gpus."""
ABORT = 1.0
"""Seconds that SGLang 0.5.15 itself waits in a weight sync that interrupts requests
(h200_async_two_gpus).
"""

_POOL = "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async"
WAYS: dict[Mode, tuple[str, ...]] = {
    SYNCHRONOUS: (),
    Mode("one-step", "rollouts", 1, 1): ("--async-buffer-size 1",),
    Mode("fully asynchronous, 2 steps old", interval=1, staleness=2): (
        "--async-buffer-size 4", "--update-weights-interval 1", "--max-weight-staleness 2", _POOL,
    ),
    Mode("fully asynchronous, 5 steps old"): ("--async-buffer-size 4", "--update-weights-interval 2", _POOL),
}  # fmt: skip
"""The modes that are compared, each with its flags."""


@dataclass(frozen=True)
class Way:
    """One mode on one division of the GPUs.

    Attributes:
        step: Simulated seconds of a step, without the first and the last steps.
        busy: Share of this time in which the trainer trains.
        staleness: Largest age of a trained token, in steps.
        share: Share of the samples and engines that was simulated.
    """

    mode: Mode
    plan: Plan
    step: float
    busy: float
    staleness: int
    share: float = 1.0

    @property
    def engine_gpus(self) -> int:
        engine = self.plan.run.engine
        return engine.engines * engine.gpus if engine else 0

    @property
    def program(self) -> str:
        return "train.py" if self.mode is SYNCHRONOUS else "train_async.py"

    @property
    def flags(self) -> list[str]:
        return [*flags(self.plan), *WAYS[self.mode]]


def unmeasured(way: Way) -> list[str]:
    """Say what about a way was never measured: besides its plan's, more than one engine with
    asynchronous training.
    """
    engine = way.plan.run.engine
    found = [what for what in way.plan.extrapolated if not what.startswith("asynchronous step")]
    if way.mode is not SYNCHRONOUS and engine is not None and engine.engines > 1:
        found.append(f"asynchronous training with {engine.engines} engines: measured with one")
    return found


def ways(plan: Plan, gpus: int) -> list[Way]:
    """Simulate the modes on ``gpus`` GPUs, each with the divisions that suit it best; the fastest
    is first.

    Args:
        plan: Of the run whose model, samples and engines are taken. It has both sides.
    """
    # Colocated for the synchronous loop; apart for the others, the best layout of each division of
    # the GPUs.
    plans = fitting(plan.run, gpus)
    together = [made for made in plans if not made.run.asynchronous]
    apart: dict[int, Plan] = {}
    for made in sorted(
        (made for made in plans if made.run.asynchronous), key=lambda made: made.step
    ):
        _, engine = made.run.both
        apart.setdefault(engine.engines * engine.gpus, made)
    found = [simulated(min(together, key=lambda made: made.step), SYNCHRONOUS)] if together else []
    # One-step training is fast where a step of both sides is short, a pool where both are always
    # busy.
    one_step, *pools = [mode for mode in WAYS if mode is not SYNCHRONOUS]
    if apart:
        found.append(simulated(min(apart.values(), key=lambda made: made.step), one_step))
        for made in sorted(apart.values(), key=_busiest)[:2]:
            found += [simulated(made, mode) for mode in pools]
    return sorted(found, key=lambda way: way.step)


def _busiest(plan: Plan) -> float:
    """Seconds of a step if both sides are always busy, which a standing pool approaches."""
    work = plan.run.work
    _, engine = plan.run.both
    _, rate = _curve(plan, engine)[-1]
    return max(work.count * work.response_tokens / rate / engine.engines, _training(plan))


def _training(plan: Plan) -> float:
    return sum(seconds for name, seconds in plan.seconds.items() if name in ("train", "log-probs"))


def _curve(plan: Plan, engine: EngineSetup) -> tuple[tuple[int, float], ...]:
    """The output tokens/s of an engine by the number of running requests, at the mean context."""
    run = plan.run
    most = slots(plan.run, engine)
    context = _context(plan)
    points = sorted({1, *(max(most * part // 4, 1) for part in (1, 2, 3, 4))})
    return tuple((n, n / decode_seconds(run.model, run.kind, engine, n, context)) for n in points)


def _context(plan: Plan) -> float:
    """The mean number of tokens that a running request has: longer responses run for longer."""
    lengths = response_lengths(plan.run.work, 512)
    return plan.run.work.prompt_tokens + sum(n * n for n in lengths) / (2 * sum(lengths))


def setting(plan: Plan, mode: Mode) -> tuple[Setting, float]:
    """Return what is simulated of a plan, and which share of it."""
    run = plan.run
    work = plan.run.work
    _, engine = run.both
    # A large run is simulated in part, with the same samples for each engine.
    parts = max(
        size for size in divisors(engine.engines) if size <= max(ceil(work.count / SAMPLES), 1)
    )
    parts = min(parts, work.prompts)
    least = START_ALONE if mode.ahead == "groups" else START_TOGETHER
    start = least + prefill_seconds(
        run.model, run.kind, engine, work.prompt_tokens / work.samples, work.prompt_tokens
    )
    # After an update of the weights, requests in progress compute their KV cache again.
    context = _context(plan)
    refill = START_TOGETHER + prefill_seconds(run.model, run.kind, engine, context, context)
    moved = sum(
        seconds
        for name, seconds in plan.seconds.items()
        if name in ("weight sync", "wake up and sleep")
    )
    made = Setting(
        engines=max(engine.engines // parts, 1),
        slots=slots(run, engine),
        batch=max(round(work.prompts / parts), 1),
        samples=work.samples,
        steps=STEPS,
        update_seconds=moved + (ABORT if mode.ahead == "groups" else 0.0),
        curve=_curve(plan, engine),
        lengths=tuple(response_lengths(work, 4096)),
        start_seconds=start,
        refill_seconds=refill,
    )
    return made, 1 / parts


def simulated(plan: Plan, mode: Mode, training: float | None = None) -> Way:
    """Simulate one mode of one plan.

    Args:
        training: Seconds of training in a step; None for those of the plan.
    """
    made, share = setting(plan, mode)
    tokens = made.batch * made.samples * sum(made.lengths) / len(made.lengths)
    per_token = (_training(plan) if training is None else training) / tokens
    run = simulate(made, mode, per_token)
    return Way(
        mode, plan, steady(run), per_token * _steady_tokens(run), int(max(run.staleness)), share
    )


def steady(run: Run) -> float:
    """Seconds of a simulated step in the middle of a run."""
    ended = run.ended[FIRST - 1 : -LAST]
    return (ended[-1] - ended[0]) / (len(ended) - 1)


def _steady_tokens(run: Run) -> float:
    """Tokens per second that were trained meanwhile."""
    size = run.setting.batch * run.setting.samples
    trained = run.trained[FIRST * size : (len(run.ended) - LAST) * size]
    return sum(run.lengths[index] for index in trained) / (
        steady(run) * (len(run.ended) - FIRST - LAST)
    )
