"""The lengths of responses that a run had."""

from __future__ import annotations

from pathlib import Path

from slime.observability.samples import read_samples, sample_files

MOST = 4096
"""Number of lengths that are kept: evenly from all, in ascending order."""


def measured_lengths(run: Path) -> tuple[int, ...]:
    """Read the response lengths of a run's samples.

    Returns:
        Up to :data:`MOST` lengths in tokens, in ascending order.

    Raises:
        ValueError: The folder has no samples, or a file of them is damaged.
    """
    found: list[int] = []
    for file in sample_files(run, "rollout").values():
        try:
            found += [int(row["response_length"]) for row in read_samples(file)]
        except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
            raise ValueError(f"{file} cannot be read ({type(error).__name__}: {error})") from error
    found.sort()
    if not found:
        raise ValueError(f"{run} has no samples/rollout_*.jsonl: give the folder of a run that finished a rollout")
    count = min(len(found), MOST)
    return tuple(max(found[(2 * i + 1) * len(found) // (2 * count)], 1) for i in range(count))
