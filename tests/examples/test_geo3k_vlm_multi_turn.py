"""A second look reaches engine and sample alike: ids, masks and pixels of both images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from figure_samples import geometry, look, make_sample, save_model, trained_log_probs
from in_process_engine import rollout_args, serving
from make_args import make_args

from slime.data.sample import Sample
from slime.models.loading import load_hf_config
from slime.plugins.agents.conversation import Conversation
from slime.rollout.generate import build_generate_body
from slime.rollout.prompts import prompt_ids
from slime.rollout.state import GenerateState


@pytest.fixture(scope="module", params=geometry.ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(request.param, tmp_path_factory.mktemp("geometry"))


def placeholder(model: Path) -> str:
    """What stands for an image in a text."""
    kind = str(load_hf_config(model).model_type)
    if kind.startswith("qwen"):
        return "<|vision_start|><|image_pad|><|vision_end|>"
    return "<boi>" if kind == "gemma3" else "<image>"


async def test_a_wrong_answer_is_followed_by_the_figure_again(tiny: Path, tmp_path: Path) -> None:
    async with serving(tiny) as url:
        args = rollout_args(
            tiny,
            url,
            max_turns=2,
            rm_type="last_number",
            answer_tokens=2,
            rollout_max_response_len=64,
        )
        params = {
            "temperature": 1.0,
            "max_new_tokens": 64,
            "sampling_seed": 5,
            "skip_special_tokens": False,
        }
        asked = make_sample(tmp_path)
        shared = asked.multimodal_inputs
        # a random model: its answers are no numbers
        sample = await look.generate(args, asked, params)
    turns = sample.metadata["model_turns"]
    assert (
        len(turns) == 2
        and len(shared["images"]) == 1
        and len(sample.multimodal_inputs["images"]) == 2
    )
    config = load_hf_config(tiny)
    assert sample.tokens.count(config.image_token_id) == 2 * 25
    pixels = sample.multimodal_train_inputs["pixel_values"]
    first, second = pixels.chunk(2)
    assert first.shape == second.shape and (first != second).any()
    if "image_grid_thw" in sample.multimodal_train_inputs:
        assert sample.multimodal_train_inputs["image_grid_thw"].tolist() == [[1, 10, 10]] * 2
    mask = sample.loss_mask
    own = [i for turn in turns for i in range(turn["start"], turn["end"])]
    assert [i for i, m in enumerate(mask) if m] == own and len(mask) == sample.response_length
    assert [log == 0.0 for log in sample.rollout_log_probs] == [not m for m in mask]
    assert f"<user>{placeholder(tiny)}No.<assistant>" in sample.response
    assert trained_log_probs(tiny, sample) == pytest.approx(
        [log for log, kept in zip(sample.rollout_log_probs, mask, strict=True) if kept], abs=1e-4
    )
    assert await look.score(args, sample) == 0.0


async def test_an_image_that_the_model_writes_itself_is_no_part_of_its_turn(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, soft = (
        rollout_args(tiny, "http://127.0.0.1:1", max_turns=2),
        load_hf_config(tiny).image_token_id,
    )
    processor = GenerateState(args).processor
    image = processor.image_token

    async def engine(args: Any, sample: Sample, params: dict[str, Any]) -> None:
        stop = {"finish_reason": {"type": "stop", "matched": processor.image_token_id}}
        tokens, logs = [30, processor.image_token_id], [-1.0, -2.0]
        sample.append_response_tokens(
            args, tokens=tokens, log_probs=logs, meta_info=stop, text=f"={image}"
        )

    monkeypatch.setattr("slime.plugins.agents.conversation.generate", engine)
    sample = make_sample(tmp_path)
    talk = Conversation(args, sample, {"max_new_tokens": 200})
    assert (
        await talk.turn() == "=" and sample.loss_mask == [1] and sample.rollout_log_probs == [-1.0]
    )
    assert talk.reply([{"role": "user", "content": sample.prompt[0]["content"]}])
    assert await talk.turn() == "=" and sample.response.count(image) == 1
    assert sample.tokens.count(soft) == 2 * 25, (
        "as many as two images have: an engine can carry that"
    )
    assert sum(sample.loss_mask) == 2 and len(sample.loss_mask) == sample.response_length


@pytest.mark.parametrize(("answer", "words"), [("1", "More."), ("3<eos>", "Less."), ("a", "No.")])
def test_hints(answer: str, words: str) -> None:
    assert look.hint(answer, "2") == words


async def test_a_later_answer_is_worth_less() -> None:
    async def reward(*answers: str) -> float:
        turns: list[dict[str, Any]] = [{"text": text} for text in answers]
        sample = Sample(index=0, label="2", metadata={"model_turns": turns})
        return await look.score(make_args(rm_type="last_number"), sample)

    assert [
        await reward("2"),
        await reward("3", "2<eos>"),
        await reward("3", "1"),
        await reward(),
    ] == [1, 0.5, 0, 0]


async def test_a_reply_with_an_image_closes_the_turn_once_in_text_and_ids(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer gets the ids of a sample with images, SGLang the ids with one placeholder for
    each image, or the text of Gemma 3's: all hold the turn's end once."""
    args = rollout_args(tiny, "http://127.0.0.1:1", max_turns=2, rollout_backend="sglang")
    state = GenerateState(args)
    tokenizer, image = state.tokenizer, state.processor.image_token_id

    async def engine(args: Any, sample: Sample, params: dict[str, Any]) -> None:
        tokens = [*tokenizer("3", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        finish = {"finish_reason": {"type": "stop", "matched": tokenizer.eos_token_id}}
        sample.append_response_tokens(
            args, tokens=tokens, log_probs=[-1.0] * 2, meta_info=finish, text="3"
        )

    monkeypatch.setattr("slime.plugins.agents.conversation.generate", engine)
    sample = make_sample(tmp_path)
    talk = Conversation(args, sample, {"max_new_tokens": 200})
    await talk.turn()
    assert talk.reply([{"role": "user", "content": sample.prompt[0]["content"]}])
    assert sample.response == f"3<eos><user>{placeholder(tiny)}How long is a side?<assistant>"
    asked = f"<user>{placeholder(tiny)}How long is a side?<assistant>"
    text = f"{asked}3<eos>{asked}"
    body = build_generate_body(state, sample, {"max_new_tokens": 8})
    assert len(body["image_data"]) == 2
    # the processor's ids hold more than the text: lines before and after the image
    if placeholder(tiny) == "<boi>":
        assert body["text"] == text and "input_ids" not in body
        return
    assert tokenizer.decode(body["input_ids"]) == text and "text" not in body
    repeated = [token for token in body["input_ids"] for _ in range(25 if token == image else 1)]
    assert repeated == sample.tokens


async def test_images_without_a_token_between_them_go_to_sglang_as_text(tmp_path: Path) -> None:
    """How many of the placeholders belong to which image is not told by the ids."""
    tiny = save_model("llava", tmp_path)
    args = rollout_args(tiny, "http://127.0.0.1:1", rollout_backend="sglang")
    state = GenerateState(args)
    sample = make_sample(tmp_path)
    pair = {"images": sample.multimodal_inputs["images"] * 2}
    for between, folds in (("", False), ("a", True)):
        asked = Sample(prompt=f"<image>{between}<image>b", multimodal_inputs=pair)
        asked.tokens = prompt_ids(state, asked)
        body = build_generate_body(state, asked, {})
        assert ("input_ids" in body, "text" in body) == (folds, not folds)
        assert len(asked.tokens) == 51 + folds and (
            not folds or body["input_ids"] == [258, 66, 258, 67]
        )
