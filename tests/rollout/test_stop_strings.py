"""Stop strings that an interruption divides, for each generate function that can continue a
response.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_parts import SmallEngine, arguments, to_id

from slime.data.sample import Sample
from slime.plugins.agents.conversation import Conversation
from slime.plugins.agents.streaming import generate_streaming
from slime.rollout.ends import cut_at_stop, divided_stop
from slime.rollout.generate import generate
from slime.rollout.state import GenerateState

WORDS = ["a", "b", "ab", " ", "\u00e9", "\u20ac", "<", "/s>", "</", "s>"]


def _naive(
    decode: Callable[[list[int]], str], before: list[int], new: list[int], stops: list[str]
) -> int | None:
    """The smallest number of new ids whose text contains a stop string that the text before does
    not contain.
    """
    known = decode(before).rstrip("\ufffd")
    for count in range(1, len(new) + 1):
        text = decode([*before, *new[:count]])
        for stop in stops:
            places = [i for i in range(min(len(known), len(text)) + 1) if text.startswith(stop, i)]
            if any(i + len(stop) > len(known) for i in places):
                return count
    return None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(WORDS), max_size=30),
    st.integers(0, 40),
    st.lists(st.sampled_from(["</s>", "ab", "b a", "\u00e9", "<<", " "]), min_size=1, max_size=3),
)
def test_the_first_stop_string_that_is_divided(
    words: list[str], before: int, stops: list[str]
) -> None:
    """Against the text of each length; a token may be a part of a character."""
    pieces = [
        part
        for word in words
        for part in ([word] if word.isascii() else [bytes([b]) for b in word.encode()])
    ]
    data = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def decode(ids: list[int]) -> str:
        return b"".join(data[i] for i in ids).decode(errors="replace")

    ids = list(range(len(data)))
    found = divided_stop(decode, ids[:before], ids[before:], stops)
    assert (found and found[0]) == _naive(decode, ids[:before], ids[before:], stops)


def test_what_belongs_to_each_token_is_cut_with_the_tokens(tokenizer_dir: Any) -> None:
    args = arguments(tokenizer_dir)
    tokenizer = GenerateState(args).tokenizer
    ids = [to_id(byte) for byte in b"d>xyz"]
    meta: Any = {
        "output_token_logprobs": [[-1.0, token, None] for token in ids], "finish_reason": {"type": "length"},
        "top_p_token_ids": list(range(7)), "top_p_token_offsets": [0, 2, 3, 4, 5, 7], "weight_version": "2",
        "weight_versions": [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 5}],
    }  # fmt: skip
    sample = Sample(tokens=[1], status=Sample.Status.ABORTED)
    before = [to_id(byte) for byte in b"a</en"]
    output = cut_at_stop(
        tokenizer, before, {"text": "d>xyz", "meta_info": meta}, {"stop": "</end>"}
    )  # type: ignore[typeddict-item]
    assert output["text"] == "d>" and output["meta_info"]["finish_reason"] == {
        "type": "stop",
        "matched": "</end>",
    }
    logs = [item[0] for item in output["meta_info"]["output_token_logprobs"]]
    sample.append_response_tokens(
        tokens=ids[:2], log_probs=logs, meta_info=output["meta_info"], text=output["text"]
    )
    assert sample.status is Sample.Status.COMPLETED and sample.version_spans == [
        ("1", 0, 1),
        ("2", 1, 2),
    ]
    np.testing.assert_equal(sample.rollout_top_p_token_ids, [0, 1, 2])
    np.testing.assert_equal(sample.rollout_top_p_token_offsets, [0, 2, 3])


class Interrupted(SmallEngine):
    """Gives the parts of one response, one a request, each interrupted but the last one.

    Like SGLang, it looks for stop strings in the text of one request.
    """

    def __init__(self, parts: list[bytes]) -> None:
        super().__init__()
        self.parts = parts

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        part = self.parts.pop(0)
        finish: dict[str, Any] = (
            {"type": "abort"} if self.parts else {"type": "stop", "matched": None}
        )
        for stop in body["sampling_params"]["stop"] or []:
            if stop.encode() in part:
                part, finish = (
                    part.partition(stop.encode())[0] + stop.encode(),
                    {"type": "stop", "matched": stop},
                )
        scored = [[-1.0, to_id(byte), None] for byte in part]
        meta = {"output_token_logprobs": scored, "finish_reason": finish, "weight_version": "1"}
        output = {"text": part.decode(errors="replace"), "meta_info": meta}
        if not body.get("stream"):
            return web.json_response(output)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + web.json_response(output).body + b"\n\ndata: [DONE]\n\n")  # type: ignore[operator]
        return response


async def one_turn(args: Any, sample: Sample, params: Any) -> None:
    await Conversation(args, sample, params).turn()


@pytest.mark.parametrize("function", [generate, generate_streaming, one_turn])
@pytest.mark.parametrize(
    ("parts", "stop"),
    [
        ([b"abc</", b"end>more and more"], "</end>"),
        ([b"abc</", b"en", b"d>more"], "</end>"),
        ([b"abc\xe2", b"\x82\xac.more"], "\u20ac."),
        ([b"abc</", b"en.</end>more"], "</end>"),
    ],
)
async def test_a_stop_string_that_an_interruption_divides_ends_the_response(
    tokenizer_dir: Any, function: Any, parts: list[bytes], stop: str
) -> None:
    whole = b"".join(parts).decode()
    wanted = whole[: whole.index(stop) + len(stop)]
    args = arguments(tokenizer_dir, rollout_stop=[stop], rollout_max_response_len=60)
    async with Interrupted(list(parts)) as engine:
        state = GenerateState(engine.serve(args))
        sample = Sample(prompt="p", index=0, group_index=0)
        for seed in range(len(parts)):
            await function(args, sample, {**state.sampling_params, "sampling_seed": seed})
    assert sample.status is Sample.Status.COMPLETED and sample.response == wanted
    assert state.tokenizer.decode(sample.tokens[-sample.response_length :]) == wanted
    assert (
        len(sample.loss_mask or ()) == len(sample.rollout_log_probs or ()) == sample.response_length
    )


async def test_a_stop_string_between_an_observation_and_the_next_turn_ends_nothing(
    tokenizer_dir: Any,
) -> None:
    """An engine that is not interrupted does not see it either."""
    args = arguments(tokenizer_dir, rollout_stop=["\n\n"], rollout_max_response_len=60)
    async with Interrupted([b"one"]) as engine:
        params: Any = {**GenerateState(engine.serve(args)).sampling_params, "sampling_seed": 1}
        sample = Sample(prompt="p", index=0, group_index=0)
        talk = Conversation(args, sample, params)
        assert await talk.turn() == "one" and talk.observe("x\n")
        engine.parts = [b"", b"\ntwo"]
        assert await talk.turn() is None and sample.status is Sample.Status.ABORTED
        assert await Conversation(args, sample, params).turn() == "\ntwo"
    assert sample.response == "onex\n\ntwo"
