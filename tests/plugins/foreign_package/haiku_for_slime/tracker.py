"""A tracker that writes a line for each row of metrics."""

from __future__ import annotations

from collections.abc import Mapping

from slime.observability.trackers import Tracked, Tracker


class Lines(Tracker):
    def __init__(self, run: Tracked) -> None:
        self.file = (run.folder / "lines.txt").open("w", encoding="utf-8")

    def log(self, numbers: Mapping[str, float], step: int, step_key: str) -> None:
        print(step_key, step, len(numbers), file=self.file, flush=True)

    def close(self) -> None:
        self.file.close()
