"""Memory and time of ``--streaming-data`` on a file that is made for it: check, open, shuffled
draws, resume.

    python benchmarks/streaming_data.py --gigabytes 5 --folder /tmp

Prints a line per phase with the process's peak memory so far; JSON last. The file is removed at the
end.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

TEXT = "A question with some words in it, and more of them. " * 18  # a row of about one kilobyte


def write(path: Path, size: float) -> int:
    """Rows until the file has ``size`` bytes; returns how many."""
    written = rows = 0
    with path.open("w", buffering=1 << 22) as file:
        while written < size:
            written += file.write(
                json.dumps({"prompt": f"{rows}: {TEXT}", "label": str(rows % 97)}) + "\n"
            )
            rows += 1
    return rows


class Phases:
    """Seconds and peak memory by phase, printed as they end."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, float]] = {}
        self.since = time.perf_counter()

    def end(self, name: str) -> None:
        now, peak = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.figures[name] = {"seconds": round(now - self.since, 2), "peak_mib": round(peak, 1)}
        print(f"{name:40} {now - self.since:8.1f} s   peak {peak:6.0f} MiB", flush=True)
        self.since = now


def walk(path: Path, rollouts: int) -> dict[str, Any]:
    """What a run does with the file, without engines and trainer."""
    from slime.config.args import Args
    from slime.config.resolve import resolve_defaults
    from slime.config.rules import Run
    from slime.data.dataset import Dataset
    from slime.data.sample import flatten
    from slime.data.source import RolloutDataSource
    from slime.data.validate import check_data
    from slime.rollout.rm_hub import check_label

    args = Args().with_values(
        prompt_data=str(path), streaming_data=True, input_key="prompt", label_key="label", rollout_shuffle=True,
        n_samples_per_prompt=8, rm_type="math",
    )  # fmt: skip
    resolve_defaults(Run(args))
    phases = Phases()
    assert check_data(args, check_label) == []
    phases.end("check before the start")
    data = Dataset(str(path), streaming=True)
    phases.end("open")
    source = RolloutDataSource(args, data)
    for _ in range(rollouts):
        source.get_samples(128)
    phases.end(f"{rollouts} shuffled rollouts of 128 x 8")
    state = source.state_dict()
    expected = [sample.prompt for sample in flatten(source.get_samples(300))]
    resumed = RolloutDataSource(args, Dataset(str(path), streaming=True))
    resumed.load_state_dict(state)
    assert [sample.prompt for sample in flatten(resumed.get_samples(300))] == expected
    phases.end("open again, resume, 300 prompts")
    resumed.load_state_dict({**state, "sample_offset": len(data) - 100})
    resumed.get_samples(200)
    phases.end("over the end of the epoch")
    return {"rows": len(data), "bytes": path.stat().st_size, "phases": phases.figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument(
        "--folder", default=None, help="where the file is made; default: the temporary folder"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "prompts.jsonl"
        write(path, options.gigabytes * 1e9)
        print(json.dumps(walk(path, options.rollouts)))


if __name__ == "__main__":
    main()
