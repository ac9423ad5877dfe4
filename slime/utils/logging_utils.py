"""Documented import path of ``log``; the code is in :mod:`slime.observability.logging_utils`."""

from slime.observability.logging_utils import log

__all__ = ["log"]
