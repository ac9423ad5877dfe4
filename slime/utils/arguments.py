"""Documented import path: ``from slime.utils.arguments import parse_args``."""

from slime.config.parser import parse_args

__all__ = ["parse_args"]
