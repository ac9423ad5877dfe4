"""Documented import path of ``run(coroutine)``; the code is in :mod:`slime.engines.background`."""

from slime.engines.background import background_loop, run

__all__ = ["background_loop", "run"]
