"""Go on from the last snapshot where the rollout manager or a training rank has died.

Their state is in the snapshot and a resume is exact, so the driver ends what is left and executes its own command
line again, in the same process, at most ``--max-restarts`` times.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from slime.cluster.wait import WaitExpired
from slime.cluster.waiting import NoStatus

if TYPE_CHECKING:
    from slime.cluster.run import Run

ASK_SECONDS = 5.0
_OF_THE_FIRST_START = ("--ckpt-step", "--start-rollout-id", "--finetune")
_SWITCHES = ("--finetune",)


def goes_on(run: Run, error: Exception) -> bool:
    """Whether a failed run may begin again, since something died and no code is to blame; says so, with the error."""
    import ray

    lost = _lost(run, error) if run.args.max_restarts and ray.is_initialized() else []
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


def _never_was(error: Exception) -> bool:
    """Whether its constructor failed: it would again."""
    return "creation task" in str(error)


def restart(args: Any, saved: bool) -> NoReturn:
    """Execute the driver's command line again.

    Args:
        saved: ``--save`` holds a snapshot of this run: go on from it. Otherwise from where the run began.
    """
    command = [sys.executable, *command_line(sys.orig_argv[1:], vars(args), saved)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)


def command_line(words: Sequence[str], values: Mapping[str, Any], saved: bool) -> list[str]:
    """``words`` with the flags that make the run go on; a flag that stands later wins.

    Args:
        values: of the arguments ``max_restarts``, ``save``, ``run_name`` and ``output_dir``.
    """
    flags = ["--max-restarts", str(values["max_restarts"] - 1), "--run-name", str(values["run_name"])]
    flags += ["--output-dir", str(values["output_dir"])]
    if not saved:
        return [*words, *flags]
    kept, skip = [], False
    for word in words:
        name = word.partition("=")[0]
        if skip or name in _OF_THE_FIRST_START:
            skip = not skip and word in _OF_THE_FIRST_START and word not in _SWITCHES
            continue
        kept.append(word)
    return [*kept, *flags, "--load", str(values["save"])]
