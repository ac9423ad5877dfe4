"""A sample of the cells of the campaign of strikes that has every pair of what a cell consists
of.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Sequence

from strike_cells import Cell, absent, price

Part = tuple[str, ...]


def parts(cell: Cell) -> set[Part]:
    """What a cell covers: each pair of mode, target, phase and signal, and (mode, phase,
    signal).
    """
    pairs = itertools.combinations((cell.mode, cell.target, cell.phase, cell.signal), 2)
    return {*pairs, (cell.mode, cell.phase, cell.signal)} - {(cell.mode, cell.signal)}


def missing(cells: Iterable[Cell], struck: Iterable[Cell]) -> set[Part]:
    """The parts of ``cells``, without those that have no process, that no cell of ``struck``
    covers.
    """
    asked = {part for cell in cells if not absent(cell) for part in parts(cell)}
    return asked - {part for cell in struck for part in parts(cell)}


def cover(cells: Sequence[Cell], struck: Collection[Cell], seed: int = 0) -> list[Cell]:
    """The fewest cells, as far as a greedy search finds them, that together with ``struck`` cover
    all parts.

    Each step takes the cell with the most parts that are still missing; of several, the cheapest;
    of these, one that ``seed`` chooses.
    """
    draw = random.Random(seed)
    order = {cell: (price(cell), draw.random()) for cell in cells if not absent(cell)}
    open_parts, taken = missing(cells, struck), []
    while open_parts:
        best = min(order, key=lambda cell: (-len(parts(cell) & open_parts), order[cell]))
        taken.append(best)
        open_parts -= parts(best)
    return sorted(taken, key=cells.index)
