"""Samples without a reward: their verifier gave no result, or their prompt leaves no room for a
response.

Such a sample is marked and excluded from the statistics of its group and from the loss. A reward of
0 instead would train the model on a failure of the verifier.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime.data.rewards import PARTS_KEY
from slime.data.sample import Sample
from slime.observability.files import warn
from slime.rollout.verifier.pool import Verdict, shared_pool

if TYPE_CHECKING:
    from slime.config.data import RewardConfig

FAILURE_KEY = "reward_failure"
TOO_LONG = "prompt_too_long"
ABSTAINED = "abstained"
RAISED = "exception"
# Parts of the messages with which SGLang and the embedded engine refuse a request that is too long.
_REFUSALS = ("context length", "longer than the model", "maximum allowed length", "leaves no room")
_warned: set[str] = set()


def mark_unscored(sample: Sample, status: str, detail: str) -> None:
    """Exclude ``sample`` from its group's statistics and from the loss; store why in
    ``metadata["reward_failure"]``.

    The first failure of each status is logged. Later ones are only counted.

    Args:
        status: ``timeout``, ``crashed``, ``error``, :data:`RAISED`, :data:`ABSTAINED` or
            :data:`TOO_LONG`.
        detail: What went wrong.
    """
    sample.reward = None
    sample.reward_timed_out = True
    sample.remove_sample = True
    sample.metadata[FAILURE_KEY] = f"{status}: {detail}"
    if status not in _warned:
        _warned.add(status)
        warn(
            f"no reward for sample {sample.index}: {status} ({detail}). The sample is excluded from "
            "group statistics and loss; later ones are only counted (rollout/reward_*_count)."
        )


def accept_rewards(path: str, samples: Sequence[Sample], rewards: Iterable[object]) -> list[Any]:
    """Return what a user's reward function gave as plain numbers. None abstains: its sample is
    excluded.
    """
    plain = list(map(plain_reward, rewards))
    for sample, reward in zip(samples, plain, strict=True):
        if reward is None and not sample.reward_timed_out:
            mark_unscored(sample, ABSTAINED, f"{path} returned None")
    return plain


def raised_at(error: BaseException) -> str:
    """Return the type, the message and the line of an exception of somebody else's code."""
    frames = traceback.extract_tb(error.__traceback__)
    # Where a library raised, such as json, the line of the function that called it says more.
    frame = ([one for one in frames if "/lib/python3" not in one.filename] or frames)[-1]
    return f"{type(error).__name__}: {error}"[:2000] + f" ({frame.filename}:{frame.lineno})"


def mark_raised(samples: Iterable[Sample], where: str, error: BaseException) -> None:
    """Exclude samples whose reward or generate function raised an exception."""
    for sample in samples:
        mark_unscored(sample, RAISED, f"{where}: {raised_at(error)}")


def failure(sample: Sample) -> str:
    """Return why a sample has no reward, as a status of :func:`mark_unscored`; "" if it has one."""
    if not sample.reward_timed_out:
        return ""
    return str(sample.metadata.get(FAILURE_KEY, "timeout")).partition(":")[0]


def check_raised(what: str, samples: Sequence[Sample], count: int, share: float, of: int) -> None:
    """End the run if exceptions of the reward or of the generate function cost too many samples.

    Args:
        what: What the samples are of, for the message.
        samples: The samples that came last.
        count: How many samples were marked by :func:`mark_raised` so far.
        share: ``--reward-max-error-share``.
        of: The number of samples of the whole rollout or evaluation.

    Raises:
        RuntimeError: These are more than ``share`` of them. It names the last exception.
    """
    last = next((s for s in reversed(samples) if failure(s) == RAISED), None)
    if last is not None and count > share * of:
        raise RuntimeError(
            f"{what}: exceptions cost {count} of {of} samples, which is more than "
            f"--reward-max-error-share {share:g}; the last {last.metadata[FAILURE_KEY]}"
        )


def combine_rewards(reward: RewardConfig, sample: Sample) -> None:
    """Replace a reward that is a dict of numbers by their weighted sum, and keep the numbers in
    ``metadata["reward_parts"]``.

    An entry None abstains: it is left out of the sum. A sample abstains if all entries do. With
    ``--reward-key`` or ``--eval-reward-key``, or if an entry is no number, the dict stays. A dict
    without an entry that ``--reward-weights`` names counts as an exception of the reward.
    """
    given = sample.reward
    if not isinstance(given, Mapping) or reward.reward_key or reward.eval_reward_key:
        return
    weights = reward.reward_weights
    if missing := [name for name in weights or {} if name not in given]:
        names = ", ".join(map(str, given))
        mark_unscored(
            sample, RAISED, f"--reward-weights names {', '.join(missing)}, but it has {names}"
        )
        return
    chosen = {name: given[name] for name in (given if weights is None else weights)}
    if not given or not all(
        value is None or isinstance(value, int | float) for value in chosen.values()
    ):
        return
    if weights is None and "several" not in _warned:
        _warned.add("several")
        warn(
            f"the reward is a dict: training uses the sum of {', '.join(map(str, given))} "
            "(--reward-weights or --reward-key change that)"
        )
    sample.metadata[PARTS_KEY] = {
        str(name): float(value) for name, value in given.items() if isinstance(value, int | float)
    }
    known = {name: float(value) for name, value in chosen.items() if value is not None}
    if not known:
        mark_unscored(sample, ABSTAINED, "all entries of the reward are None")
        return
    sample.reward = sum(
        value * (1.0 if weights is None else weights[name]) for name, value in known.items()
    )


async def verify(reward: RewardConfig, sample: Sample, function: str, *call_args: object) -> Any:
    """Run a verifier in a killable process, with the time limit ``--reward-timeout``.

    Args:
        function: Import path of the verifier.
        call_args: Its arguments, JSON values.

    Returns:
        What the verifier returned. None if it gave no result; the sample is then marked as
        unscored.
    """
    pool = shared_pool(reward.reward_workers, variables=reward.verifier_env or ())
    verdict: Verdict = await pool.run(function, *call_args, timeout=reward.reward_timeout)
    if verdict.ok:
        return verdict.value
    mark_unscored(sample, verdict.status, verdict.detail)
    return None


def plain_reward(reward: object) -> Any:
    """Return a reward of a user's function with Python's numbers in place of those of NumPy and of
    tensors.

    Metrics, JSON and the pages of a run know only Python's numbers.
    """
    if isinstance(reward, dict):
        return {name: plain_reward(value) for name, value in reward.items()}
    number = getattr(reward, "item", None)
    single = getattr(reward, "shape", None) in ((), (1,))  # the latter as a reward model's logits
    return number() if number is not None and single else reward


def mark_too_long(sample: Sample, limit: int | None) -> None:
    """Exclude a sample whose prompt leaves no room for a response: no engine accepts it, and
    nothing can be trained.
    """
    sample.status = Sample.Status.TRUNCATED
    room = (
        f"in {limit} (--rollout-max-context-len, or the model's context)"
        if limit
        else "in the engine's context"
    )
    mark_unscored(
        sample, TOO_LONG, f"its {sample.num_tokens} tokens leave no room for a response {room}"
    )


def is_too_long(sample: Sample) -> bool:
    """Whether :func:`mark_too_long` excluded the sample."""
    return failure(sample) == TOO_LONG


def says_too_long(error: Exception) -> bool:
    """Whether an engine refused a request because it is too long."""
    return any(words in str(error) for words in _REFUSALS)
