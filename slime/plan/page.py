"""A plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .gpus import GIB
from .layouts import flags
from .modes import Way, unmeasured
from .plan import Plan


def page(plan: Plan, others: Sequence[Plan] = (), ways: Sequence[Way] = ()) -> Iterator[str]:
    """The lines that ``slime plan`` prints: memory, seconds, what is extrapolated, best layouts and modes."""
    run = plan.run
    yield f"model   {run.model.parameters / 1e9:.2f} billion parameters"
    yield f"GPU     {run.kind.name}, {run.kind.memory / GIB:.1f} GiB ({run.kind.source})"
    yield f"run     {describe(plan)}"
    work = run.work
    yield (
        f"step    {work.prompts} prompts x {work.samples} samples of {work.prompt_tokens:g} + {work.response_tokens:g} "
        f"tokens (response at most {work.longest}), {work.steps} optimizer step(s)"
    )
    yield "\nGiB on each GPU"
    for phase in plan.phases:
        parts = sorted(phase.parts.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size > 0.05 * GIB)
        yield f"  {phase.name:<12} {phase.total / GIB:6.1f}  = {shown}"
    yield "\nseconds"
    for name, seconds in plan.seconds.items():
        yield f"  {name:<18} {seconds:8.2f}"
    yield f"  {'step':<18} {plan.step:8.2f}   {plan.samples_per_gpu_second:.3f} samples/s per GPU"
    yield "\nit fits" if plan.fits else "\nit does not fit"
    yield from (f"  {problem}" for problem in plan.problems)
    if plan.extrapolated:
        yield "\nextrapolated: nobody has measured"
        yield from (f"  {what}" for what in plan.extrapolated)
    if others:
        yield f"\nthe fastest layouts of {others[0].gpus} GPUs that fit"
        for other in others:
            mark = " (extrapolated)" if other.extrapolated else ""
            yield f"  {other.step:8.2f} s  {describe(other)}{mark}"
    yield from _modes(ways)
    if ways:
        yield f"\nflags of the fastest mode, for {ways[0].program}"
        yield "  " + " \\\n  ".join(ways[0].flags)
    elif others:
        program = "train_async.py" if others[0].run.asynchronous else "train.py"
        yield f"\nflags of the first, for {program}"
        yield "  " + " \\\n  ".join(flags(others[0]))
        yield "\nsynchronous or asynchronous, simulated: add --sigma, or --lengths-from with the folder of a run"


def _modes(ways: Sequence[Way]) -> Iterator[str]:
    if not ways:
        return
    yield f"\nsynchronous or asynchronous on {ways[0].plan.gpus} GPUs, simulated with slime's scheduling"
    yield f"  {'s per step':>10}  {'engines have':>14}  {'trainer busy':>12}  oldest token"
    for way in ways:
        colocated = way.plan.run.place.colocate
        has = "all GPUs" if colocated else f"{way.engine_gpus} GPUs"
        marks = ["extrapolated"] if unmeasured(way) else []
        marks += [f"simulated with {way.share:.0%} of samples and engines"] if way.share < 1 else []
        mark = f" ({'; '.join(marks)})" if marks else ""
        yield (
            f"  {way.step:10.2f}  {has:>14}  {way.busy:12.0%}  {way.staleness} steps   "
            f"{way.mode.name}: {describe(way.plan)}{mark}"
        )


def describe(plan: Plan) -> str:
    """Backend, layout, engines and placement in one line."""
    run, words = plan.run, []
    if run.train is not None:
        layout = run.train.layout
        sizes = {"TP": layout.tp, "PP": layout.pp, "CP": layout.cp, "EP": layout.ep, "DP": layout.dp}
        parts = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        words.append(f"{run.train.backend} on {layout.world_size} GPUs {parts}".strip())
        words.append("recomputing" if run.train.recomputed else "no recomputation")
    if run.engine is not None:
        words.append(f"{run.engine.engines} engines of {run.engine.gpus} GPUs")
    words.append("colocated" if run.place.colocate else "apart")
    words.append("asynchronous" if run.asynchronous else "synchronous")
    return ", ".join(words)


def as_json(plan: Plan, others: Sequence[Plan] = (), ways: Sequence[Way] = ()) -> dict[str, object]:
    """The same values for a program: bytes and seconds."""
    modes = [
        {
            "mode": way.mode.name,
            "program": way.program,
            "step_seconds": way.step,
            "engine_gpus": way.engine_gpus,
            "trainer_busy": way.busy,
            "oldest_token_steps": way.staleness,
            "simulated_share": way.share,
            "extrapolated": unmeasured(way),
            "flags": way.flags,
        }
        for way in ways
    ]
    return {**_as_json(plan), "best": [_as_json(other) for other in others], "modes": modes}


def _as_json(plan: Plan) -> dict[str, object]:
    return {
        "run": describe(plan),
        "gpu": plan.run.kind.name,
        "gpus": plan.gpus,
        "memory_bytes": {phase.name: phase.parts for phase in plan.phases},
        "seconds": plan.seconds,
        "step_seconds": plan.step,
        "fits": plan.fits,
        "problems": list(plan.problems),
        "extrapolated": list(plan.extrapolated),
        "flags": flags(plan) if plan.run.train is not None and plan.run.engine is not None else [],
    }
