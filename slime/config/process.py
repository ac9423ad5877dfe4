"""What the processes of a run need: the environment from which they import modules, a reduced one
for programs that need not know the secrets of the run, and an end with the process that started
them (on Linux).

:mod:`slime.plugins.agents.sandbox_child` has its own copy of :func:`kill_with_parent`, because it
runs with the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|TERM|TZ|LANG|LANGUAGE|LC_\w+|TMPDIR|TMP|TEMP|XDG_(CACHE|CONFIG|DATA)_HOME"
    r"|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH|(OMP|MKL)_\w+|TOKENIZERS_PARALLELISM"
    r"|SSL_CERT_(FILE|DIR)|(CURL|REQUESTS)_CA_BUNDLE|(https?|all|no)_proxy"
    r"|CUDA_\w+|NVIDIA_VISIBLE_DEVICES|HF_(HOME|HUB_CACHE|HUB_OFFLINE|ENDPOINT|DATASETS_CACHE)|TRANSFORMERS_OFFLINE",
    re.IGNORECASE,
)
"""Paths, languages, and what Python, CUDA and libraries of models need to run. None of them holds a
secret, except the address of a proxy, which may contain a password."""


def reduced_environment(environment: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that a program needs to run, and those named in ``more``.

    API keys and tokens are not among them: neither those of the user (``HF_TOKEN``,
    ``WANDB_API_KEY``, ``AWS_…``) nor those of the run. A variable that is passed is left out if its
    name is that of a secret, or if it is a URL with a user name.
    """
    # The supervisor imports this module, and must not need anything but the standard library.
    from slime.config.settings import is_secret

    def passed(name: str, value: str) -> bool:
        return (
            bool(_PASSED.fullmatch(name))
            and not is_secret(name)
            and not re.search(r"://[^/]*@", value)
        )

    return {
        name: value for name, value in environment.items() if name in more or passed(name, value)
    }


def import_environment(here: bool = True) -> dict[str, str]:
    """Return the variables with which processes find this package and, with ``here``, modules in
    the working directory.

    The latter come after all others (:mod:`slime`), so that a ``random.py`` there never takes the
    place of Python's.
    """
    places = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    places.append(str(Path(__file__).resolve().parents[2]))
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(places)),
        "SLIME_WORKING_DIRECTORY": os.getcwd() * here,
    }


def module_command(module: str) -> list[str]:
    """Return the command that runs a module as a program, without the working directory on its
    import path.
    """
    return [sys.executable, "-P", "-m", module]


POLL_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def kill_with_parent() -> None:
    """Let the kernel kill this process when the *thread* that started it ends.

    Use it only for children of a thread that lives as long as its process; other children use
    :func:`end_with_parent`. A parent that ended before this call is not noticed.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the new parent of descendants whose own parent ends, so that it can find
    and wait for them.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """End this process without clean-up once ``parent`` is no longer its parent.

    The parent process id changes when the parent dies for any reason, even by SIGKILL. A thread
    polls it each second, so unlike in :func:`kill_with_parent` it does not matter which thread of
    the parent started this process.

    Args:
        parent: The process id of the parent at the start of this process.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


ONE_AT_A_TIME = threading.RLock()
"""The lock for all that loads models and tokenizers. In an inline run, engine, trainer and rollout
manager load theirs on threads of one process, and the imports of transformers on two threads at
once can fail."""
