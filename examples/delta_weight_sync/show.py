"""What each weight update cost: a hook that counts files, and a table of the run's metrics."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def count(args: Any, version_dir: str, rollout_engines: Sequence[str]) -> None:
    """``--custom-update-weight-post-write-path``: called on every rank once a version lies on disk
    whole, before an engine reads it. The place to copy it elsewhere; here it is measured and
    written down."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    folder = Path(version_dir)
    files = [file for file in folder.rglob("*") if file.is_file()]
    entry = {
        "version": folder.name,
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }
    with (Path(args.update_weight_disk_dir) / "written.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(entry) + "\n")


def rows(run: Path) -> list[tuple[int, float, float, float]]:
    """Step, bytes sent, changed bytes over all, and seconds that the engines stood still."""
    keys = (
        "perf/update_weights_wire_bytes",
        "perf/update_weights_density",
        "perf/update_weights_pause_time",
    )
    lines = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [
        (int(line["rollout/step"]), *(line[key] for key in keys))
        for line in lines
        if keys[0] in line
    ]


def main(run: Path, disk: Path) -> None:
    for line in (disk / "written.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        print(f"{entry['version']:>16}: {entry['files']} files, {entry['bytes'] / 1e6:8.2f} MB")
    print("step       sent   changed bytes   engines paused")
    for step, sent, density, pause in rows(run):
        print(f"{step:4} {sent / 1e6:7.2f} MB {density:14.2%} {pause:14.2f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
