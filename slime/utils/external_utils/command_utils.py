"""Documented import path of older launch scripts in Python."""

from slime.plugins.compat.helpers import execute_train
from slime.utils.misc import exec_command

__all__ = ["exec_command", "execute_train"]
