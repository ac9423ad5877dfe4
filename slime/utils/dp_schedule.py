"""Documented import path of the data-parallel schedule; the code is in :mod:`slime.data.schedule`."""

from slime.data.schedule import build_dp_schedule

__all__ = ["build_dp_schedule"]
