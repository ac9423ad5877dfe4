"""Documented import path of ``Dataset``; the code is in :mod:`slime.data.dataset`."""

from slime.data.dataset import Dataset

__all__ = ["Dataset"]
