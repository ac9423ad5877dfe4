"""Rows of metrics as a table, in a terminal, in a notebook and for pandas."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import Any

from slime.config.flag import did_you_mean

SHOWN = (
    "rollout/step",
    "eval/step",
    "rollout/raw_reward",
    "rollout/rewards",
    "train/loss",
    "train/grad_norm",
    "rollout/response_len/mean",
    "rollout/truncated_ratio",
    "perf/step_time",
)
"""Columns that are shown where a table is printed; all others are in the rows. Evaluations show all
``eval/`` ones.
"""
_MOST_ROWS = 40


class Table(list[dict[str, float | None]]):
    """A list of rows, each a dict of metrics by name; None for a number that is not finite."""

    @property
    def columns(self) -> list[str]:
        """The names in any row, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self for name in row))

    def column(self, name: str) -> list[float | None]:
        """The values of one metric, with None for rows that do not have it.

        Raises:
            KeyError: No row has it; the message has a similar name.
        """
        if name not in self.columns:
            raise KeyError(f"no row has {name!r}{did_you_mean(name, self.columns)}")
        return [row.get(name) for row in self]

    def to_pandas(self) -> Any:
        """Return a pandas data frame with all columns.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        import pandas

        return pandas.DataFrame(list(self), columns=self.columns)

    def _shown(self) -> list[str]:
        named = [name for name in SHOWN if name in self.columns]
        return named + [
            name
            for name in self.columns
            if name.startswith("eval/") and name.count("/") == 1 and name not in named
        ]

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        names = self._shown()
        return names, [[_text(row.get(name)) for name in names] for row in self[-_MOST_ROWS:]]

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table as RichTable

        # A fixed width, since a notebook and a log have none of their own.
        names, rows = self._cells()
        table = RichTable(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for name in names:
            table.add_column(_short(name), justify="right")
        for row in rows:
            table.add_row(*row)
        text = io.StringIO()
        Console(file=text, width=160, no_color=True, force_jupyter=False).print(table)
        return text.getvalue().rstrip("\n")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        names, rows = self._cells()
        head = _line("th", map(_short, names))
        body = "".join(_line("td", row) for row in rows)
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _line(tag: str, cells: Sequence[str] | map[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _short(name: str) -> str:
    group, _, rest = name.partition("/")
    return rest if group in ("rollout", "train", "perf") else name


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return str(int(value)) if float(value).is_integer() else f"{value:.4g}"
