"""Conversations: what the engine produced is what is trained, whatever the tokenizer would make of
the text.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from rollout_parts import arguments

from slime.data.convert import samples_to_train_data
from slime.data.sample import Sample
from slime.plugins.agents import conversation as multi_turn
from slime.plugins.agents.conversation import Conversation, ToolCall, tool_calls
from slime.rollout import generate as generate_module
from slime.rollout.group import generate_and_rm
from slime.rollout.state import GenerateState

ALPHABET = "abc <>/=\n"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def crossing_tokenizer(tmp_path_factory):
    """A BPE tokenizer without pre-tokenisation: its merges know no border, least of all one between
    turns.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    draw, tokens, merges = random.Random(0), [*ALPHABET, *"delnortuigsv"], []
    while len(merges) < 300:
        pair = draw.choice(tokens), draw.choice(tokens)
        if len("".join(pair)) <= 4 and "".join(pair) not in tokens:
            merges.append(pair)
            tokens.append("".join(pair))
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<end>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", pad_token="<end>"
    )
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("crossing")
    tokenizer.save_pretrained(folder)
    return folder


class Engine:
    """Answers as ``POST /generate`` does, in this process, with random ids; remembers what it was
    asked and said.
    """

    def __init__(self, tokenizer: Any, seed: int = 0, aborts: float = 0.15) -> None:
        self.tokenizer, self.draw, self.aborts = tokenizer, random.Random(seed), aborts
        self.said: list[tuple[list[int], list[int], list[float], str]] = []
        self.seeds: list[Any] = []

    async def __call__(self, state: Any, sample: Sample, body: dict[str, Any]) -> dict[str, Any]:
        params, draw = body["sampling_params"], self.draw
        self.seeds.append(params.get("sampling_seed"))
        count, ids, finish = (
            draw.randint(1, 12),
            [],
            {"type": "length", "length": params["max_new_tokens"]},
        )
        while len(ids) < params["max_new_tokens"]:
            ids.append(draw.randrange(len(self.tokenizer)))
            text = self.tokenizer.decode(ids)
            matched = next((stop for stop in params["stop"] or [] if stop in text), None)
            if ids[-1] == self.tokenizer.eos_token_id or matched:
                finish = {"type": "stop", "matched": matched or ids[-1]}
                break
            if len(ids) == count:
                kind = "abort" if draw.random() < self.aborts else "stop"
                finish = {"type": kind}
                break
        logs, version = [-draw.random() for _ in ids], f"1.{len(self.said) // 50}"
        self.said.append((list(body["input_ids"]), ids, logs, version))
        scored = [[log, token, None] for log, token in zip(logs, ids, strict=True)]
        meta = {"output_token_logprobs": scored, "finish_reason": finish, "weight_version": version}
        return {"text": self.tokenizer.decode(ids), "meta_info": meta}


