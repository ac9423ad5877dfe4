"""``python -m slime.plugins.launch.wait_for_nodes N``: wait until the cluster of ``RAY_ADDRESS`` has N
nodes.
"""

from __future__ import annotations

import logging
import os
import sys
import time

SECONDS = 300.0


def wait_for_nodes(wanted: int, address: str, seconds: float = SECONDS) -> None:
    """Return when the Ray cluster has ``wanted`` nodes that are alive.

    Raises:
        SystemExit: It has fewer after ``seconds``.
    """
    import ray

    deadline = time.monotonic() + seconds
    there = 0
    last = ""
    while True:
        try:
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
            there = sum(bool(node["Alive"]) for node in ray.nodes())
            ray.shutdown()
        except Exception as error:  # the head has not started yet; Ray raises no class of its own
            last = f": {error}"
        if there >= wanted:
            return
        if time.monotonic() > deadline:
            raise SystemExit(
                f"after {seconds:.0f} s Ray has {there} of {wanted} nodes{last}; what `ray start` "
                "printed says why"
            )
        time.sleep(1.0)


if __name__ == "__main__":
    wait_for_nodes(int(sys.argv[1]), os.environ["RAY_ADDRESS"])
