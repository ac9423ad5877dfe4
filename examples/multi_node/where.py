"""Which node does what: hooks that write it down, a wait for the cluster's nodes, and the report.

python where.py wait 2          until so many nodes have joined the cluster of RAY_ADDRESS
python where.py report RUN_DIR  what the hooks wrote
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

JOIN_SECONDS = 120.0
FILE = "where.jsonl"


def trainer(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """``--rollout-data-postprocess-path``: called in every training process, each on its node."""
    import ray

    samples = len(rollout_data["response_lengths"])
    _note(
        args,
        rollout_id,
        f"trainer rank {os.environ['RANK']}",
        ray.util.get_node_ip_address(),
        samples,
    )


def engines(
    rollout_id: int, args: Any, samples: list[Any], metrics: dict[str, Any], rollout_time: float
) -> bool:
    """``--custom-rollout-log-function-path``: called in the rollout manager; the usual metrics
    follow.
    """
    _note(args, rollout_id, "engine", str(args.sglang_router_ip), len(samples))
    return False


def _note(args: Any, step: int, who: str, node: str, samples: int) -> None:
    """One line; nodes of a real cluster share the output folder, or each keeps its own lines."""
    path = Path(args.output_dir) / args.run_name / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "who": who, "node": node, "samples": samples}) + "\n")


def report(run_dir: Path) -> list[str]:
    """Of each process its node and the number of samples that it handled in each step."""
    rows = [json.loads(line) for line in (run_dir / FILE).read_text(encoding="utf-8").splitlines()]
    counts: dict[tuple[str, str], list[int]] = {}
    for row in sorted(rows, key=lambda row: (row["who"], row["step"])):
        counts.setdefault((row["who"], row["node"]), []).append(row["samples"])
    return [
        f"{who:<14} on {node:<15} samples by step: {given}" for (who, node), given in counts.items()
    ]


def wait(count: int) -> list[str]:
    """Addresses of the nodes, once ``count`` have joined.

    Raises:
        SystemExit: fewer after two minutes.
    """
    import ray

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
    until = time.monotonic() + JOIN_SECONDS
    while (
        len(nodes := [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]) < count
    ):
        if time.monotonic() > until:
            sys.exit(
                f"{len(nodes)} of {count} Ray nodes have joined after {JOIN_SECONDS:.0f} s: "
                f"{', '.join(nodes)}"
            )
        time.sleep(0.5)
    return sorted(nodes)


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        print("Ray nodes:", *wait(int(sys.argv[2])))
    else:
        print("\n".join(report(Path(sys.argv[2]))))