async def chat(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Random observations, as text and as chat messages; nothing that depends on more than the
    sample.
    """
    talk = Conversation(args, sample, sampling_params)
    while (said := await talk.turn(stop=["<c>"], max_tokens=10)) is not None:
        draw = random.Random(f"{sample.index} {len(talk.turns)}")
        words = "".join(draw.choice(ALPHABET) for _ in range(draw.randint(0, 9)))
        if draw.random() < 0.2:
            break
        fits = (
            talk.observe(words, limit=8)
            if draw.random() < 0.5
            else talk.reply([{"role": "tool", "content": words}])
        )
        if not fits:
            break
        assert said == talk.answered[-1]
    return sample


def use(monkeypatch, folder, engine_class=Engine, **more):
    args = arguments(folder, **{"rollout_max_response_len": 64, "max_turns": 6, **more})
    args.custom_generate_function_path = f"{__name__}.chat"
    engine = engine_class(GenerateState(args).tokenizer)
    monkeypatch.setattr(generate_module, "ask_engine", engine)
    return args, engine


async def run_to_its_end(args, sample):
    """Aborted samples come back, as from the buffer of a partial rollout."""
    calls = 0
    while sample.status in (Sample.Status.PENDING, Sample.Status.ABORTED):
        sample = Sample.from_dict(sample.to_dict())  # nothing but its values
        sample = await generate_and_rm(
            args, sample, {**GenerateState(args).sampling_params, "sampling_seed": calls}
        )
        calls += 1
    return sample, calls


async def test_no_token_drifts_over_a_thousand_conversations(crossing_tokenizer, monkeypatch):
    args, engine = use(monkeypatch, crossing_tokenizer)
    tokenizer = GenerateState(args).tokenizer
    samples, retokenised, resumed, turns = [], 0, 0, 0
    for index in range(1000):
        engine.said.clear()
        sample = Sample(
            prompt="<user>" + "ab c<"[: index % 6], index=index, group_index=index, label=""
        )
        sample, calls = await run_to_its_end(args, sample)
        resumed += calls > 1
        # by position: what the engine said, and how surely
        trained: dict[int, tuple[int, float]] = {}
        for asked, ids, logs, _ in engine.said:
            assert sample.tokens[: len(asked)] == asked, (
                "each request carries what is trained, id for id"
            )
            trained |= {len(asked) + i: pair for i, pair in enumerate(zip(ids, logs, strict=True))}
        first = len(sample.tokens) - sample.response_length
        for place, (token, mask, log) in enumerate(
            zip(sample.tokens[first:], sample.loss_mask, sample.rollout_log_probs, strict=True),
            first,
        ):
            assert (token, log) == trained[place] if mask else (log == 0.0 and place not in trained)
        kept = [place for place in trained if place < len(sample.tokens)]
        assert sum(sample.loss_mask) == len(kept), (
            "everything that was said, and nothing else, is trained"
        )
        assert sample.weight_versions == [version for *_, version in engine.said]
        ended = sample.tokens[-1] == tokenizer.eos_token_id and sample.loss_mask[-1]
        assert sample.response == tokenizer.decode(sample.tokens[first : -1 if ended else None])
        retokenised += tokenizer(sample.response)["input_ids"] != sample.tokens[first:]
        turns += len(sample.metadata["model_turns"])
        samples.append(sample)
    assert retokenised > 700, (
        "the same conversations drift when their text is tokenised again: the test can tell"
    )
    assert resumed > 200 and turns > 2500
    batch = samples_to_train_data(args, [[sample] for sample in samples])
    for got, sample in zip(batch["tokens"], samples, strict=True):
        assert list(got) == sample.tokens
    assert [list(mask) for mask in batch["loss_masks"]] == [sample.loss_mask for sample in samples]


class Scripted(Engine):
    """Says the given texts, one a request."""

    answers: list[tuple[str, str]]

    async def __call__(self, state: Any, sample: Sample, body: dict[str, Any]) -> dict[str, Any]:
        self.seeds.append(body["sampling_params"].get("sampling_seed"))
        text, kind = self.answers.pop(0)
        ids = self.tokenizer(text)["input_ids"][: body["sampling_params"]["max_new_tokens"]]
        self.said.append((list(body["input_ids"]), ids, [-1.0] * len(ids), "1"))
        meta = {
            "output_token_logprobs": [[-1.0, i, None] for i in ids],
            "finish_reason": {"type": kind},
        }
        return {"text": self.tokenizer.decode(ids), "meta_info": {**meta, "weight_version": "1"}}


@pytest.fixture
def scripted(crossing_tokenizer, monkeypatch):
    def make(*answers, **more):
        args, engine = use(monkeypatch, crossing_tokenizer, Scripted, **more)
        engine.answers = list(answers)
        sample = Sample(prompt="<user>a<end><assistant>", index=0, group_index=0)
        return args, engine, sample, {**GenerateState(args).sampling_params, "sampling_seed": 5}

    return make


async def test_a_reply_closes_the_turn_once(scripted):
    for answer in ("ab", "ab<end>"):  # cut by a stop string, or closed by the model itself
        args, _, sample, params = scripted((answer, "stop"), ("c", "stop"))
        talk = Conversation(args, sample, params)
        await talk.turn()
        assert talk.reply([{"role": "tool", "content": "cc"}, {"role": "user", "content": "b"}])
        await talk.turn()
        assert sample.response == "ab<end><tool>cc<end><user>b<end><assistant>c"
        response = sample.tokens[-sample.response_length :]
        said = [token for token, mask in zip(response, sample.loss_mask, strict=True) if mask]
        assert GenerateState(args).tokenizer.decode(said) == answer + "c"


@pytest.mark.parametrize(
    ("known", "role", "content", "shown"),
    [
        ("user assistant", "tool", "cc", "<user><tool_response>\ncc\n</tool_response>\nb<end>"),
        ("user assistant observation", "tool", "cc", "<observation>cc<end><user>b<end>"),
        ("user assistant tool", "tool", {"a": 1}, "leaves out the dict"),
        ("user assistant tool", "environment", "cc", "leaves out the str"),
    ],
)
async def test_a_reply_is_never_left_out(
    scripted, monkeypatch, known: str, role: str, content: object, shown: str
):
    """Phi-4's template knows no results of tools, GLM-4's knows them by another name, and Qwen3's
    writes only contents that are texts."""
    args, _, sample, params = scripted(("ab", "stop"))
    template = (
        "{% for m in messages %}{% if m['role'] in '" + known + "'.split() %}<{{ m['role'] }}>"
        "{{ m['content'] if m['content'] is string else '' }}<end>{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(GenerateState(args).tokenizer, "chat_template", template)
    talk = Conversation(args, sample, params)
    await talk.turn()
    messages = [{"role": role, "content": content}, {"role": "user", "content": "b"}]
    if "leaves out" in shown:
        with pytest.raises(ValueError, match=f"{shown}.*role '{role}'"):
            talk.reply(messages)
    else:
        assert talk.reply(messages)
        # the vocabulary has no "_" and no "p"
        assert sample.response == f"ab<end>{shown}".replace("_", "").replace("p", "")


async def test_images_for_a_model_without_a_processor_are_refused(scripted):
    args, _, sample, params = scripted(("ab", "stop"))
    talk = Conversation(args, sample, params)
    await talk.turn()
    with pytest.raises(ValueError, match=r"have images, but the model .* has no processor"):
        talk.reply([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])


async def test_turns_have_seeds_of_their_own(scripted):
    args, engine, sample, params = scripted(*[("ab", "stop")] * 3)
    talk = Conversation(args, sample, params)
    for _ in range(3):
        await talk.turn()
        talk.observe("c")
    assert engine.seeds[0] == 5 and len(set(engine.seeds)) == 3


async def test_max_turns_and_the_length_of_the_response_end_it(scripted):
    args, _, sample, params = scripted(*[("ab", "stop")] * 9, max_turns=2)
    talk = Conversation(args, sample, params)
    for _ in range(2):
        assert await talk.turn() == "ab"
        assert talk.observe("c")
    assert await talk.turn() is None and sample.status is Sample.Status.TRUNCATED
    assert sample.metadata["round_number"] == 2

    args, _, sample, params = scripted(*[("ab", "stop")] * 9, rollout_max_response_len=8)
    talk = Conversation(args, sample, params)
    await talk.turn()
    before = list(sample.tokens)
    assert talk.observe("c" * 40) is False and sample.status is Sample.Status.TRUNCATED
    assert sample.tokens == before, "half an observation would be worse than none"
    assert talk.observe("c" * 40, limit=3) is True and sample.response_length == len(
        sample.loss_mask
    )


@pytest.mark.parametrize("how", ["observe", "reply"])
async def test_an_endless_answer_of_a_tool_is_not_tokenized_as_a_whole(scripted, monkeypatch, how):
    args, _, sample, params = scripted(("ab", "stop"))
    talk = Conversation(args, sample, params)
    await talk.turn()
    seen = []
    encode = multi_turn.encode
    monkeypatch.setattr(
        multi_turn,
        "encode",
        lambda tokenizer, text: seen.append(len(text)) or encode(tokenizer, text),
    )
    endless = "c" * 10_000_000
    fits = (
        talk.observe(endless)
        if how == "observe"
        else talk.reply([{"role": "tool", "content": endless}])
    )
    assert not fits and sample.status is Sample.Status.TRUNCATED
    assert seen == [talk.left * 512 + 1]


async def test_a_context_limit_counts_the_prompt(scripted):
    args, _, sample, params = scripted(("ab", "stop"), rollout_max_context_len=100)
    talk = Conversation(args, sample, params)
    assert talk.left == min(64, 100 - len(sample.tokens))


async def test_an_answered_conversation_that_an_abort_caught_is_not_asked_again(scripted):
    args, engine, sample, params = scripted(("ab", "stop"))
    await Conversation(args, sample, params).turn()
    sample.status = Sample.Status.ABORTED  # the rollout was over just then
    again = Conversation(args, Sample.from_dict(sample.to_dict()), params)
    assert await again.turn() == "ab" and again.sample.status is Sample.Status.COMPLETED
    assert len(engine.said) == 1


async def test_a_stop_string_across_an_abort_ends_the_turn(scripted):
    args, _, sample, params = scripted(("a<", "abort"), ("c>bbb", "stop"))
    assert await Conversation(args, sample, params).turn(stop=["<c>"]) is None
    assert sample.status is Sample.Status.ABORTED
    text = await Conversation(args, sample, params).turn(stop=["<c>"])
    assert text is not None and text.startswith("a<c>") and "bbb" not in text
    assert sample.response == text and len(sample.loss_mask) == sample.response_length == len(
        sample.rollout_log_probs
    )


async def test_a_character_that_an_abort_divides_is_complete_in_the_text_of_its_turn(
    tokenizer_dir, monkeypatch
):
    """The tokenizer has a token for each byte."""
    args, engine = use(monkeypatch, tokenizer_dir, Scripted)
    params, tokenizer = (
        {**GenerateState(args).sampling_params, "sampling_seed": 5},
        engine.tokenizer,
    )
    ids = tokenizer("<tool>caf\u00e9 \U0001f600</tool>")["input_ids"]

    async def answer(state, sample, body):
        count = counts.pop(0)
        part, ids[:] = ids[:count], ids[count:]
        meta = {"output_token_logprobs": [[-1.0, i, None] for i in part], "weight_version": "1"}
        finish = {"type": "abort" if ids else "stop"}
        return {"text": tokenizer.decode(part), "meta_info": {**meta, "finish_reason": finish}}

    monkeypatch.setattr(generate_module, "ask_engine", answer)
    sample, text, counts = Sample(prompt="p", index=0, group_index=0), None, [10, 3, 40]
    while counts:  # interrupted in the middle of the first character, then of the second one
        text = await Conversation(args, sample, params).turn()
    assert text == sample.response == "<tool>caf\u00e9 \U0001f600</tool>"
    assert sample.metadata["model_turns"][0]["text"] == text


async def test_no_turn_begins_when_the_rollout_is_over_but_in_an_evaluation(scripted):
    args, engine, sample, params = scripted(("ab", "stop"))
    GenerateState(args).aborted = True
    assert (
        await Conversation(args, sample, params).turn() is None
        and sample.status is Sample.Status.ABORTED
    )
    assert not engine.said
    assert await Conversation(args, sample, params, evaluation=True).turn() == "ab"


async def test_a_response_that_was_thrown_away_leaves_no_turns(scripted):
    args, _, sample, params = scripted(("ab", "stop"), ("c", "stop"))
    await Conversation(args, sample, params).turn()
    sample.reset_response()
    talk = Conversation(args, sample, params)
    assert await talk.turn() == "c" and len(talk.turns) == 1


async def test_nothing_answers_a_turn_that_was_not_finished(scripted):
    args, _, sample, params = scripted(("ab", "abort"))
    talk = Conversation(args, sample, params)
    with pytest.raises(ValueError, match="not finished a turn"):
        talk.observe("c")
    assert await talk.turn() is None
    with pytest.raises(ValueError, match="not finished a turn"):
        talk.observe("c")


async def test_tools_run_side_by_side_and_keep_their_order(scripted):
    args, _, sample, params = scripted()
    talk, met = Conversation(args, sample, params), asyncio.Barrier(3)

    async def tool(i):
        await asyncio.wait_for(met.wait(), 60)  # passes only when all three run at once
        await asyncio.sleep(0.01 * (3 - i))
        return str(i)

    assert await talk.tools([tool(i) for i in range(3)], timeout=30) == ["0", "1", "2"]
    assert sample.non_generation_time > 0

    results = await talk.tools([asyncio.sleep(60, "late"), asyncio.sleep(0, "quick")], timeout=0.05)
    assert (
        results == ["error: no answer within 0.05 s", "quick"]
        and sample.metadata["tool_timeouts"] == 1
    )

    async def broken():
        raise KeyError("x")

    with pytest.raises(KeyError):
        await talk.tools([broken(), asyncio.sleep(60, "")], timeout=30)


def test_tool_calls_are_read_in_order_and_say_what_is_wrong():
    text = (
        "<tool_call>\n"
        '{"name": "add", "arguments": {"a": 1}}\n'
        '</tool_call>, <tool_call>{"name": "now"}</tool_call>'
    )
    assert tool_calls(text) == [ToolCall("add", {"a": 1}), ToolCall("now")]
    assert tool_calls("no call </tool_call>") == []
    bad = '<tool_call>{"name": </tool_call><tool_call>[1]</tool_call>'
    bad += '<tool_call>{"name": "f", "arguments": 1}</tool_call>'
    errors = [call.error for call in tool_calls(bad + "<tool_call>{")]
    assert "not JSON" in errors[0] and '"name"' in errors[1] and "not an object" in errors[2]
    assert "</tool_call>" in errors[3]
