"""Which tokens the trainer and the engines disagree about, from the dumps of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.plugins.tools.doctor.facts import Facts
from slime.plugins.tools.summary.records import find_dump

LARGE = 1.0
"""A gap above this is an outlier: the token is e times as likely for one side as for the other."""
MOST = 5
_SHARE = 0.8
_MOST_BYTES = 2**30
NOT_RECORDED = (
    "which tokens is not recorded: --dump-details FOLDER records them, with --num-steps-per-rollout 2 or more (or "
    "--get-mismatch-metrics and a --custom-tis-function-path) also the trainer's log-probs"
)


@dataclass(frozen=True)
class Outlier:
    """A token with a large gap.

    Attributes:
        sample: Its ``Sample.index``.
        position: In the response, from 0.
        last: Whether it is the last token of the response.
    """

    sample: int
    position: int
    token: int
    engine: float
    trainer: float
    last: bool

    @property
    def gap(self) -> float:
        return abs(self.engine - self.trainer)


def worst_tokens(facts: Facts, metric: str) -> tuple[str, ...]:
    """Return lines about the outliers of the recorded step in which ``metric`` was largest."""
    template = facts.settings.get("save_debug_train_data")
    steps = sorted((row for row in facts.steps if row.get(metric)), key=lambda row: -(row[metric] or 0.0))
    for row in steps:
        number = int(row.get("rollout/step") or 0)
        path = find_dump(template, facts.folder, facts.settings.get("run_name"), number)
        if path is not None and path.stat().st_size <= _MOST_BYTES:
            lines = tuple(_described(_read(path), number))
            return lines or (NOT_RECORDED,)
    return (NOT_RECORDED,)


def _read(path: Any) -> list[Mapping[str, Any]]:
    from slime.data.value_files import load_plain

    try:
        samples = load_plain(path)["samples"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [sample for sample in samples if "log_probs" in sample and "rollout_log_probs" in sample]


def _described(samples: Sequence[Mapping[str, Any]], step: int) -> Iterator[str]:
    found, trained = [], 0
    for sample in samples:
        outliers, tokens = _outliers(sample)
        found += outliers
        trained += tokens
    if not samples:
        return
    of_sample = Counter(one.sample for one in found)
    yield (
        f"step {step}: {len(found)} of {trained} trained tokens differ by more than {LARGE:g}, "
        f"in {len(of_sample)} of {len(samples)} samples"
    )
    for one in sorted(found, key=lambda one: -one.gap)[:MOST]:
        yield (
            f"sample {one.sample}, token {one.position}{' (the last)' if one.last else ''}, id {one.token}: engine "
            f"{one.engine:.3f}, trainer {one.trainer:.3f}; slime ui shows it"
        )
    if len(found) >= MOST:
        yield from _pattern(found, of_sample)


def _outliers(sample: Mapping[str, Any]) -> tuple[list[Outlier], int]:
    ids, mask = sample["tokens"].tolist(), sample["loss_masks"].tolist()
    both = zip(sample["rollout_log_probs"].tolist(), sample["log_probs"].tolist(), mask, strict=True)
    first, end = len(ids) - len(mask), len(mask) - 1
    found = [
        Outlier(int(sample["sample_indices"]), at, ids[first + at], engine, trainer, at == end)
        for at, (engine, trainer, trains) in enumerate(both)
        if trains and not abs(engine - trainer) <= LARGE
    ]
    return found, sum(mask)


def _pattern(found: Sequence[Outlier], of_sample: Counter[int]) -> Iterator[str]:
    """Say what most outliers have in common."""
    rules: Sequence[tuple[str, Callable[[Outlier], bool]]] = (
        ("the last token of a response: look at end tokens and stop strings", lambda one: one.last),
        ("the first token of a response: look at the prompt of both sides", lambda one: not one.position),
    )  # fmt: skip
    for text, holds in rules:
        if sum(map(holds, found)) >= _SHARE * len(found):
            yield f"most of them are {text}"
    token, times = Counter(one.token for one in found).most_common(1)[0]
    if times >= _SHARE * len(found):
        yield f"most of them have the id {token}: a special token, or one that a sampling mask of one side excludes"
    sample, times = of_sample.most_common(1)[0]
    if len(of_sample) > 1 and times >= _SHARE * len(found):
        yield f"most of them are in sample {sample}: its tokens or its media differ between both sides"
