"""Prompts of a base model whose tokenizer begins texts with a token of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_args import make_args

from slime.data.sample import Sample
from slime.observability.files import take_warnings
from slime.rollout.prompts import prompt_ids
from slime.rollout.state import GenerateState


def _save_tokenizer(folder: Path, begins: bool) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<unk>": 0, "<bos>": 1, "two": 2, "plus": 3}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    if begins:
        words.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<bos>", unk_token="<unk>"
    ).save_pretrained(folder)


@pytest.mark.parametrize(
    ("begins", "prompt", "told"),
    [(True, "two plus two", 1), (True, "<bos>two plus two", 0), (False, "two plus two", 0)],
)
def test_a_prompt_without_the_first_token_is_told_once(
    tmp_path: Path, begins: bool, prompt: str, told: int
) -> None:
    _save_tokenizer(tmp_path, begins)
    args = make_args(hf_checkpoint=str(tmp_path))
    state = GenerateState(args)
    take_warnings()
    for text in (prompt, f"{prompt} plus two"):
        ids = prompt_ids(state, Sample(prompt=text))
        assert ids.count(1) == prompt.count("<bos>"), "prompts stay as they are"
    warnings = take_warnings()
    assert len(warnings) == told
    assert all("<bos>" in warning for warning in warnings)
