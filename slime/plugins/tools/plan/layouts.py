"""All legal layouts of a run on a number of GPUs, and the order of their steps; which is faster, the
synchronous loop or an asynchronous mode, and how many GPUs the engines get.

The scheduling of a mode is simulated with slime's own code; the speed of engines and trainer is that
of the planner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log

from slime.config.layout import ParallelLayout

from .plan import Plan, Run, make_plan, slots
from .seconds import decode_seconds, prefill_seconds, response_lengths
from .setups import EngineSetup
from .simulation import SYNCHRONOUS, Mode, Setting, simulate
from .simulation import Run as Simulated


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def layouts(
    run: Run, gpus: int, backends: tuple[str, ...] = ("fsdp", "megatron")
) -> Iterator[tuple[str, ParallelLayout]]:
    """List the training layouts that ``gpus`` GPUs and the model allow.

    Tensor parallelism stays within a node and divides the heads; pipeline stages have equal numbers
    of layers; context parallelism is at most 8; expert parallelism divides the experts. The samples
    of an optimizer step are divisible among the data-parallel ranks.
    """
    shape = run.model.shape
    samples = run.work.count // run.work.steps
    nodes = run.place.gpus_per_node
    # FSDP is divided over data and context alone.
    for cp in (size for size in divisors(gpus) if size <= 8):
        divides = run.train is None or not run.train.by_heads or shape.heads % cp == 0
        if "fsdp" in backends and samples % (gpus // cp) == 0 and divides:
            yield "fsdp", ParallelLayout(world_size=gpus, cp=cp)
        # Megatron is divided in every way that its sizes allow.
        for tp in divisors(gpus // cp) if "megatron" in backends else ():
            if tp > nodes or shape.heads % tp or shape.kv_heads % tp:
                continue
            for pp in divisors(gpus // cp // tp):
                layout = ParallelLayout(world_size=gpus, tp=tp, pp=pp, cp=cp)
                if shape.layers % pp or samples % layout.dp or layout.problems():
                    continue
                for ep in divisors(gpus // pp // tp) if shape.experts else [1]:
                    split = replace(layout, ep=ep, etp=1 if ep > 1 or not shape.experts else tp)
                    if not shape.experts or (shape.experts % ep == 0 and not split.problems()):
                        yield "megatron", split


def candidates(run: Run, gpus: int) -> Iterator[Run]:
    """List the runs on ``gpus`` GPUs: each layout, size of an engine, recomputation or none,
    colocated or apart.

    Apart, the run is asynchronous and the engines get one to seven eighths of the GPUs.
    """
    trainer, engines = run.both
    # All GPUs for both sides in turn, or some for each.
    shares = [(gpus, gpus)] + [
        (gpus - share, share)
        for share in sorted({gpus * part // 8 for part in range(1, 8)} - {0, gpus})
    ]
    for trained, generating in shares:
        if trainer.quantized_base and trained > 1:
            continue  # it is not sharded
        shared = trained == generating == gpus
        for backend, layout in layouts(
            run, trained, ("fsdp",) if trainer.fsdp_only else ("fsdp", "megatron")
        ):
            for size in (1, 2, 4, 8):
                if (
                    generating % size
                    or size > run.place.gpus_per_node
                    or run.model.shape.heads % size
                ):
                    continue
                engine = replace(engines, engines=generating // size, gpus=size)
                for recomputed in (-1,) if trainer.inputs_on_cpu else (0, -1):
                    train = replace(
                        trainer, backend=backend, layout=layout, recomputed=recomputed, shards=0
                    )
                    place = replace(run.place, colocate=shared)
                    yield replace(
                        run, train=train, engine=engine, place=place, asynchronous=not shared
                    )


@lru_cache(maxsize=4)
def fitting(run: Run, gpus: int) -> tuple[Plan, ...]:
    """Return the plans of all candidates that fit."""
    return tuple(plan for one in candidates(run, gpus) if (plan := make_plan(one)).fits)


def best(run: Run, gpus: int, count: int = 5) -> list[Plan]:
    """Return the ``count`` fastest plans that fit, one for each backend, size of an engine and
    share of the GPUs.

    Steps that differ by less than a hundredth are equal: what was measured comes before what is
    extrapolated, and less work of the GPUs before more.
    """

    def order(plan: Plan) -> tuple[int, int, float]:
        return (round(log(plan.step) / 0.01), len(plan.extrapolated), sum(plan.seconds.values()))

    # Only the best of each kind, since many layouts differ by little.
    fastest: dict[tuple[str, int, int, int], Plan] = {}
    for plan in sorted(fitting(run, gpus), key=order):
        train, engine = plan.run.both
        fastest.setdefault(
            (train.backend, train.layout.world_size, engine.engines, engine.gpus), plan
        )
    return list(fastest.values())[:count]


def flags(plan: Plan) -> list[str]:
    """Return the flags of train.py (of train_async.py, if the plan is asynchronous) that set layout
    and placement.
    """
    run = plan.run
    train, engine = run.both
    layout = train.layout
    per_node = run.place.gpus_per_node
    world = layout.world_size
    # The fewest nodes that hold the ranks in equal numbers.
    nodes = next(n for n in range(1, world + 1) if world % n == 0 and world // n <= per_node)
    words = [f"--train-backend {train.backend}", f"--actor-num-nodes {nodes}"]
    words += [f"--actor-num-gpus-per-node {world // nodes}"]
    sizes = (
        ("tensor-model", layout.tp),
        ("pipeline-model", layout.pp),
        ("context", layout.cp),
        ("expert-model", layout.ep),
    )
    words += [f"--{name}-parallel-size {size}" for name, size in sizes if size > 1]
    if layout.tp > 1:
        words.append("--sequence-parallel")
    if layout.cp > 1 and train.by_heads:
        words.append("--context-parallel-kind ulysses")
    if run.model.experts and layout.etp != layout.tp:
        words.append(f"--expert-tensor-parallel-size {layout.etp}")
    if train.recomputed:
        words.append("--gradient-checkpointing" if train.backend == "fsdp" else _RECOMPUTE)
    words.append(
        "--colocate" if run.place.colocate else f"--rollout-num-gpus {engine.engines * engine.gpus}"
    )
    if engine.gpus > 1:
        words.append(f"--rollout-num-gpus-per-engine {engine.gpus}")
    return [*words, f"--max-tokens-per-gpu {train.tokens}"]


_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_OF_LAYOUT = (
    "--colocate", "--rollout-num-gpus", "--rollout-num-gpus-per-engine", "--gradient-checkpointing",
    "--recompute-activations", "--recompute-granularity", "--recompute-method", "--recompute-num-layers",
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
    "--context-parallel-kind",
    "--expert-model-parallel-size", "--expert-tensor-parallel-size", "--sequence-parallel",
    "--virtual-pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank", "--fsdp-shard-size",
)  # fmt: skip


def left_out(printed: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return the flags of a command that must be left out when the printed ones are added at its
    end.

    Args:
        printed: From :func:`flags`.
        given: The words of the command.
    """
    replaced = {word for words in printed for word in words.split()}
    options = dict.fromkeys(word.partition("=")[0] for word in given)
    return [option for option in options if option in _OF_LAYOUT and option not in replaced]


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
    reasons = [what for what in way.plan.extrapolated if not what.startswith("asynchronous step")]
    if way.mode is not SYNCHRONOUS and engine is not None and engine.engines > 1:
        reasons.append(f"asynchronous training with {engine.engines} engines: measured with one")
    return reasons


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
    simulations = (
        [simulated(min(together, key=lambda made: made.step), SYNCHRONOUS)] if together else []
    )
    # One-step training is fast where a step of both sides is short, a pool where both are always
    # busy.
    one_step, *pools = [mode for mode in WAYS if mode is not SYNCHRONOUS]
    if apart:
        simulations.append(simulated(min(apart.values(), key=lambda made: made.step), one_step))
        for made in sorted(apart.values(), key=_busiest)[:2]:
            simulations += [simulated(made, mode) for mode in pools]
    return sorted(simulations, key=lambda way: way.step)


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
        update_seconds=moved,
        curve=_curve(plan, engine),
        lengths=tuple(response_lengths(work, 4096)),
        start_seconds=start,
        refill_seconds=refill,
    )
    return made, 1 / parts


def simulated(plan: Plan, mode: Mode) -> Way:
    """Simulate one mode of one plan."""
    made, share = setting(plan, mode)
    per_token = _training(plan) / step_tokens(made)
    run = simulate(made, mode, per_token)
    return Way(
        mode, plan, steady(run), per_token * _steady_tokens(run), int(max(run.staleness)), share
    )


def step_tokens(made: Setting) -> float:
    """The response tokens of a simulated step, on average."""
    return made.batch * made.samples * sum(made.lengths) / len(made.lengths)


def steady(run: Simulated) -> float:
    """Seconds of a simulated step in the middle of a run."""
    ended = run.ended[FIRST - 1 : -LAST]
    return (ended[-1] - ended[0]) / (len(ended) - 1)


def _steady_tokens(run: Simulated) -> float:
    """Tokens per second that were trained meanwhile."""
    size = run.setting.batch * run.setting.samples
    trained = run.trained[FIRST * size : (len(run.ended) - LAST) * size]
    return sum(run.lengths[index] for index in trained) / (
        steady(run) * (len(run.ended) - FIRST - LAST)
    )
