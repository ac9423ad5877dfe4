"""Rules for what failed while the run went on: samples, rewards, engines and training ranks."""

from __future__ import annotations

from collections.abc import Iterator

from slime.plugins.tools.doctor.facts import Facts
from slime.plugins.tools.doctor.findings import Finding
from slime.plugins.tools.doctor.learning import listed, whole

MOSTLY_FAILED = 0.5
"""At least this share of a step's samples failed."""


def samples(facts: Facts) -> Iterator[Finding]:
    """Steps most of whose samples failed, so that there was nothing to train."""
    shares = {row.get("rollout/step"): row.get("rollout/failed_ratio") or 0.0 for row in facts.steps}
    steps = [step for step, share in shares.items() if share >= MOSTLY_FAILED]
    if steps:
        what = "All" if shares[steps[0]] == 1 else f"{shares[steps[0]]:.0%} of the"
        yield Finding(
            "samples_failed",
            f"{what} samples of step {whole(steps[0])} failed or have no token to train.",
            (f"{len(steps)} of {len(shares)} steps have a rollout/failed_ratio of {MOSTLY_FAILED} or more",),
            "Read the status and metadata of some samples in the folder samples: most often the generate function "
            "failed. slime check-hooks calls it on a few prompts.",
        )


def verifiers(facts: Facts) -> Iterator[Finding]:
    """Rewards that could not be computed."""
    failed, timed_out = facts.lately("rollout/reward_error_count"), facts.lately("rollout/reward_timeout_count")
    for kind, count, what in (
        ("reward_timeouts", timed_out, "did not end in time"),
        ("reward_errors", failed, "raised an error"),
    ):
        if count and facts.samples and count > 0.05 * facts.samples:
            yield Finding(
                kind,
                f"The reward of {count / facts.samples:.0%} of the samples {what}; these samples are left out.",
                (f"{count:.0f} of {facts.samples:.0f} samples of a rollout", *facts.last_lines("reward", most=4)),
                "slime check-hooks measures a reward function; --reward-timeout is its deadline.",
            )


def engines(facts: Facts) -> Iterator[Finding]:
    """Engines and training ranks that die, and requests that are sent again."""
    lost = sum(facts.series("rollout/engine_lost_count"))
    if lost >= 2:
        yield Finding(
            "engines_lost",
            f"{lost:.0f} times an engine was lost and started again.",
            facts.last_lines("engine-", most=4),
            "The log of the engine says why: out of memory (a smaller --sglang-mem-fraction-static) is the usual "
            "cause.",
        )
    replaced = sum(facts.series("perf/trainer_restart_count"))
    if replaced >= 2:
        yield Finding(
            "ranks_lost",
            f"{replaced:.0f} times a training rank was lost, and new ranks went on from the last snapshot.",
            facts.last_lines("train-", most=4),
            "The log of the rank says why: out of memory (a smaller --max-tokens-per-gpu) is the usual cause. Steps "
            "since the last snapshot were trained again: a smaller --save-interval makes them fewer.",
        )
    retries = facts.lately("rollout/http_retry_count")
    if retries is not None and facts.samples and retries > 0.2 * facts.samples:
        yield Finding(
            "retries",
            f"{retries:.0f} requests of a rollout of {facts.samples:.0f} samples had to be sent again.",
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
            "Keep them for the next rollout (--partial-rollout), or lower --over-sampling-batch-size.",
            hint=True,
        )
