"""The generated page of all flags is current and complete."""

from __future__ import annotations

from slime.config.args import FLAGS
from tools.flags_page import ALGORITHMS_PAGE, PAGE, algorithms_page, page


def test_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python tools/flags_page.py"


def test_the_table_of_estimators_is_made_from_their_classes() -> None:
    text = ALGORITHMS_PAGE.read_text()
    assert text == algorithms_page(text), "run: python tools/flags_page.py"
    assert (
        "| `rloo` |" not in (cut := text.replace("| `rloo` |", "| `forgotten` |"))
        and algorithms_page(cut) == text
    )
    assert "| your own " in text


def test_page_names_every_flag_in_the_right_group() -> None:
    text = page()
    works, rest = text.split("## Accepted with a notice")
    notice, refused = rest.split("## Refused")
    for flag in FLAGS.values():
        where = {"works": works, "notice": notice}.get(flag.status, refused)
        assert f"`{flag.option}" in where, flag.option
