"""A second look reaches engine and sample alike: ids, masks and pixels of both images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from example_scripts import load_example
from in_process_engine import rollout_args, serving
from make_args import make_args

from slime.data.sample import Sample
from slime.models.decoder import backbone_of
from slime.models.inputs import InputBuilder
from slime.models.loading import load_hf_config, load_hf_model
from slime.models.packed_attention import NAME as PACKED
from slime.models.scorer import PolicyScorer
from slime.rollout.multi_turn import Conversation
from slime.rollout.state import GenerateState

look = load_example("geo3k_vlm_multi_turn/second_look.py")
FIGURE = {"side": 2, "left": 1, "top": 0, "colour": "navy"}


@pytest.fixture(scope="module", params=["llava", "gemma3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    geometry = load_example("geo3k_vlm/geometry.py")
    folder = tmp_path_factory.mktemp("geometry")
    model, processor = geometry.make_model(seed=1, architecture=request.param)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def make_sample(tmp_path: Path) -> Sample:
    image = str(tmp_path / "figure.png")
    look.Square(**FIGURE).draw().save(image)
    content = [{"type": "image", "image": image}, {"type": "text", "text": "How long is a side?"}]
    return Sample(
        index=0, group_index=0, prompt=[{"role": "user", "content": content}], label="2",
        multimodal_inputs={"images": [image]}, metadata={"figure": FIGURE},
    )  # fmt: skip


def placeholder(model: Path) -> str:
    """What stands for an image in a text."""
    return "<boi>" if load_hf_config(model).model_type == "gemma3" else "<image>"


@torch.no_grad()
def trained_log_probs(model: Path, sample: Sample) -> list[float]:
    """The log-probs of the model's own tokens, as the trainer computes them."""
    attention = {"": "sdpa", "text_config": PACKED, "vision_config": "sdpa"}
    loaded = load_hf_model(model, torch.float32, "cpu", attention)
    builder = InputBuilder(backbone_of(loaded), torch.device("cpu"))
    tokens, media = torch.tensor(sample.tokens), sample.multimodal_train_inputs
    scores = PolicyScorer(loaded)(builder.build([tokens], [sample.response_length], [0], [media]))[0].log_probs
    return scores[torch.tensor(sample.loss_mask) == 1].tolist()


async def test_a_wrong_answer_is_followed_by_the_figure_again(tiny: Path, tmp_path: Path) -> None:
    async with serving(tiny) as url:
        args = rollout_args(tiny, url, max_turns=2, rm_type="last_number", answer_tokens=2, rollout_max_response_len=64)
        params = {"temperature": 1.0, "max_new_tokens": 64, "sampling_seed": 5, "skip_special_tokens": False}
        asked = make_sample(tmp_path)
        shared = asked.multimodal_inputs
        sample = await look.generate(args, asked, params)  # a random model: its answers are no numbers
    turns = sample.metadata["model_turns"]
    assert len(turns) == 2 and len(shared["images"]) == 1 and len(sample.multimodal_inputs["images"]) == 2
    config = load_hf_config(tiny)
    assert sample.tokens.count(config.image_token_id) == 2 * 25
    pixels = sample.multimodal_train_inputs["pixel_values"]
    assert pixels.shape == (2, 3, 40, 40) and (pixels[0] != pixels[1]).any()
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
    image, soft = placeholder(tiny), load_hf_config(tiny).image_token_id

    async def engine(args: Any, sample: Sample, params: dict[str, Any]) -> None:
        stop = {"finish_reason": {"type": "stop", "matched": 258}}
        tokens, logs = [30, 258], [-1.0, -2.0]
        sample.append_response_tokens(args, tokens=tokens, log_probs=logs, meta_info=stop, text=f"={image}")

    monkeypatch.setattr("slime.rollout.multi_turn.generate", engine)
    args = rollout_args(tiny, "http://127.0.0.1:1", max_turns=2)
    sample = make_sample(tmp_path)
    talk = Conversation(args, sample, {"max_new_tokens": 200})
    assert await talk.turn() == "=" and sample.loss_mask == [1] and sample.rollout_log_probs == [-1.0]
    assert talk.reply([{"role": "user", "content": sample.prompt[0]["content"]}])
    assert await talk.turn() == "=" and sample.response.count(image) == 1
    assert sample.tokens.count(soft) == 2 * 25, "as many as two images have: an engine can carry that"
    assert sum(sample.loss_mask) == 2 and len(sample.loss_mask) == sample.response_length


@pytest.mark.parametrize(("answer", "words"), [("1", "More."), ("3<eos>", "Less."), ("a", "No.")])
def test_hints(answer: str, words: str) -> None:
    assert look.hint(answer, "2") == words


async def test_a_later_answer_is_worth_less() -> None:
    async def reward(*answers: str) -> float:
        turns: list[dict[str, Any]] = [{"text": text} for text in answers]
        sample = Sample(index=0, label="2", metadata={"model_turns": turns})
        return await look.score(make_args(rm_type="last_number"), sample)

    assert [await reward("2"), await reward("3", "2<eos>"), await reward("3", "1"), await reward()] == [1, 0.5, 0, 0]


async def test_a_reply_with_an_image_closes_the_turn_once_in_text_and_ids(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang gets the text of a sample with media, the trainer its ids: both must hold the turn's end once."""
    args = rollout_args(tiny, "http://127.0.0.1:1", max_turns=2)
    tokenizer = GenerateState(args).tokenizer

    async def engine(args: Any, sample: Sample, params: dict[str, Any]) -> None:
        tokens = [*tokenizer("3", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        finish = {"finish_reason": {"type": "stop", "matched": tokenizer.eos_token_id}}
        sample.append_response_tokens(args, tokens=tokens, log_probs=[-1.0] * 2, meta_info=finish, text="3<eos>")

    monkeypatch.setattr("slime.rollout.multi_turn.generate", engine)
    sample = make_sample(tmp_path)
    talk = Conversation(args, sample, {"max_new_tokens": 200})
    await talk.turn()
    assert talk.reply([{"role": "user", "content": sample.prompt[0]["content"]}])
    assert sample.response == f"3<eos><user>{placeholder(tiny)}How long is a side?<assistant>"
    if placeholder(tiny) == "<boi>":
        return  # the processor's ids hold more than the text: lines before and after the image, and its end
    ids = sample.tokens[-sample.response_length :]
    shown = [token for i, token in enumerate(ids) if token != 258 or ids[i - 1] != 258]  # one per image
    assert tokenizer.decode(shown) == sample.response
