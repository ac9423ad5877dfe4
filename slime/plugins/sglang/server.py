"""``python -m slime.plugins.sglang.server <SGLang's options>`` runs ``sglang.launch_server``, also
on a CPU.

SGLang starts its scheduler and detokenizer with the start method ``spawn``, so each of these
processes first runs the top level of this module. For this reason the stand-ins for the kernels
that are absent on a CPU are installed there.
"""

from __future__ import annotations

import functools
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from slime.engines.keys import ServerKeys
from slime.plugins.sglang.kernels import compile_meanwhile

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from slime.plugins.sglang.kernels import install, pin_nothing

    install()
    pin_nothing()


def add_keys(words: list[str]) -> None:
    """Append the keys of the environment to the arguments. The command line that other users see
    lacks them.
    """
    keys = ServerKeys.take_from_environment()
    options = {"--api-key": keys.api, "--admin-api-key": keys.admin}
    words += [f"{option}={key}" for option, key in options.items() if key]
    hide_in_logs([key for key in options.values() if key])


def hide_in_logs(secrets: Sequence[str]) -> None:
    """Replace ``secrets`` in all further log messages of this process, since SGLang logs all its
    arguments.
    """
    make = logging.getLogRecordFactory()

    def redacted(*values: Any, **more: Any) -> logging.LogRecord:
        record = make(*values, **more)
        try:
            message = record.getMessage()
        # arguments that do not fit the message; logging reports them
        except (TypeError, ValueError, KeyError):
            return record
        if any(secret in message for secret in secrets):
            record.msg = functools.reduce(
                lambda text, key: text.replace(key, "***"), secrets, message
            )
            record.args = ()
        return record

    if secrets:
        logging.setLogRecordFactory(redacted)


if __name__ == "__main__":
    add_keys(sys.argv)
    compile_meanwhile()
    runpy.run_module("sglang.launch_server", run_name="__main__")
