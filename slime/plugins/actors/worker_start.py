"""Start a worker of a private Ray cluster, in place of Ray's own ``setup_worker.py``.

Ray's file imports Ray, sets the environment, and executes Python again, which imports Ray once
more: half a second of a core for each actor, for which the run waits. This one needs the standard
library only. It knows what slime asks of Ray for an actor: environment variables.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

CONTEXT = "--serialized-runtime-env-context="
LANGUAGE = "--language="


def command(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command of the worker, and the environment variables that its actor has asked for.

    Args:
        arguments: The file of Ray's worker and its arguments, and those that are for this program.
    """
    context = next((word for word in arguments if word.startswith(CONTEXT)), CONTEXT)
    settings = json.loads(context.removeprefix(CONTEXT) or "{}")
    own = [word for word in arguments if not word.startswith((CONTEXT, LANGUAGE))]
    variables = {
        name: os.path.expandvars(value) for name, value in (settings.get("env_vars") or {}).items()
    }
    return [settings.get("py_executable") or sys.executable, *own], variables


if __name__ == "__main__":
    words, environment = command(sys.argv[1:])
    os.execve(words[0], words, {**os.environ, **environment})
