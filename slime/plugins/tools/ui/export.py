"""``slime ui --export run.html``: the page as one file, with as much of the runs as it may hold."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import orjson

from slime.plugins.tools.ui import views
from slime.plugins.tools.ui.runs import Run, Runs
from slime.plugins.tools.ui.server import alone
from slime.plugins.tools.ui.site import NotFound, answer, as_json, path_of

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What an export may hold.

    Attributes:
        steps: Number of steps of each run with their groups and time lines: the first, the last,
            and others between them at even distances.
        samples: Number of samples of each of these steps with their texts and tokens.
        megabytes: Of JSON before compression, of all runs together. Samples are left out when it is
            reached.
    """

    steps: int = 12
    samples: int = 32
    megabytes: float = 24.0


def export(runs: Runs, limits: Limits) -> str:
    """Return the page as one HTML file. All files of the runs are read first.

    What the file leaves out is said on its pages.
    """
    runs.refresh()
    # What the pages need comes first, then samples until the file is full.
    answers: dict[str, object] = {}
    room = limits.megabytes * 1e6
    left_out = False
    for path, needed in _paths(runs, limits):
        if path in answers:  # a prompt comes in several steps
            continue
        if not needed and room <= 0:
            left_out = True
            continue
        try:
            encoded = as_json(answer(runs, path))
        except NotFound:
            continue
        answers[path] = orjson.loads(encoded)
        room -= len(encoded)
    made = (
        f"Exported on {time.strftime('%Y-%m-%d %H:%M')}. It holds {limits.steps} steps of each "
        f"run at even distances, with up to {limits.samples} samples of each."
    )
    made += (
        f" Some samples were left out, to stay below {limits.megabytes:g} MB." if left_out else ""
    )
    return alone(answers, made)


def _paths(runs: Runs, limits: Limits) -> Iterator[tuple[str, bool]]:
    """Yield the paths to put into the file, and whether it would be useless without them."""
    yield path_of("runs"), True
    for run in runs.all():
        for name in ("overview", "doctor", "steps", "prompts", "evaluations", "ledger", "engines"):
            yield path_of("run", run.key, name), True
        for name in run.series.names:
            yield path_of("run", run.key, "series", name), True
    for run in runs.all():
        rows = run.index.rows(
            "select distinct step from samples where kind = 'rollout' order by step"
        )
        chosen = evenly(
            [row["step"] for row in rows] or range(run.series.last_step + 1), limits.steps
        )
        for number in chosen:
            yield path_of("run", run.key, "step", number), True
        yield from ((path, False) for path in _comparisons(run, limits.samples))
        for number in chosen:
            yield path_of("run", run.key, "timeline", number), False
            yield from ((path, False) for path in _samples(run, int(number or 0), limits.samples))


def _samples(run: Run, number: int, most: int) -> Iterator[str]:
    query = (
        "select position, sample_index, prompt from samples where kind = 'rollout' and step = ? "
        "order by position"
    )
    rows = evenly(run.index.rows(query, (number,)), most)
    for row in rows:
        yield path_of("run", run.key, "sample", "rollout", number, row["position"])
        if row["sample_index"] is not None and run.tokens.recorded(number):
            yield path_of("run", run.key, "tokens", number, row["sample_index"])
    for key in dict.fromkeys(row["prompt"] for row in rows):
        yield path_of("run", run.key, "prompt", key)


def _comparisons(run: Run, most: int) -> Iterator[str]:
    """Yield the first and the last evaluation of each data set side by side, with some of their
    samples.
    """
    texts = views.evaluations(run)["texts"]
    assert isinstance(texts, dict)
    for name, steps in texts.items():
        yield path_of("run", run.key, "evaluation", name, steps[0], steps[-1])
        for number in dict.fromkeys((steps[0], steps[-1])):
            query = "select position from samples where kind = ? and step = ? order by position"
            for row in evenly(run.index.rows(query, (f"eval-{name}", number)), most):
                yield path_of("run", run.key, "sample", f"eval-{name}", number, row["position"])


def evenly(items: Iterable[T], most: int) -> list[T]:
    """Return at most ``most`` items at even distances, with the first and the last.

    >>> evenly(range(10), 4)
    [0, 3, 6, 9]
    """
    every = list(items)
    if len(every) <= most:
        return every
    if most < 2:
        return every[len(every) - most :]
    return [every[round(i * (len(every) - 1) / (most - 1))] for i in range(most)]
