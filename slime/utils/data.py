"""Documented import path of ``Dataset`` and ``read_file``; the code is in :mod:`slime.data`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.data.dataset import Dataset
from slime.data.rows import read_rows

__all__ = ["Dataset", "read_file"]


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a ``.jsonl``, ``.parquet`` or ``.json`` file; ``path@[a:b]`` takes a slice
    of them.
    """
    return read_rows(path)
