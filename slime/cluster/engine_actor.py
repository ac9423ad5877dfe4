"""A Ray actor that owns one inference server process on its node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.config.args import Args

ENGINE_START_DEADLINE_SECONDS = 600.0


class EngineActor:
    """Starts the server, answers for its health, and stops it; the server dies with this process."""

    def __init__(self, args: Args, index: int, log_dir: str) -> None:
        from slime.cluster.logs import redirect_output
        from slime.engines.process import start_embedded_engine

        redirect_output(Path(log_dir), f"engine-actor-{index}")
        self.process = start_embedded_engine(args, index, host=_host(), log_path=Path(log_dir) / f"engine-{index}.log")

    def wait_ready(self) -> str:
        """Block until the server answers; returns its URL. Raises with the server's last log lines."""
        self.process.wait_ready(ENGINE_START_DEADLINE_SECONDS)
        return self.process.url

    def describe(self) -> dict[str, object]:
        """URL, process id and whether it lives."""
        return {"url": self.process.url, "pid": self.process.pid, "alive": self.process.alive()}

    def log_tail(self) -> str:
        return self.process.log_tail()

    def stop(self) -> None:
        self.process.stop()


def _host() -> str:
    """The address that trainers on other nodes reach; loopback on a private cluster."""
    import ray

    return str(ray.util.get_node_ip_address())
