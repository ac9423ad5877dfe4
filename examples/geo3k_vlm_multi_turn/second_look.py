"""A wrong answer gets a hint and a second look at the figure: new images in the middle of a
conversation.

``generate`` is for ``--custom-generate-function-path``, ``score`` for ``--custom-rm-path``;
``--max-turns`` says how often the model may answer, ``--rm-type`` which verifier judges an answer.
"""

from __future__ import annotations

import base64
import io
from typing import Any

from examples.geo3k_vlm.geometry import Square
from slime.data.media import load_image
from slime.data.sample import Sample
from slime.plugins.rewards.answers import as_number, last_number
from slime.rollout.multi_turn import Conversation
from slime.rollout.rm_hub.dispatch import by_type

LATER_ANSWER = 0.5  # worth of a right answer per turn before it


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Answer; while that is wrong and turns are left, look again and answer again."""
    talk = Conversation(args, sample, sampling_params, evaluation)
    while (said := await talk.turn(max_tokens=getattr(args, "answer_tokens", None))) is not None:
        if len(talk.turns) >= args.max_turns or await is_right(args, sample, said):
            break
        words, image = hint(said, sample.label), closer(sample)
        if not talk.reply(
            [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": image}, {"type": "text", "text": words}],
                }
            ]
        ):
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
    """The figure again, as a PNG data URI: ruled where the example drew it, else at twice the
    size.
    """
    if "figure" in sample.metadata:
        image = Square(**sample.metadata["figure"]).draw(grid=True)
    else:
        first = load_image((sample.multimodal_inputs or {})["images"][0])
        image = first.resize((first.width * 2, first.height * 2))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
