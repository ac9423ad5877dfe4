"""Rules for runs that are slow: which phase takes the time, and what became slower."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from slime.plugins.tools.doctor.facts import Facts
from slime.plugins.tools.doctor.findings import Finding

PHASES = (
    *("rollout", "train", "update_weights", "eval", "save_model", "audit_weights"),
    *("offload", "onload", "sleep", "wake_up"),
)
FREE_BYTES = 2 * 2**30


def slower(facts: Facts) -> Iterator[Finding]:
    """Steps that take longer and longer."""
    times = facts.series("perf/step_time")[1:]  # the first step compiles and warms up
    if len(times) < 9:
        return
    third = len(times) // 3
    # Both in a third of the run and now: a pause that is over is no trend.
    first, last = median(times[:third]), min(median(times[-third:]), median(times[-3:]))
    if last < 1.8 * first:
        return
    growth = {name: _growth(facts, name, third) for name in PHASES}
    worst = max(growth, key=lambda name: growth[name])
    yield Finding(
        "slower",
        f"Steps became slower: {first:.1f} s at first, {last:.1f} s now; most of it in the phase {worst}.",
        tuple(f"{name}: {seconds:+.1f} s" for name, seconds in growth.items() if seconds > 0.05 * last),
        "Compare the lengths of the responses, which a rollout's time follows; otherwise another program may use the "
        "machine, or an engine was lost.",
    )


def slow_parts(facts: Facts) -> Iterator[Finding]:
    """Phases that take more than their share."""
    total = _steady(facts, "perf/step_time")
    if total is None or total <= 0:
        return
    for name, limit, advice in (
        ("update_weights", 0.35, "Larger buckets (--update-weight-buffer-size), more senders or another transport."),
        ("save_model", 0.35, "Save less often (--save-interval), or in the background (--async-save)."),
        ("eval", 0.6, "Evaluate less often (--eval-interval), or fewer samples per prompt."),
        ("audit_weights", 0.3, "Audit less often, or not (--no-audit-weights), once the run is trusted."),
    ):
        seconds = _steady(facts, f"perf/{name}_time")
        if seconds is None:
            continue
        seconds *= len(facts.series(f"perf/{name}_time")) / len(facts.steps)  # some phases are not in every step
        if seconds > limit * total and seconds > 1.0:
            yield Finding(
                f"slow_{name}",
                f"The phase {name} takes {seconds / total:.0%} of a step ({seconds:.1f} of {total:.1f} s).",
                (f"perf/{name}_time by its share of the steps, perf/step_time: medians without the first step",),
                advice,
                hint=True,
            )


def long_tail(facts: Facts) -> Iterator[Finding]:
    """A generation that waits for a few long responses."""
    total, rollout = _steady(facts, "perf/step_time"), _steady(facts, "perf/rollout_time")
    longest, mean = facts.lately("rollout/response_len/max"), facts.lately("rollout/response_len/mean")
    if not total or rollout is None or longest is None or not mean:
        return
    if rollout > 0.6 * total and rollout > 10.0 and longest > 5 * mean:
        yield Finding(
            "long_tail",
            f"Generation takes {rollout / total:.0%} of a step, and the longest response is {longest / mean:.0f} times "
            "as long as the mean: most engines wait for few responses.",
            (f"rollout/response_len/max {longest:.0f}, mean {mean:.0f}",),
            "Generate while training (train_async.py), or continue cut responses in the next rollout "
            "(--partial-rollout with --over-sampling-batch-size).",
            hint=True,
        )


def clock(facts: Facts) -> Iterator[Finding]:
    """A clock that was set back."""
    times = facts.series("time")
    back = [later - earlier for earlier, later in pairwise(times) if later < earlier - 1.0]
    if back:
        yield Finding(
            "clock",
            f"The clock of the machine was set back by {-min(back):.0f} s during the run.",
            (f"{len(back)} rows of metrics.jsonl are older than the row before",),
            "Times and speeds of these steps are wrong; synchronize the clock (chrony, systemd-timesyncd).",
            hint=True,
        )


def little_room(facts: Facts) -> Iterator[Finding]:
    """A disk that is nearly full."""
    if facts.free_bytes is not None and facts.free_bytes < FREE_BYTES:
        yield Finding(
            "little_room",
            f"Only {facts.free_bytes / 2**30:.1f} GiB are free on the disk of the run.",
            (str(facts.folder),),
            "Make room before the next snapshot; --save-keep-last and --log-keep-last limit what is kept.",
            hint=True,
        )


def _steady(facts: Facts, name: str) -> float | None:
    values = facts.series(name)[1:]
    return median(values) if len(values) >= 3 else None


def _growth(facts: Facts, name: str, third: int) -> float:
    values = facts.series(f"perf/{name}_time")[1:]
    return median(values[-third:]) - median(values[:third]) if len(values) >= 2 * third else 0.0
