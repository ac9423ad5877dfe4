"""``python tools/batch_page.py``: write docs/en/reference/batch.md from the table of the batch's
entries.
"""

from __future__ import annotations

from pathlib import Path

from slime.data.fields import FIELDS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "en" / "reference" / "batch.md"


def page() -> str:
    """A list for each kind of entries."""
    lines = [
        "# The training batch",
        "",
        "<!-- Made by `python tools/batch_page.py`; do not edit. -->",
        "",
        "The dict `rollout_data` of `--custom-advantage-function-path` and "
        "`--rollout-data-postprocess-path` and the",
        "dict `batch` of `--custom-loss-function-path` hold these entries of one data-parallel "
        "rank. Entries per",
        "sample are lists in the rank's own order; entries per token are lists with one tensor "
        "per sample. Those in",
        "bold are always there. One of these functions may add entries of its own, which those "
        "that are called later",
        "find under the same name.",
    ]
    for per in dict.fromkeys(field.per for field in FIELDS):
        lines += ["", f"## One value per {per}" if per != "other" else "## Other forms", ""]
        for field in (field for field in FIELDS if field.per == per):
            name = f"**`{field.name}`**" if field.always else f"`{field.name}`"
            dtype = field.wire if field.tensor is None else field.tensor or "as given"
            lines.append(f"- {name}{f' ({dtype})' if dtype else ''}: {field.meaning}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
