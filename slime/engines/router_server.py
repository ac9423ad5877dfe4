"""``python -m slime.engines.router_server <options>`` runs sglang-router with the keys of the
environment.

The options are those of ``sglang_router.launch_router``, which takes keys only on its command line.
"""

from __future__ import annotations

import os
import sys

from slime.engines.keys import CONTROL_VARIABLE, ServerKeys


def main(words: list[str]) -> None:
    keys = ServerKeys.take_from_environment()
    from sglang_router.launch_router import launch_router, parse_router_args

    control = os.environ.pop(CONTROL_VARIABLE, "").splitlines()
    options = parse_router_args(
        [*words, "--control-plane-api-keys", *control] if control else words
    )
    options.api_key = keys.api
    launch_router(options)


if __name__ == "__main__":
    main(sys.argv[1:])
