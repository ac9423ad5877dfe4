"""Rewards that compare texts and numbers without further tools: ``last_number`` (1.0 if the last
number in the response equals the label), ``f1`` and ``random`` (0 or 1).

``f1`` is the token F1 of response and label as in SQuAD (Rajpurkar et al. 2016), the best one of
several labels. ``yes``, ``no`` and ``noanswer`` match only as the whole answer, as in HotpotQA's
official script.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from slime.config.seeds import derive_seed
from slime.data.reasoning import after_thinking
from slime.data.sample import Sample
from slime.plugins.rewards.answers import as_number, last_number, without_styles
from slime.rollout.rm_hub.reward import Reward, missing_label

if TYPE_CHECKING:
    from slime.config.data import DataConfig


def last_number_reward(sample: Sample) -> float:
    """Score one sample. Values are compared exactly: ``1,000`` equals ``1000.0``.

    Raises:
        ValueError: The label is not a number.
    """
    gold = number_label(sample.label)
    if gold is None:
        raise ValueError(
            f"reward type last_number: label {sample.label!r} of sample {sample.index} is not a "
            "number"
        )
    return float(last_number(after_thinking(sample.response)) == gold)


def number_label(label: object) -> Fraction | None:
    """Return the value of a label that is one decimal number, else None.

    Fractions such as ``3/4`` give None, because :func:`last_number` finds no fractions in a
    response.
    """
    value = as_number(str(label))
    return value if value is not None and last_number(str(label)) == value else None


def _label_problem(label: object, _: Mapping[str, object]) -> str | None:
    return missing_label(label) or (
        None if number_label(label) is not None else f"label {str(label)[:80]!r} is not a number"
    )


LAST_NUMBER = Reward(last_number_reward, label_problem=_label_problem)


def random_reward(args: DataConfig, sample: Sample) -> int:
    """Return 0 or 1, derived from the seed of the run and the index of the sample."""
    return derive_seed(args.rollout_seed, "random reward", sample.index or 0) & 1


RANDOM = Reward(random_reward, reads_reasoning=True, own_answer=None)


class F1Score(NamedTuple):
    """Token F1 of two texts, with its precision (of the prediction) and recall (of the label), each
    in [0, 1].
    """

    f1: float
    precision: float
    recall: float


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = {"yes", "no", "noanswer"}


def f1_reward(sample: Sample) -> float:
    """Return the F1 in [0, 1]. The label is a string or a list of accepted strings."""
    labels = sample.label if isinstance(sample.label, list) else [sample.label]
    response = after_thinking(sample.response)
    return max(f1_score(response, str(label)).f1 for label in labels)


def f1_score(prediction: str | None, ground_truth: str | None) -> F1Score:
    """Compare the tokens of two texts after normalization (case, punctuation, articles, white
    space).
    """
    left = normalize_answer(prediction or "")
    right = normalize_answer(ground_truth or "")
    if left != right and (left in _CLOSED or right in _CLOSED):
        return F1Score(0.0, 0.0, 0.0)
    prediction_tokens = left.split()
    gold_tokens = right.split()
    common = sum((Counter(prediction_tokens) & Counter(gold_tokens)).values())
    if common == 0:
        return F1Score(0.0, 0.0, 0.0)
    precision = common / len(prediction_tokens)
    recall = common / len(gold_tokens)
    return F1Score(2 * precision * recall / (precision + recall), precision, recall)


def normalize_answer(text: str) -> str:
    """Convert a text to lower case, and remove punctuation, articles and repeated spaces.

    A text that consists only of punctuation and articles (the band ``The The``) would become empty,
    so it keeps them.
    """
    text = without_styles(text).lower()
    words = re.sub(r"\b(a|an|the)\b", " ", text.translate(_PUNCTUATION)).split()
    return " ".join(words or text.split())


def _f1_label_problem(label: object, _: Mapping[str, object]) -> str | None:
    if isinstance(label, list) and label:
        return next((problem for part in label if (problem := missing_label(part))), None)
    return missing_label(label)


F1 = Reward(f1_reward, label_problem=_f1_label_problem, needs_label=True)
