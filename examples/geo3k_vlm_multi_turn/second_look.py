"""A wrong answer gets a hint and a second look at the figure: new images in the middle of a conversation.

``generate`` is for ``--custom-generate-function-path``, ``score`` for ``--custom-rm-path``; ``--max-turns`` says how
often the model may answer, ``--rm-type`` which verifier judges an answer.
"""

from __future__ import annotations

import base64
import io
from typing import Any

from examples.geo3k_vlm.geometry import Rectangle
from slime.data.media import load_image
from slime.data.sample import Sample
from slime.rollout.multi_turn import Conversation
from slime.rollout.prompts import render
from slime.rollout.rm_hub.dispatch import by_type
from slime.rollout.rm_hub.text import as_number, last_number

LATER_ANSWER = 0.5  # worth of a right answer per turn before it
_MARK = "the model's words"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Answer; while that is wrong and turns are left, look again and answer again."""
    talk = Conversation(args, sample, sampling_params, evaluation)
    while (said := await talk.turn(max_tokens=getattr(args, "answer_tokens", None))) is not None:
        if len(talk.turns) >= args.max_turns or await is_right(args, sample, said):
            break
        if not show(talk, hint(said, sample.label), closer(sample)):
            break
    return sample


async def score(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 for a first answer that is right, 1/2 for a second one, 1/4 for a third; 0 without."""
    turns = sample.metadata["model_turns"]
    right = bool(turns) and await is_right(args, sample, turns[-1]["text"])
    return LATER_ANSWER ** (len(turns) - 1) if right else 0.0


async def is_right(args: Any, sample: Sample, answer: str) -> bool:
    """What ``--rm-type`` says of one answer."""
    alone = Sample(prompt=sample.prompt, response=answer, label=sample.label, index=sample.index)
    return bool(await by_type(args, alone))


def hint(answer: str, label: str) -> str:
    """The words that go with the second look."""
    said, gold = last_number(answer), as_number(label)
    if said is None or gold is None:
        return "No."
    return "More." if said < gold else "Less."


def closer(sample: Sample) -> str:
    """The figure again, as a PNG data URI: ruled where the example drew it, else at twice the size."""
    if "figure" in sample.metadata:
        image = Rectangle(**sample.metadata["figure"]).draw(grid=True)
    else:
        first = load_image((sample.multimodal_inputs or {})["images"][0])
        image = first.resize((first.width * 2, first.height * 2))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def show(talk: Conversation, words: str, image: str) -> bool:
    """Append a user's message with an image: its tokens get mask 0, its pixels go to engine and trainer.

    Returns:
        Whether it fits into the response; where not, the sample is TRUNCATED.
    """
    sample, processor = talk.sample, talk.state.processor
    message = {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": words}]}
    before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}]
    text = render(processor, sample, [*before, message]).partition(_MARK)[2]
    end = processor.tokenizer.decode(sample.tokens[-1:])
    if end in processor.tokenizer.all_special_tokens:
        text = text.removeprefix(end)  # the model closed its turn itself
    made = dict(processor(text=[text], images=[load_image(image)], add_special_tokens=False, return_tensors="pt"))
    tokens = made.pop("input_ids")[0].tolist()
    if len(tokens) >= talk.left:
        sample.status = Sample.Status.TRUNCATED
        return False
    add_images(sample, image, made)
    sample.append_response_tokens(talk.args, tokens=tokens, log_probs=None, trainable=False, text=text)
    talk.turns[-1]["answered"] = True
    return True


def add_images(sample: Sample, image: str, made: dict[str, Any]) -> None:
    """The raw image for the engine's next request, the processor's tensors for the trainer, after those that are there.

    Samples of a group share their first image, so nothing is changed in place.
    """
    import torch

    media = sample.multimodal_inputs or {}
    sample.multimodal_inputs = {**media, "images": [*media.get("images", []), image]}
    old = sample.multimodal_train_inputs or {}
    new = {key: value for key, value in made.items() if key != "attention_mask" and not key.endswith("token_type_ids")}
    sample.multimodal_train_inputs = {
        key: torch.cat([torch.as_tensor(old[key]), value]) if key in old else value for key, value in new.items()
    }
