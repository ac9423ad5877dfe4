"""The tables of docs/en/models.md are what tiny random models of every family do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import models_page
from every_family import FAMILIES
from needs import ALL

from slime.models.layer_kinds import all_kinds

TEXT = models_page.PAGE.read_text(encoding="utf-8")


def test_the_page_lists_what_the_configs_say() -> None:
    """The model types, the kinds of layers, what is refused because of them, and the Megatron
    maps.
    """
    assert models_page.table() in TEXT, "run python tools/models_page.py"
    assert len(models_page.RAN.findall(TEXT)) == 1


def test_the_page_lists_the_kinds() -> None:
    lines = TEXT.splitlines()
    start = (
        lines.index("| kind of layer | in a pack | context parallelism (FSDP) | embedded engine |")
        + 2
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[start : lines.index("", start)]
    ]
    assert [row[0] for row in rows] == [kind.name for kind in all_kinds()]
    for (_, pack, context, _), kind in zip(rows, all_kinds(), strict=True):
        assert (
            ("as a batch" in pack)
            == context.startswith("whole sequences are dealt out")
            == (bool(kind.mixers) and not kind.indexers)
        ), kind.name
        assert ("Ulysses" in context) == (kind.shares is not None), kind.name


@pytest.mark.more
@pytest.mark.slow
def test_every_family_does_what_the_page_says(tmp_path: Path) -> None:
    """Packed with tied and untied embeddings, padded, and in the embedded engine.

    At each commit every second family has the one, and the others the other; in the long circle it
    is the other way round.
    """
    for number, family in enumerate(FAMILIES):
        tied = (number % 2 == 1) != ALL
        models_page.check_family(family, tmp_path / family, (tied,))
