"""Rules for runs that go on: what failed meanwhile (samples, rewards, engines, training ranks), and
what is slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from ..summary import PHASES
from .facts import Facts, Finding
from .learning import listed, whole

FREE_BYTES = 2 * 2**30
MOSTLY_FAILED = 0.5
"""At least this share of a step's samples failed."""


def samples(facts: Facts) -> Iterator[Finding]:
    """Steps most of whose samples failed, so that there was nothing to train."""
    shares = {
        row.get("rollout/step"): row.get("rollout/failed_ratio") or 0.0 for row in facts.steps
    }
    steps = [step for step, share in shares.items() if share >= MOSTLY_FAILED]
    if steps:
        what = "All" if shares[steps[0]] == 1 else f"{shares[steps[0]]:.0%} of the"
        yield Finding(
            "samples_failed",
            f"{what} samples of step {whole(steps[0])} failed or have no token to train.",
            (
                f"{len(steps)} of {len(shares)} steps have a rollout/failed_ratio of "
                f"{MOSTLY_FAILED} or more",
            ),
            "Read the status and metadata of some samples in the folder samples: most often the "
            "generate function failed. slime check-hooks calls it on a few prompts.",
        )


def verifiers(facts: Facts) -> Iterator[Finding]:
    """Rewards that could not be computed."""
    failed = facts.lately("rollout/reward_error_count")
    timed_out = facts.lately("rollout/reward_timeout_count")
    for kind, count, what in (
        ("reward_timeouts", timed_out, "did not end in time"),
        ("reward_errors", failed, "raised an error"),
    ):
        if count and facts.samples and count > 0.05 * facts.samples:
            yield Finding(
                kind,
                f"The reward or generate function of {count / facts.samples:.0%} of the samples "
                f"{what}; these samples are left out.",
                (
                    f"{count:.0f} of {facts.samples:.0f} samples of a rollout",
                    *facts.last_lines("reward", most=4),
                ),
                "slime check-hooks measures a reward function; --reward-timeout is its deadline.",
            )


def engines(facts: Facts) -> Iterator[Finding]:
    """Engines and training ranks that die, and requests that are sent again."""
    # One loss may be an accident.
    lost = sum(facts.series("rollout/engine_lost_count"))
    if lost >= 2:
        yield Finding(
            "engines_lost",
            f"{lost:.0f} times an engine was lost and started again.",
            facts.last_lines("engine-", most=4),
            "The log of the engine says why: out of memory (a smaller "
            "--sglang-mem-fraction-static) is the usual cause.",
        )
    replaced = sum(facts.series("perf/trainer_restart_count"))
    if replaced >= 2:
        yield Finding(
            "ranks_lost",
            f"{replaced:.0f} times a training rank was lost, and new ranks went on from the last "
            "snapshot.",
            facts.last_lines("train-", most=4),
            "The log of the rank says why: out of memory (a smaller --max-tokens-per-gpu) is the "
            "usual cause. Steps since the last snapshot were trained again: a smaller "
            "--save-interval makes them fewer.",
        )
    # Few retries are usual when engines are started or updated.
    retries = facts.lately("rollout/http_retry_count")
    if retries is not None and facts.samples and retries > 0.2 * facts.samples:
        yield Finding(
            "retries",
            f"{retries:.0f} requests of a rollout of {facts.samples:.0f} samples had to be sent "
            "again.",
            (f"rollout/http_retry_count: {listed(facts.series('rollout/http_retry_count')[-5:])}",),
            "The engines or the router refuse connections: lower --sglang-server-concurrency.",
        )
    aborted = facts.lately("rollout/aborted_group_count")
    prompts = facts.settings.get("rollout_batch_size")
    if aborted is not None and isinstance(prompts, int) and aborted > prompts:
        yield Finding(
            "aborted",
            f"{aborted:.0f} groups are aborted per rollout of {prompts}.",
            (f"rollout/aborted_group_count {aborted:.0f}",),
            "Keep them for the next rollout (--partial-rollout), or lower "
            "--over-sampling-batch-size.",
            hint=True,
        )


