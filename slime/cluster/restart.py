"""Go on from the last snapshot where the rollout manager, a training rank or Ray itself was lost.

Their state is in the snapshot and a resume is exact, so the driver ends what is left and asks its supervisor
(:mod:`slime.cluster.supervisor`) to execute the command line again, at most ``--max-restarts`` times.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from slime.cluster.supervisor import LOST_CODE, REPORTS
from slime.cluster.wait import WaitExpired
from slime.cluster.waiting import NoStatus

if TYPE_CHECKING:
    from slime.cluster.run import Run

ASK_SECONDS = 5.0


def goes_on(run: Run, error: Exception) -> bool:
    """Whether a failed run may begin again, since something died and no code is to blame; says so, with the error."""
    import ray

    lost: list[str] = []
    if run.args.max_restarts and REPORTS.attached:
        try:
            lost = _lost(run, error) if ray.is_initialized() else []
        except (ray.exceptions.RayError, RuntimeError, OSError):  # there is nobody to ask
            from_ray = isinstance(error, ray.exceptions.RayError | WaitExpired | OSError)
            lost = [f"the Ray cluster ({type(error).__name__})"] if from_ray else []
    if lost:
        where = "from where it began" if run.saved is None else f"from the snapshot of rollout {run.saved}"
        left = run.args.max_restarts - 1
        run.display.note("".join(traceback.format_exception(error)).rstrip())
        run.display.note(f"lost {', '.join(lost)}: going on {where} ({left} more restarts, --max-restarts)")
    return bool(lost)


def _lost(run: Run, error: Exception) -> list[str]:
    """What died or fell silent. A wait that expired while everybody answers is no loss: a restart would not be
    faster."""
    import ray

    named = {"the rollout manager": run.manager} if run.manager is not None else {}
    for group in run.groups:
        named |= {f"the {group.role}'s rank {number}": rank for number, rank in enumerate(group.ranks)}
    asked = {actor.status.remote(): name for name, actor in named.items()}
    if not asked:
        return []
    answers, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ASK_SECONDS)
    lost = [asked[answer] for answer in answers if _has_died(answer)]
    if isinstance(error, WaitExpired):
        lost += [f"{asked[ref]} (which does not answer)" for ref in silent]
    if not lost and isinstance(error, ray.exceptions.RayActorError | NoStatus) and not _never_was(error):
        return [f"an answer ({type(error).__name__})"]
    return lost


def _has_died(answer: Any) -> bool:
    import ray

    try:
        ray.get(answer)
    except ray.exceptions.RayActorError as error:
        return not _never_was(error)
    except ray.exceptions.RayError:  # it failed otherwise
        return False
    return False


def answers(actor: Any) -> bool:
    """Whether an actor says within :data:`ASK_SECONDS` what it is doing."""
    import ray

    try:
        ray.get(actor.status.remote(), timeout=ASK_SECONDS)
    except ray.exceptions.RayError:
        return False
    return True


def _never_was(error: Exception) -> bool:
    """Whether its constructor failed: it would again."""
    return "creation task" in str(error)


def end_lost() -> NoReturn:
    """End this driver at once, after its shutdown: the supervisor runs it again."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(LOST_CODE)
