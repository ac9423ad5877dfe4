"""Documented import path of older logging functions; the code is in :mod:`slime.plugins.compat`."""

from slime.plugins.compat.helpers import TensorboardAdapter as _TensorboardAdapter

__all__ = ["_TensorboardAdapter"]