def slower(facts: Facts) -> Iterator[Finding]:
    """Steps that take longer and longer."""
    times = facts.series("perf/step_time")[1:]  # the first step compiles and warms up
    if len(times) < 9:
        return
    third = len(times) // 3
    # Both in a third of the run and now: a pause that is over is no trend.
    first = median(times[:third])
    last = min(median(times[-third:]), median(times[-3:]))
    if last < 1.8 * first:
        return
    # The phase that grew most is the one to look at.
    growth = {name: _growth(facts, name, third) for name in PHASES}
    worst = max(growth, key=lambda name: growth[name])
    yield Finding(
        "slower",
        f"Steps became slower: {first:.1f} s at first, {last:.1f} s now; most of it in the phase "
        f"{worst}.",
        tuple(
            f"{name}: {seconds:+.1f} s" for name, seconds in growth.items() if seconds > 0.05 * last
        ),
        "Compare the lengths of the responses, which a rollout's time follows; otherwise another "
        "program may use the machine, or an engine was lost.",
    )


def slow_parts(facts: Facts) -> Iterator[Finding]:
    """Phases that take more than their share."""
    # Shares of a step, each with the limit above which the phase is worth a change.
    total = _steady(facts, "perf/step_time")
    if total is None or total <= 0:
        return
    for name, limit, advice in (
        (
            "update_weights",
            0.35,
            "Larger buckets (--update-weight-buffer-size), more senders or another transport.",
        ),
        (
            "save_model",
            0.35,
            "Save less often (--save-interval), or in the background (--async-save).",
        ),
        ("eval", 0.6, "Evaluate less often (--eval-interval), or fewer samples per prompt."),
        (
            "audit_weights",
            0.3,
            "Audit less often, or not (--no-audit-weights), once the run is trusted.",
        ),
    ):
        seconds = _steady(facts, f"perf/{name}_time")
        if seconds is None:
            continue
        # some phases are not in every step
        seconds *= len(facts.series(f"perf/{name}_time")) / len(facts.steps)
        if seconds > limit * total and seconds > 1.0:
            yield Finding(
                f"slow_{name}",
                f"The phase {name} takes {seconds / total:.0%} of a step ({seconds:.1f} of "
                f"{total:.1f} s).",
                (
                    f"perf/{name}_time by its share of the steps, perf/step_time: medians without "
                    "the first step",
                ),
                advice,
                hint=True,
            )


def long_tail(facts: Facts) -> Iterator[Finding]:
    """A generation that waits for a few long responses."""
    total = _steady(facts, "perf/step_time")
    rollout = _steady(facts, "perf/rollout_time")
    longest = facts.lately("rollout/response_len/max")
    mean = facts.lately("rollout/response_len/mean")
    if not total or rollout is None or longest is None or not mean:
        return
    if rollout > 0.6 * total and rollout > 10.0 and longest > 5 * mean:
        yield Finding(
            "long_tail",
            f"Generation takes {rollout / total:.0%} of a step, and the longest response is "
            f"{longest / mean:.0f} times as long as the mean: most engines wait for few responses.",
            (f"rollout/response_len/max {longest:.0f}, mean {mean:.0f}",),
            "Generate while training (train_async.py), or continue cut responses in the next "
            "rollout (--partial-rollout with --over-sampling-batch-size).",
            hint=True,
        )


def clock(facts: Facts) -> Iterator[Finding]:
    """A clock that was set back."""
    # Steps are in their order, so that their times can only grow.
    times = facts.series("time")
    back = [later - earlier for earlier, later in pairwise(times) if later < earlier - 1.0]
    if back:
        yield Finding(
            "clock",
            f"The clock of the machine was set back by {-min(back):.0f} s during the run.",
            (f"{len(back)} rows of metrics.jsonl are older than the row before",),
            "Times and speeds of these steps are wrong; synchronize the clock (chrony, "
            "systemd-timesyncd).",
            hint=True,
        )


def little_room(facts: Facts) -> Iterator[Finding]:
    """A disk that is nearly full."""
    if facts.free_bytes is not None and facts.free_bytes < FREE_BYTES:
        yield Finding(
            "little_room",
            f"Only {facts.free_bytes / 2**30:.1f} GiB are free on the disk of the run.",
            (str(facts.folder),),
            "Make room before the next snapshot; --save-keep-last and --log-keep-last limit what "
            "is kept.",
            hint=True,
        )


def _steady(facts: Facts, name: str) -> float | None:
    values = facts.series(name)[1:]
    return median(values) if len(values) >= 3 else None


def _growth(facts: Facts, name: str, third: int) -> float:
    values = facts.series(f"perf/{name}_time")[1:]
    return median(values[-third:]) - median(values[:third]) if len(values) >= 2 * third else 0.0
