"""The driver's parts over fakes at their edges: the rollout manager's actor, and the training
ranks.

Everything between (pool, trainer, snapshots, log, waits of one call) is the real code.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from make_args import make_args
from rich.console import Console

from slime.checkpoint.manifest import RunFacts
from slime.cluster.engine import EngineStatus
from slime.cluster.engine_pool import EnginePool, WeightClock
from slime.cluster.phases import Run, StepLog
from slime.cluster.ray_wait import ManagerClient
from slime.cluster.rollout_manager import RolloutBatch
from slime.cluster.snapshots import Snapshots
from slime.cluster.stop_signals import StopSignals
from slime.cluster.trainer import OldActor, Trainer
from slime.config.args import Args
from slime.observability.display import Display
from slime.weights.update import UpdateReport


class FakeManager:
    """An actor whose methods return at once, and write into ``said`` that they were called."""

    def __init__(self, said: list[str], serving: list[str], unsynced: list[str] = []) -> None:  # noqa: B006
        self.said, self.serving, self.unsynced = said, list(serving), list(unsynced)
        self.fatal: str | None = None
        self.fatal_when_lost: str | None = None
        self.found_dead: list[str] = []
        self.replacements: list[str] = []
        self.arguments: dict[str, list[tuple[Any, ...]]] = {}
        self.results: dict[str, Callable[..., Any]] = {
            "generate": lambda rollout_id: RolloutBatch([], {"rollout/id": float(rollout_id)}),
            "eval": lambda step: {"eval/gsm8k": 0.5},
            "close_account": lambda trained: {"trained": trained + 1},
            "shutdown": list,
            "lose_engines": self._lose,
            "start_lost_engines": self._start,
            "end_update": lambda urls: self._engines(),
            "begin_update": self._engines,
            "status": self._engines,
        }

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            if name == "on_engines":  # the function to call, and its arguments
                return getattr(self, arguments[0].__name__).remote(*arguments[1:])
            self.said.append(f"onload {', '.join(arguments[0])}" if name == "onload" else name)
            self.arguments.setdefault(name, []).append(arguments)
            return self.results.get(name, lambda *_: None)(*arguments)

        return SimpleNamespace(remote=remote)

    def _engines(self) -> EngineStatus:
        return EngineStatus(self.serving, self.unsynced, {}, self.fatal)

    def _lose(self, blamed: dict[str, str] | None) -> EngineStatus:
        gone = [*(blamed or {}), *self.found_dead]
        self.serving = [url for url in self.serving if url not in gone]
        if gone:
            self.fatal = self.fatal or self.fatal_when_lost
        return self._engines()

    def _start(self) -> EngineStatus:
        self.unsynced = self.replacements
        return self._engines()


class AtOnce:
    """In place of the waiter: the fakes' references are the results. ``stop`` is checked as in
    every wait.
    """

    def __init__(self, stop: StopSignals) -> None:
        self.stop = stop

    def get(self, refs: list[Any], what: str, deadline: float, **more: Any) -> list[Any]:
        self.stop.check()
        return refs


class FakeGroup:
    """The ranks of one role; ``fails`` are raised by the sends to come, one after the other."""

    host = "127.0.0.1"

    def __init__(self, role: str, said: list[str]) -> None:
        self.role, self.said = role, said
        self.ranks: list[Any] = []
        self.metrics: dict[str, float] = {}
        self.fails: list[BaseException] = []
        self.sent: list[list[str]] = []
        self.probed: list[list[str]] = []
        self.writing = False
        self.saves_fail: list[BaseException] = []  # raised when files are written

    def say(self, what: str) -> None:
        self.said.append(f"{self.role} {what}")

    def pop_spans(self) -> list[Any]:
        return []

    def sleep(self, keep_weights: bool = False) -> None:
        self.say("sleeps but for its weights" if keep_weights else "sleeps")

    def wake(self) -> None:
        self.say("wakes")

    def update_weights(
        self, urls: list[str], version: str, *_: Any, check_equal: bool = False
    ) -> UpdateReport:
        self.say(f"sends {version}" + (" again" if check_equal else ""))
        self.sent.append(list(urls))
        if self.fails:
            raise self.fails.pop(0)
        return UpdateReport(version, "nccl", nbytes=7)

    def check_probe(self, urls: list[str]) -> float:
        self.say("audits")
        self.probed.append(list(urls))
        return 0.25

    def run(
        self, method: str, rollout_id: int, refs: Any, entries: Any = None
    ) -> tuple[dict[str, Any], list[list[str]]]:
        self.say(f"{method}s")
        if method == "score":
            return {"metrics": {}, "timings": {"log_probs": 0.25}}, [["log-probs"]]
        return {"metrics": self.metrics, "timings": {"step": 0.5}}, [[f"{self.role}'s values"]]

    def begin(self, method: str, rollout_id: int, refs: Any, entries: Any = None) -> list[Any]:
        self.say(f"begins to {method}")
        self.given = entries
        return [method]

    def finish(self, started: list[Any], rollout_id: int) -> tuple[dict[str, Any], list[list[str]]]:
        self.say(f"has finished to {started[0]}")
        return {"metrics": self.metrics, "timings": {}}, [[f"{self.role}'s values"]]

    def entries_from(self, other: Any, entries: list[Any]) -> list[Any]:
        return entries

    def save(self, folder: Path) -> None:
        self.say("saves")
        if self.saves_fail:
            raise self.saves_fail.pop()
        (folder / self.role).mkdir()
        (folder / self.role / "state").write_text("weights")

    def is_saving(self) -> bool:
        return self.writing

    def repeat_save(self) -> None:
        self.say("saves again")

    def finish_save(self) -> list[Any]:
        self.say("has saved")
        if self.saves_fail:
            raise self.saves_fail.pop()
        return []

    def save_hf(self, directory: str) -> None:
        self.say(f"writes {directory}")

    def copy_weights(self, source: str, target: str) -> None:
        self.say(f"copies {source} to {target}")

    def memory(self) -> dict[str, float]:
        return {"gib": 1.0}


class Driver:
    """Everything that a started run consists of.

    Args:
        colocated: trainer and engines take turns on the accelerator.
        flags: of :func:`make_args`, in place of what suits most tests.
    """

    def __init__(
        self,
        colocated: bool = False,
        serving: list[str] = ["http://127.0.0.1:1"],  # noqa: B006
        critic: bool = False,
        trained: int | None = None,
        first_rollout: int = 0,
        num_rollout: int = 4,
        **flags: Any,
    ) -> None:
        values = {
            "seed": 7,
            "audit_weights": False,
            "offload_train": colocated,
            "offload_rollout": colocated,
        }
        self.args: Args = make_args().with_values(**(values | {"num_rollout": num_rollout} | flags))
        self.said: list[str] = []
        self.stop = StopSignals()
        self.printed = io.StringIO()
        self.log = StepLog(Display(console=Console(file=self.printed, width=500)))
        self.rows: list[tuple[str, int, dict[str, float]]] = []
        metrics: Any = SimpleNamespace(
            log=lambda values, step, key: self.rows.append((key, step, dict(values))),
            close=lambda: None,
        )
        self.log.begin_steps(metrics)
        self.actor, self.critic = (
            FakeGroup("actor", self.said),
            FakeGroup("critic", self.said) if critic else None,
        )
        self.actor_manager = FakeManager(self.said, serving)
        waiter: Any = AtOnce(self.stop)
        self.manager = ManagerClient(self.actor_manager, waiter, 10.0)
        old_actor = OldActor.from_args(self.args, asynchronous=False)
        groups: tuple[Any, Any] = self.actor, self.critic
        steps = self.args.num_critic_only_steps
        self.trainer = Trainer(
            *groups, old_actor, self.log, self.stop, self.args, self.args, steps, trained
        )
        self.pool = EnginePool(
            self.manager, self.trainer, self.log, list(serving), WeightClock(0, first_rollout),
            self.args, self.args,
        )  # fmt: skip
        facts = RunFacts(attempt=0, world_size=2, seed=self.args.seed, settings={})
        self.snapshots = Snapshots(
            self.args, facts, self.manager, self.trainer, self.pool, self.log, self.stop, trained
        )
        self.run = Run(
            self.args, first_rollout, num_rollout, manager=self.manager, trainer=self.trainer, pool=self.pool,
            snapshots=self.snapshots, log=self.log, stop=self.stop,
        )  # fmt: skip
        self.log.pending.clear()
