"""The tree of a session, against a list of conversations."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from make_args import make_args
from needs import of_all

from slime.data.sample import Sample
from slime.plugins.agents.messages import Ask, call, key_of
from slime.plugins.agents.trajectory import Tree, Turn
from slime.rollout.state import GenerateState

WORDS = st.sampled_from(["a", "b"])
STEP = st.tuples(
    st.integers(0, 30), st.lists(WORDS, min_size=1, max_size=2), st.integers(1, 3), st.booleans()
)


class Letters:
    eos_token_id = None

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def output(first: int, count: int, finish: str = "stop") -> dict[str, Any]:
    scored = [[-float(i), first + i, None] for i in range(count)]
    return {
        "text": "",
        "meta_info": {
            "output_token_logprobs": scored,
            "finish_reason": {"type": finish},
            "weight_version": "1",
        },
    }


@settings(max_examples=of_all(200, 60), deadline=None)
@given(st.lists(STEP, min_size=1, max_size=12))
def test_every_request_goes_on_from_the_longest_conversation_and_every_token_is_trained_once(
    steps: Any,
) -> None:
    tree, told = Tree(), []  # conversations as (messages, ids)
    token = 1000
    for which, words, count, again in steps:
        before, seen = told[which % len(told)] if told and which % 3 else ([], [])
        messages = [*before, *map(user, words)]
        ask = Ask(messages)
        parent = tree.find(ask)
        known = [
            len(talk)
            for talk, _ in told
            if [*map(key_of, talk)] == [*map(key_of, messages[: len(talk)])]
        ]  # they end with an answer, so a request says more
        if not known:
            assert parent is None
        else:
            assert parent is not None and len(parent.conversation()) == max(known)
        start = len(parent.conversation()) if parent else 0
        added = [*range(token, token + 2)]
        answer = {"role": "assistant", "content": f" {'same' if again else token}\n"}
        token += 2
        turn = Turn(
            parent, messages[start:], [], answer, added, [output(token, count)], id=str(token)
        )
        token += count
        tree.add(turn)
        told.append((turn.conversation(), turn.ids()))
        assert turn.ids()[: len(seen)] == seen or parent is None or parent.ids() != seen
        assert [*map(key_of, turn.conversation())] == [key_of(m) for m in [*messages, answer]]
    args = make_args()
    state = GenerateState(args)
    state.tokenizer = Letters()
    samples = tree.samples(state, Sample(index=5))
    leaves = tree.leaves()
    assert [s.tokens for s in samples] == [leaf.ids() for leaf in leaves]
    trained = []
    for sample, leaf in zip(samples, leaves, strict=True):
        assert sample.index == 5 and sample.response_length == len(sample.tokens) - len(
            leaf.path()[0].added_ids
        )
        assert sample.loss_mask is not None and sample.rollout_log_probs is not None
        response = sample.tokens[-sample.response_length :]
        trained += [t for t, m in zip(response, sample.loss_mask, strict=True) if m]
        assert len(sample.rollout_log_probs) == sample.response_length
        assert sample.loss_mask[-1] == 1, "the leaf's own answer"
    assert sorted(trained) == sorted(t for turn in tree.turns.values() for t in turn.output_ids)


def test_tools_are_part_of_a_conversation_and_ids_of_calls_are_not() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    call = {"id": "one", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    tree = Tree()
    turn = Turn(None, [user("q")], [tool], {"role": "assistant", "content": "", "tool_calls": [call]}, [1],
                [output(2, 1)], id="1")  # fmt: skip
    tree.add(turn)
    renamed = {"role": "assistant", "content": "\n", "tool_calls": [{**call, "id": "other"}]}
    result = {"role": "tool", "content": "3", "tool_call_id": "other"}
    assert tree.find(Ask([user("q"), renamed, result], [tool])) is turn
    assert tree.find(Ask([user("q"), renamed, result])) is None
    changed = {**call, "function": {"name": "f", "arguments": {"x": 2}}}
    assert tree.find(Ask([user("q"), {**renamed, "tool_calls": [changed]}, result], [tool])) is None


def test_numbers_that_a_program_in_javascript_sends_back_are_the_same() -> None:
    """``JSON.stringify(JSON.parse("1.0"))`` is ``"1"``."""
    said: Any = {"x": [1.0, 1e21], "y": 0.5}
    back = {"y": 0.5, "x": [1, 1e21]}
    one, two, other = (
        key_of({"role": "assistant", "content": "", "tool_calls": [call("f", arguments)]})
        for arguments in (said, json.dumps(back), {**said, "y": True})
    )
    assert one == two != other
    assert isinstance(said["x"][0], float), "the model's own call stays as it is"


def test_of_equal_answers_the_newest_goes_on_and_an_undelivered_one_is_forgotten() -> None:
    tree = Tree()
    turns = [
        Turn(
            None,
            [user("q")],
            [],
            {"role": "assistant", "content": "x"},
            [1],
            [output(2, 1)],
            id=str(i),
        )
        for i in (1, 2)
    ]
    for turn in turns:
        tree.add(turn)
    more = Ask([user("q"), {"role": "assistant", "content": "x"}, user("r")])
    assert tree.find(more) is turns[1]
    tree.remove(turns[1])
    assert tree.find(more) is turns[0] and tree.leaves() == [turns[0]]


def test_a_turn_that_was_cut_or_had_no_room_to_go_on_makes_its_sample_truncated() -> None:
    for finish, overflowed, status in [
        ("stop", False, Sample.Status.COMPLETED),
        ("length", False, Sample.Status.TRUNCATED),
        ("stop", True, Sample.Status.TRUNCATED),
    ]:
        tree = Tree()
        turn = Turn(
            None,
            [user("q")],
            [],
            {"role": "assistant", "content": "x"},
            [1],
            [output(2, 1, finish)],
            id="1",
        )
        turn.overflowed = overflowed
        tree.add(turn)
        args = make_args()
        state = GenerateState(args)
        state.tokenizer = Letters()
        (sample,) = tree.samples(state, Sample())
        assert sample.status is status
