"""What a model says while it still reasons is not paid, whoever opened the reasoning and whatever
its tags are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rollout_parts import arguments, make_tokenizer

from slime.data.reasoning import ALL_TAGS, Tags
from slime.data.sample import Sample
from slime.data.tokenizers import load_tokenizer
from slime.plugins.tools.dry_run import own_answer
from slime.rollout.rm_hub import async_rm

FOLLOWED = {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["Paris"]}]}
BUYS: dict[str, tuple[str, object, dict[str, Any]]] = {
    "math": (r"\boxed{12}", "12", {}),
    "deepscaler": (r"\boxed{12}", "12", {}),
    "dapo": ("Answer: 12", "12", {}),
    "f1": ("Paris", "Paris", {}),
    "gpqa": ("answer: B", "B", {}),
    "last_number": ("It is 12", "12", {}),
    "ifbench": ("Paris", None, FOLLOWED),
    "code": ("```python\nprint(12)\n```", '[{"input": "", "output": "12"}]', {}),
}
BUYS |= {
    "boxed_math": BUYS["math"],
    "boxed_deepscaler": BUYS["deepscaler"],
    "boxed_dapo": (r"\boxed{12}", "12", {}),
    "boxed_f1": (r"\boxed{Paris}", "Paris", {}),
    "boxed_last_number": (r"\boxed{12}", "12", {}),
}
"""For each type: an answer that is paid, its label and metadata."""


@pytest.fixture(scope="module")
def opening(tmp_path_factory: pytest.TempPathFactory) -> dict[Tags, Path]:
    """A checkpoint for each pair of tags, whose chat template opens the reasoning in the generation
    prompt.
    """
    folders = {}
    for tags in ALL_TAGS:
        folder = folders[tags] = make_tokenizer(tmp_path_factory.mktemp("opening"))
        template = folder / "chat_template.jinja"
        template.write_text(
            template.read_text().replace("<assistant>", f"<assistant>{tags.start}\n")
        )
        (folder / "config.json").write_text("{}")
    return folders


async def score(folder: Path | None, rm_type: str, sample: Sample) -> float:
    args = arguments(folder or "", rm_type=rm_type, **({} if folder else {"hf_checkpoint": None}))
    reward = await async_rm(args, sample)
    return max(reward["score"], 0.0) if isinstance(reward, dict) else reward


@pytest.mark.parametrize("tags", ALL_TAGS)
@pytest.mark.parametrize("rm_type", BUYS)
@pytest.mark.parametrize("form", ["tokens", "messages", "text", "no model", "said"])
async def test_an_answer_in_unfinished_reasoning_is_not_paid(
    opening: dict[Tags, Path], tags: Tags, rm_type: str, form: str
) -> None:
    answer, label, metadata = BUYS[rm_type]
    prompt: Any = f"<user>q<assistant>{tags.start}\n"
    folder = None if form == "no model" else opening[tags]
    if form in ("messages", "tokens"):
        prompt = [{"role": "user", "content": "q"}]
    start = tags.start if form == "said" else ""
    for text, paid in ((f"{start}{answer}", 0.0), (f"{start}hm{tags.end}{answer}", 1.0)):
        sample = Sample(
            prompt="q" if form == "said" else prompt,
            response=text,
            label=label,
            metadata=dict(metadata),
        )
        if form == "tokens":
            tokenizer = load_tokenizer(opening[tags])
            ids = tokenizer.encode(text)
            sample.tokens = (
                tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
                + ids
            )
            sample.prompt, sample.response_length = "an agent's task", len(ids)
        assert await score(folder, rm_type, sample) == paid, text


async def test_a_later_turn_that_its_template_opened_is_not_paid_for_an_earlier_answer(
    opening: dict,
) -> None:
    tags, folder = next(iter(opening.items()))
    turns = f"hm{tags.end}12</><user>sure?</><assistant>{tags.start}\n12, or 13"
    sample = Sample(prompt=f"<user>q<assistant>{tags.start}\n", response=turns, label="12")
    assert await score(folder, "last_number", sample) == 0.0
    sample.response += f"{tags.end}12"
    assert await score(folder, "last_number", sample) == 1.0


@pytest.mark.parametrize(
    "rm_type", ["math", "deepscaler", "dapo", "f1", "gpqa", "last_number", "boxed_f1"]
)
async def test_the_dry_runs_own_answer_ends_the_reasoning_that_the_prompt_opened(
    opening: dict, rm_type: str
) -> None:
    _, label, metadata = BUYS[rm_type]
    for tags, folder in opening.items():
        sample = Sample(prompt=[{"role": "user", "content": "q"}], label=label, metadata=metadata)
        sample.response = own_answer(arguments(folder, rm_type=rm_type), sample) or ""
        assert await score(folder, rm_type, sample) == 1.0, tags
