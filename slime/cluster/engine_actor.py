"""A Ray actor that owns one inference server process on its node."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.cluster.engine_fleet import EngineHost
    from slime.cluster.placement import Placement
    from slime.config.args import Args

ENGINE_START_DEADLINE_SECONDS = 600.0
ACTOR_MARGIN_SECONDS = 120.0  # for the actor itself to start, and its placement
ASK_SECONDS = 30.0


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

    def kill(self) -> None:
        self.process.kill()

    def stop(self) -> None:
        self.process.stop()


class RayEngineHost:
    """The :class:`~slime.cluster.engine_fleet.EngineHost` of an :class:`EngineActor`; every call has a deadline."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def wait_ready(self) -> str:
        return str(self._get("wait_ready", ENGINE_START_DEADLINE_SECONDS + ACTOR_MARGIN_SECONDS))

    def describe(self) -> dict[str, Any]:
        return dict(self._get("describe"))

    def log_tail(self) -> str:
        return str(self._get("log_tail"))

    def kill(self) -> None:
        """The server first, then its actor; a node that is gone has neither."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            self._get("kill")
        ray.kill(self.actor)

    def stop(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            self._get("stop", ACTOR_MARGIN_SECONDS)

    def _get(self, method: str, seconds: float = ASK_SECONDS) -> Any:
        import ray

        return ray.get(getattr(self.actor, method).remote(), timeout=seconds)


def launcher(
    args: Args, placement: Placement, log_dir: Path, environment: dict[str, str]
) -> Callable[[int], EngineHost]:
    """Starts the engine of one slot in an actor on its place."""
    import ray

    def launch(index: int) -> EngineHost:
        options = placement.engine_options(index * args.rollout_num_gpus_per_engine)
        actor = (
            ray.remote(EngineActor)
            .options(**options, runtime_env={"env_vars": environment}, max_concurrency=3)
            .remote(args, index, str(log_dir))
        )
        return RayEngineHost(actor)

    return launch


def _host() -> str:
    """The address that trainers on other nodes reach; loopback on a private cluster."""
    import ray

    return str(ray.util.get_node_ip_address())
