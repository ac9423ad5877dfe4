"""The generated page of all flags is current and complete."""

from __future__ import annotations

import re

from slime.config.args import FLAGS
from slime.config.reference import PAGE, page


def without_readers(text: str) -> str:
    """Which files read a flag is checked in test_readers.py: moved code need not make this page anew."""
    works, heading, rest = text.partition("## Accepted with a notice")
    return re.sub(r"(?m) \| [^|]* \|$", "", works) + heading + rest


def test_page_is_current() -> None:
    assert without_readers(PAGE.read_text()) == without_readers(page()), "run: python -m slime.config.reference"


def test_page_names_every_flag_in_the_right_group() -> None:
    text = page()
    works, rest = text.split("## Accepted with a notice")
    notice, refused = rest.split("## Refused")
    for flag in FLAGS.values():
        where = {"works": works, "notice": notice}.get(flag.status, refused)
        assert f"`{flag.option}" in where, flag.option
