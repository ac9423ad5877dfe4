"""A plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .layouts import Way, flags, left_out, unmeasured
from .plan import Plan, without_offloading
from .setups import GIB


def page(
    plan: Plan, others: Sequence[Plan] = (), ways: Sequence[Way] = (), given: Sequence[str] = ()
) -> Iterator[str]:
    """The lines that ``slime plan`` prints: memory, seconds, what is extrapolated, best layouts and
    modes.

    Args:
        given: The words of the command that was planned.
    """
    run = plan.run
    yield f"model   {run.model.parameters / 1e9:.2f} billion parameters"
    yield f"GPU     {run.kind.name}, {run.kind.memory / GIB:.1f} GiB ({run.kind.source})"
    yield f"run     {describe(plan)}"
    work = run.work
    yield (
        f"step    {work.prompts} prompts x {work.samples} samples of {work.prompt_tokens:g} + "
        f"{work.response_tokens:g} tokens (response at most {work.longest}), {work.steps} "
        "optimizer step(s)"
    )
    # Memory and seconds by phase.
    yield "\nGiB on each GPU"
    for phase in plan.phases:
        parts = sorted(phase.parts.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size > 0.05 * GIB)
        yield f"  {phase.name:<12} {phase.total / GIB:6.1f}  = {shown}"
    yield "\nseconds"
    for name, seconds in plan.seconds.items():
        yield f"  {name:<18} {seconds:8.2f}"
    yield f"  {'step':<18} {plan.step:8.2f}   {plan.samples_per_gpu_second:.3f} samples/s per GPU"
    # Whether it fits, what would be better, and what the prediction rests on.
    yield "\nit fits" if plan.fits else "\nit does not fit"
    yield from (f"  {problem}" for problem in plan.problems)
    if (resident := without_offloading(plan)) is not None and resident.run.engine is not None:
        yield (
            "\n"
            f"with the trainer's state left on the GPU a step takes {resident.step:.2f} s: "
            f"--no-offload-train --sglang-mem-fraction-static {resident.run.engine.fraction:g}"
        )
    if plan.extrapolated:
        yield "\nextrapolated: nobody has measured"
        yield from (f"  {what}" for what in plan.extrapolated)
    # Other layouts, other modes, and the flags to copy.
    if others:
        yield f"\nthe fastest layouts of {others[0].gpus} GPUs that fit"
        for other in others:
            mark = " (extrapolated)" if other.extrapolated else ""
            yield f"  {other.step:8.2f} s  {describe(other)}{mark}"
    yield from _modes(ways)
    if ways:
        yield from _to_copy("fastest mode", ways[0].program, ways[0].flags, given)
    elif others:
        program = "train_async.py" if others[0].run.asynchronous else "train.py"
        yield from _to_copy("first", program, flags(others[0]), given)
        yield (
            "\n"
            "synchronous or asynchronous, simulated: add --sigma, or --lengths-from with the "
            "folder of a run"
        )


def _to_copy(
    what: str, program: str, printed: Sequence[str], given: Sequence[str]
) -> Iterator[str]:
    unwanted = left_out(printed, given)
    yield (f"\nflags of the {what}, for {program}") + (
        f", without your {', '.join(unwanted)}" if unwanted else ""
    )
    yield "  " + " \\\n  ".join(printed)
    if files := sorted(
        {word.partition("=")[0] for word in given} & {"--override", "--custom-config-path"}
    ):
        yield (
            f"the file of {' and of '.join(files)} takes precedence over these flags: remove from "
            "it what they set"
        )


def _modes(ways: Sequence[Way]) -> Iterator[str]:
    if not ways:
        return
    yield (
        "\n"
        f"synchronous or asynchronous on {ways[0].plan.gpus} GPUs, simulated with slime's "
        "scheduling"
    )
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
    run = plan.run
    words = []
    if run.train is not None:
        layout = run.train.layout
        # Only what is divided.
        sizes = {
            "TP": layout.tp,
            "PP": layout.pp,
            "CP": layout.cp,
            "EP": layout.ep,
            "DP": layout.dp,
        }
        parts = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        words.append(f"{run.train.backend} on {layout.world_size} GPUs {parts}".strip())
        words.append("recomputing" if run.train.recomputed else "no recomputation")
    if run.engine is not None:
        words.append(f"{run.engine.engines} engines of {run.engine.gpus} GPUs")
    if run.place.critic_gpus:
        words.append(f"critic on {run.place.critic_gpus} GPUs")
    words.append("colocated" if run.place.colocate else "apart")
    words.append("asynchronous" if run.asynchronous else "synchronous")
    return ", ".join(words)


def as_json(
    plan: Plan, others: Sequence[Plan] = (), ways: Sequence[Way] = (), given: Sequence[str] = ()
) -> dict[str, object]:
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
            "leave_out": left_out(way.flags, given),
        }
        for way in ways
    ]
    return {
        **_as_json(plan, given),
        "best": [_as_json(other, given) for other in others],
        "modes": modes,
    }


def _as_json(plan: Plan, given: Sequence[str]) -> dict[str, object]:
    printed = flags(plan) if plan.run.train is not None and plan.run.engine is not None else []
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
        "flags": printed,
        "leave_out": left_out(printed, given),
    }
