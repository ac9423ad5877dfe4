"""Documented import path of ``parse_args``; the code is in :mod:`slime.config.parser`."""

from slime.config.parser import parse_args

__all__ = ["parse_args"]
