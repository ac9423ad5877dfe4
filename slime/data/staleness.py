"""Staleness: the age of the weights that sampled a token, in steps, when the token is trained.

A weight version is named ``<attempt>.<steps trained>``. So step ``i`` trains the weights of version
``i``, and in that step a token of version ``v`` has the staleness ``i - v``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from slime.data.fields import TrainData
from slime.data.sample import Sample

UNKNOWN = -1


def step_of(version: str) -> int | None:
    """The number of steps that had trained a version's weights; None for other names (of an engine
    never updated).
    """
    _, dot, step = version.partition(".")
    return int(step) if dot and step.isdigit() else None


def token_staleness(sample: Sample, step: int) -> np.ndarray:
    """The staleness of each response token in step ``step``, int16 ``[response_length]``.

    It is :data:`UNKNOWN` for tokens that no engine sampled, and for versions without a number.
    """
    ages = np.full(sample.response_length, UNKNOWN, np.int16)
    for version, start, end in sample.version_spans:
        made = step_of(version)
        if made is not None:
            ages[start:end] = step - made
    return ages


def sample_staleness(sample: Sample, step: int) -> int | None:
    """The staleness of the oldest trained token; None if no token is trained, or none has a known
    version.
    """
    if sample.remove_sample or sample.reward_timed_out:
        return None
    # Only trained tokens count: those of tools have no version anyway.
    ages = token_staleness(sample, step)
    mask = sample.array("loss_mask")
    if mask is not None and len(mask) == len(ages):
        ages = ages[mask != 0]
    return int(ages.max()) if len(ages) and ages.max() != UNKNOWN else None


def staleness_metrics(samples: Iterable[Sample], step: int) -> dict[str, float]:
    """``rollout/staleness/{mean,max}`` over samples, and the fraction of responses with several
    weight versions.
    """
    samples = list(samples)
    ages = [age for sample in samples if (age := sample_staleness(sample, step)) is not None]
    if not ages:
        return {}
    several = [len({version for version, _, _ in sample.version_spans}) > 1 for sample in samples]
    kept = [bool(sample.metadata.get("kv_of_older_weights")) for sample in samples]
    metrics = {
        "rollout/staleness/mean": float(np.mean(ages)),
        "rollout/staleness/max": float(max(ages)),
        "rollout/several_versions_ratio": float(np.mean(several)),
    }
    return metrics | ({"rollout/old_kv_ratio": float(np.mean(kept))} if any(kept) else {})


def add_staleness(train_data: TrainData, samples: Sequence[Sample], step: int) -> None:
    """If any token is stale, set ``train_data["staleness"]`` to one array per sample, for the
    log-prob gap by age.
    """
    if len(train_data["tokens"]) != len(samples):
        return  # A custom converter has merged or split samples.
    ages = [token_staleness(sample, step) for sample in samples]
    if any((age > 0).any() for age in ages):
        train_data["staleness"] = ages


def mask_older_versions(sample: Sample) -> None:
    """Train only the tokens that the newest weights sampled
    (``--mask-offpolicy-in-partial-rollout``).
    """
    if len({version for version, _, _ in sample.version_spans}) < 2:
        return
    # The last span is of the newest weights, since a response only grows.
    newest = sample.version_spans[-1][0]
    given = sample.array("loss_mask")
    mask = np.ones(sample.response_length, np.int8) if given is None else given.copy()
    for version, start, end in sample.version_spans:
        if version != newest:
            mask[start:end] = 0
    sample.loss_mask = mask.tolist()
    sample.pack()
