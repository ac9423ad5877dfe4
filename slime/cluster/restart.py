"""Restart from the last snapshot after the rollout manager, a training rank or Ray itself was lost.

Their state is in the snapshot and a resume is exact, so the driver ends what is left and asks its supervisor
(:mod:`slime.cluster.supervisor`) to execute the command line again, at most ``--max-restarts`` times.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from slime.cluster.polling import WaitExpired
from slime.cluster.ray_wait import NoStatus
from slime.cluster.supervisor import LOST_CODE

if TYPE_CHECKING:
    from slime.cluster.manager_client import ActorHandle

ASK_SECONDS = 5.0


def lost_parts(actors: Mapping[str, ActorHandle], error: Exception) -> list[str]:
    """What of a failed run died or stopped answering; empty if code is to blame, so that a restart would fail again.

    Args:
        actors: that hold the run's state, by what an error calls them.
    """
    import ray

    try:
        return _lost_actors(actors, error) if ray.is_initialized() else []
    except (ray.exceptions.RayError, RuntimeError, OSError):  # Ray itself cannot be asked.
        from_ray = isinstance(error, ray.exceptions.RayError | WaitExpired | OSError)
        return [f"the Ray cluster ({type(error).__name__})"] if from_ray else []


def report_loss(
    lost: Sequence[str], error: Exception, saved: int | None, left: int, note: Callable[[str], None]
) -> None:
    """Print the error, what was lost, where the run goes on, and how many restarts are left after this one."""
    where = "from where it began" if saved is None else f"from the snapshot of rollout {saved}"
    note("".join(traceback.format_exception(error)).rstrip())
    note(f"lost {', '.join(lost)}: going on {where} ({left} more restarts, --max-restarts)")


def _lost_actors(actors: Mapping[str, ActorHandle], error: Exception) -> list[str]:
    """A wait that expired while every actor answers is no loss: a restart would not be faster."""
    import ray

    asked = {actor.status.remote(): name for name, actor in actors.items()}
    if not asked:
        return []
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ASK_SECONDS)
    lost = [asked[answer] for answer in answered if _has_died(answer)]
    if isinstance(error, WaitExpired):
        lost += [f"{asked[ref]} (which does not answer)" for ref in silent]
    if not lost and isinstance(error, ray.exceptions.RayActorError | NoStatus) and not _failed_to_start(error):
        return [f"an answer ({type(error).__name__})"]
    return lost


def _has_died(answer: Any) -> bool:
    import ray

    try:
        ray.get(answer)
    except ray.exceptions.RayActorError as error:
        return not _failed_to_start(error)
    except ray.exceptions.RayError:  # it failed otherwise
        return False
    return False


def answers(actor: ActorHandle) -> bool:
    """Whether an actor answers ``status()`` within :data:`ASK_SECONDS`."""
    import ray

    try:
        ray.get(actor.status.remote(), timeout=ASK_SECONDS)
    except ray.exceptions.RayError:
        return False
    return True


def _failed_to_start(error: Exception) -> bool:
    """Whether an actor's constructor failed, which it would do again."""
    return "creation task" in str(error)


def exit_for_restart() -> NoReturn:
    """End this driver after its shutdown, with the exit code on which the supervisor starts it again."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(LOST_CODE)
