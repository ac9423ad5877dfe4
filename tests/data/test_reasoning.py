"""The answer after the reasoning, for the tags of every model."""

from __future__ import annotations

import pytest

from slime.data.reasoning import (
    ALL_TAGS,
    TAGS,
    THINK,
    Tags,
    after_thinking,
    answer_after_reasoning,
    opened_by,
)
from slime.plugins.agents.config import REASONING_PARSERS


def test_every_parser_that_the_flag_accepts_has_its_tags() -> None:
    assert set(TAGS) == set(REASONING_PARSERS)


@pytest.mark.parametrize("tags", ALL_TAGS)
def test_the_answer_is_what_follows_the_last_reasoning(tags: Tags) -> None:
    start, end = tags
    assert after_thinking(f"{start}5{end}6") == after_thinking(f"5{end}6", tags) == "6"
    assert after_thinking(f"{start}5{end}6{start}7{end}8") == "8"
    for unfinished in (f"{start}5", f"{start}5{end}6{start}7", f"6{start}7"):
        assert after_thinking(unfinished) == after_thinking(unfinished, tags) == ""
    assert after_thinking("5") == "5" and after_thinking("5", tags) == ""


@pytest.mark.parametrize("tags", ALL_TAGS)
@pytest.mark.parametrize("space", ["", "\n", " \n\n"])
def test_a_prompt_opens_the_reasoning_if_it_ends_with_the_start_tag(tags: Tags, space: str) -> None:
    assert opened_by(f"<assistant>{tags.start}{space}") == tags
    assert opened_by(f"{tags.start}{space}{tags.end}{space}") is None
    assert opened_by(f"What is {tags.start}?{space}") is None and opened_by("") is None


def test_deepscaler_reads_what_follows_the_reasoning_or_its_own_mark() -> None:
    assert answer_after_reasoning("5[/THINK]6") == "6" == answer_after_reasoning("5</think>6")
    assert answer_after_reasoning("5###Response6") == "6" and answer_after_reasoning("6") is None
    assert answer_after_reasoning(f"{THINK.start}5###Response6") == ""
