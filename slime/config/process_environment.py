"""The environment of the processes of a run: where they import modules from, and what programs get which need not know
the secrets of the run."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.config.settings import is_secret

_PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|TERM|TZ|LANG|LANGUAGE|LC_\w+|TMPDIR|TMP|TEMP|XDG_(CACHE|CONFIG|DATA)_HOME"
    r"|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH|(OMP|MKL)_\w+|TOKENIZERS_PARALLELISM"
    r"|SSL_CERT_(FILE|DIR)|(CURL|REQUESTS)_CA_BUNDLE|(https?|all|no)_proxy"
    r"|CUDA_\w+|NVIDIA_VISIBLE_DEVICES|HF_(HOME|HUB_CACHE|HUB_OFFLINE|ENDPOINT|DATASETS_CACHE)|TRANSFORMERS_OFFLINE",
    re.IGNORECASE,
)
"""Paths, languages, and what Python, CUDA and libraries of models need to run. None of them holds a secret, except the
address of a proxy, which may contain a password."""


def reduced_environment(environment: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that a program needs to run, and those named in ``more``.

    API keys and tokens are not among them: neither those of the user (``HF_TOKEN``, ``WANDB_API_KEY``, ``AWS_…``) nor
    those of the run. A variable that is passed is left out if its name is that of a secret, or if it is a URL with a
    user name.
    """

    def passed(name: str, value: str) -> bool:
        return bool(_PASSED.fullmatch(name)) and not is_secret(name) and not re.search(r"://[^/]*@", value)

    return {name: value for name, value in environment.items() if name in more or passed(name, value)}


def import_environment(here: bool = True) -> dict[str, str]:
    """Return the variables with which processes find this package and, with ``here``, modules in the working directory.

    The latter come after all others (:mod:`slime`), so that a ``random.py`` there never takes the place of Python's.
    """
    package = str(Path(__file__).resolve().parents[2])
    known = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*known, package])),
        "SLIME_WORKING_DIRECTORY": os.getcwd() * here,
    }


def module_command(module: str) -> list[str]:
    """Return the command that runs a module as a program, without the working directory on its import path."""
    return [sys.executable, "-P", "-m", module]
