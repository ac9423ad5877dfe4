"""A rollout that generates nothing and keeps the engines running, to inspect them by hand."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NoReturn

from slime.observability import progress

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)


def sleep(args: Args, rollout_id: int, data_source: object, evaluation: bool = False) -> NoReturn:
    """Sleep until the run is stopped, at most ``--phase-timeout`` seconds.

    Raises:
        TimeoutError: The time is over.
    """
    seconds = args.phase_timeout
    logger.info("engines are up at %s:%s; sleeping", args.sglang_router_ip, args.sglang_router_port)
    start = time.monotonic()
    while (waited := time.monotonic() - start) < seconds:
        progress.report("sleep", int(waited), int(seconds))
        time.sleep(min(1.0, seconds - waited))
    raise TimeoutError(f"slept for {seconds:g} s (--phase-timeout), as {__name__}.sleep does")
