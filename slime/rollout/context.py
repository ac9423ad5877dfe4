"""What becomes of prompts that leave no room for an answer in the context."""

from __future__ import annotations

from slime.data.sample import Sample
from slime.rollout.rm_hub.outcome import FAILURE_KEY, mark_unscored

TOO_LONG = "prompt_too_long"
_REFUSALS = ("context length", "longer than the model", "maximum allowed length", "leaves no room")


def mark_too_long(sample: Sample, limit: int | None) -> None:
    """Leave out a sample whose prompt leaves no room for an answer: no engine takes it, and nothing can be trained."""
    sample.status = Sample.Status.TRUNCATED
    room = f"of {limit} (--rollout-max-context-len, or the model's context)" if limit else "than the engine takes"
    mark_unscored(sample, TOO_LONG, f"its {sample.num_tokens} tokens leave no room for an answer {room}")


def is_too_long(sample: Sample) -> bool:
    """Whether :func:`mark_too_long` left it out."""
    return sample.reward_timed_out and str(sample.metadata.get(FAILURE_KEY, "")).startswith(TOO_LONG)


def says_too_long(error: Exception) -> bool:
    """Whether an engine refused a request for its length."""
    return any(words in str(error) for words in _REFUSALS)
