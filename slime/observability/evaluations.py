"""The result of an evaluation as a JSON file in the run folder and as a table in the terminal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import SupportsFloat

from rich.table import Table

from slime.observability.files import best_effort, replacing

DETAIL = re.compile(
    r"^(?P<name>.+)-(?P<figure>truncated_ratio|reward_missing_count|(?:pass|mean)@\d+)$"
)
"""Splits the name of a metric without ``eval/`` into data set and figure. Other names are a data
set's mean reward.
"""

Figures = dict[str, dict[str, SupportsFloat]]


def figures(metrics: Mapping[str, SupportsFloat]) -> Figures:
    """Return the metrics of an evaluation by data set: ``reward``, ``mean@n``, ``pass@k``,
    ``truncated_ratio``, lengths and others. The name of a data set may have slashes, if its reward
    is there and figures of its own follow it."""
    found: Figures = {}
    values = {
        key.removeprefix("eval/"): value
        for key, value in metrics.items()
        if key.startswith("eval/")
    }
    values.pop("step", None)
    # A name with a slash could also be a figure of another data set; it is a data set if figures of
    # its own follow.
    slashed = {
        key for key in values if "/" in key and any(other.startswith(f"{key}/") for other in values)
    }
    for key, value in values.items():
        detail = DETAIL.match(key)
        if detail and ("/" not in key or detail["name"] in slashed):
            found.setdefault(detail["name"], {})[detail["figure"]] = value
            continue
        # The longest name wins, since the name of one data set may begin with that of another.
        own = [name for name in slashed if key == name or key.startswith(f"{name}/")]
        name = max(own, key=len, default=key.partition("/")[0])
        found.setdefault(name, {})[key.removeprefix(name).removeprefix("/") or "reward"] = value
    return found


def write_evaluation(
    run_dir: Path,
    step: int,
    data: Mapping[str, Mapping[str, object]],
    metrics: Mapping[str, SupportsFloat],
) -> Path:
    """Write ``<run>/eval/eval_<step>.json``, which replaces an older file. If the file cannot be
    written, this is logged and the run continues, because the figures are also in
    ``metrics.jsonl``.

    For each data set, the file contains its figures, the settings of the evaluation, and the
    rewards of each prompt in the order of the data file (null if a verifier gave no answer). The
    samples themselves are in ``samples/``.

    Args:
        step: Number of rollouts that were trained before this evaluation.
        data: ``data`` of ``RolloutFnEvalOutput``.
        metrics: The logged metrics of the evaluation.
    """
    # Figures, settings and rewards are put together for each data set.
    by_name = figures(metrics)
    sets = {
        name: {
            "metrics": {
                figure: _finite(value) if isinstance(value, SupportsFloat) else value
                for figure, value in by_name.get(name, {}).items()
            },
            "settings": part.get("settings") or {},
            "rewards": _rewards(part),
        }
        for name, part in data.items()
    }
    path = Path(run_dir) / "eval" / f"eval_{step:06d}.json"
    text = json.dumps({"step": step, "datasets": sets}, indent=1, default=str) + "\n"
    with best_effort("the evaluation's file"), replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _rewards(part: Mapping[str, object]) -> list[list[float | None]]:
    """Return the rewards of each prompt."""
    # The dict may come from an evaluation function of the user's.
    rewards = part["rewards"]
    n = part.get("n_samples_per_prompt") or 1
    if not isinstance(rewards, Iterable) or not isinstance(n, int):
        raise TypeError(
            f"invalid evaluation: rewards {rewards!r:.80}, n_samples_per_prompt {n!r:.80}"
        )
    values = [_finite(reward) for reward in rewards]
    return [values[i : i + n] for i in range(0, len(values), n)]


def _finite(value: SupportsFloat) -> float | None:
    """Return a number of any kind as a float; None for NaN and infinities, which JSON does not
    have.
    """
    number = float(value)
    return number if math.isfinite(number) else None


def evaluation_table(step: int, by_name: Figures) -> Table:
    """Return a table with one row per data set: reward, pass@k, share of truncated responses, mean
    length, and the number of missing rewards."""
    # Columns exist only if some data set has a value for them.
    ks = sorted(
        {int(key[5:]) for row in by_name.values() for key in row if key.startswith("pass@")}
    )
    unanswered = any(row.get("reward_missing_count") for row in by_name.values())
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold magenta")
    table.add_column(f"eval at {step}", no_wrap=True)
    for title in (
        "reward",
        *(f"pass@{k}" for k in ks),
        "cut",
        "length",
        *["no answer"] * unanswered,
    ):
        table.add_column(title, justify="right")
    for name, row in by_name.items():
        cells = [
            _cell(row.get("reward"), "{:.3f}"),
            *(_cell(row.get(f"pass@{k}"), "{:.3f}") for k in ks),
        ]
        cells += [
            _cell(row.get("truncated_ratio"), "{:.0%}"),
            _cell(row.get("response_len/mean"), "{:.1f}"),
        ]
        cells += [_cell(row.get("reward_missing_count"), "{:.0f}")] * unanswered
        table.add_row(name, *cells)
    return table


def _cell(value: SupportsFloat | None, form: str) -> str:
    return "" if value is None else form.format(float(value))
