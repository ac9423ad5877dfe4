"""``python tools/batch_page.py``: write docs/en/reference/batch.md from the table of the batch's entries."""

from __future__ import annotations

from pathlib import Path

from slime.data.fields import FIELDS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "en" / "reference" / "batch.md"


def page() -> str:
    """The table as Markdown, by the documented names."""
    lines = [
        "# The training batch",
        "",
        "<!-- Made by `python tools/batch_page.py`; do not edit. -->",
        "",
        "The dict `rollout_data` of `--custom-advantage-function-path` and `--rollout-data-postprocess-path` and the",
        "dict `batch` of `--custom-loss-function-path` hold these entries of one data-parallel rank. Entries per",
        "sample are lists in the rank's own order; entries per token are lists with one tensor per sample. Those in",
        "bold are always there. A converter or one of these functions may add entries of its own, which the functions",
        "that are called later find under the same name.",
        "",
        "| Entry | One value per | dtype | Contents |",
        "|---|---|---|---|",
    ]
    for field in FIELDS:
        name = f"**`{field.public_name}`**" if field.always else f"`{field.public_name}`"
        dtype = field.wire if field.tensor is None else field.tensor or "as given"
        lines.append(f"| {name} | {field.per} | {dtype or ''} | {field.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
