"""Loss masks of the kinds of ``--loss-mask-type`` with the chat templates of the models that they
are for.

What is trained on stands in ⟦ ⟧; everything around it is the template's and is compared token by
token too.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.data.dataset import Dataset
from slime.data.masks import MultiTurnLossMaskGenerator
from slime.data.sample import Sample
from slime.data.tokenizers import load_tokenizer
from slime.rollout.prompts import render

TEMPLATES = Path(__file__).parent / "templates"
GLM_TOKENS = [
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|endoftext|>",
]
R1_TOKENS = ["<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
QWEN = (
    "<|im_start|>system\n"
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
)
END, ASK = "<|im_end|>\n", "<|im_start|>assistant\n"
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def said(text: str) -> str:
    return f"<|im_start|>user\n{text}{END}"


ADD = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}
CALL = answer(
    "", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]
)
RESULTS = said("<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>")
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "two turns": [user("Hi"), answer("Hello!"), user("2+2?"), answer("4")],
    "first not trained": [user("Hi"), answer("no", step_loss_mask=0), user("2+2?"), answer("4")],
    "system": [{"role": "system", "content": "Be brief."}, user("Hi"), answer("Hello!")],
    "thoughts": [
        user("q"),
        answer("<think>\nold\n</think>\n\none"),
        user("r"),
        answer("<think>\nnew\n</think>\n\ntwo"),
    ],
    "reasoning field": [user("q"), answer("one", reasoning_content="why")],
    "last not trained": [user("Hi"), answer("Hello!"), user("2+2?"), answer("4", step_loss_mask=0)],
    "assistant first": [answer("Welcome"), user("Hi"), answer("Hello!")],
    "observation": [
        user("q"),
        answer("{}", metadata="add"),
        {"role": "observation", "content": "1"},
        answer("done"),
    ],
    "ends with a call": [user("q"), answer("{}", metadata="add")],
    "last call": [user("q"), CALL],
    "tools": [
        user("q"),
        CALL,
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        answer("done"),
    ],
}
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
GLM, NO_THOUGHT = "[gMASK]<sop>", "\n<think></think>\n"
GLM_CALL = (
    f"{NO_THOUGHT}<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
)
BRIEF = f"<|im_start|>system\nBe brief.{END}"

EXPECTED: dict[tuple[str, str], dict[str, str]] = {
    ("qwen2_5", "qwen"): {
        "two turns": f"{QWEN}{said('Hi')}{ASK}⟦Hello!{END}⟧{said('2+2?')}{ASK}⟦4{END}⟧",
        "first not trained": f"{QWEN}{said('Hi')}{ASK}no{END}{said('2+2?')}{ASK}⟦4{END}⟧",
        "system": f"{BRIEF}{said('Hi')}{ASK}⟦Hello!{END}⟧",
        "tools": f"{said('q')}{ASK}⟦{JSON_CALL}{END}⟧{RESULTS}{ASK}⟦done{END}⟧",
    },
    ("qwen3", "qwen3"): {
        "two turns": f"{said('Hi')}{ASK}⟦Hello!{END}⟧{said('2+2?')}{ASK}⟦<think>\n"
        "\n"
        "</think>\n"
        "\n"
        f"4{END}⟧",
        "first not trained": f"{said('Hi')}{ASK}no{END}{said('2+2?')}{ASK}⟦<think>\n"
        "\n"
        "</think>\n"
        "\n"
        f"4{END}⟧",
        "system": f"{BRIEF}{said('Hi')}{ASK}⟦<think>\n\n</think>\n\nHello!{END}⟧",
        "thoughts": f"{said('q')}{ASK}⟦one{END}⟧{said('r')}{ASK}⟦<think>\n"
        "new\n"
        "</think>\n"
        "\n"
        f"two{END}⟧",
        "reasoning field": f"{said('q')}{ASK}⟦<think>\nwhy\n</think>\n\none{END}⟧",
        "tools": f"{said('q')}{ASK}⟦{JSON_CALL}{END}⟧{RESULTS}{ASK}⟦<think>\n"
        "\n"
        "</think>\n"
        "\n"
        f"done{END}⟧",
    },
    ("qwen3_5", "qwen3_5"): {  # its header opens the thoughts
        "two turns": f"{said('Hi')}{ASK}⟦Hello!{END}⟧{said('2+2?')}{ASK}<think>\n"
        "⟦\n"
        "</think>\n"
        "\n"
        f"4{END}⟧",
        "system": f"{BRIEF}{said('Hi')}{ASK}<think>\n⟦\n</think>\n\nHello!{END}⟧",
        "thoughts": f"{said('q')}{ASK}⟦one{END}⟧{said('r')}{ASK}<think>\n"
        "⟦new\n"
        "</think>\n"
        "\n"
        f"two{END}⟧",
        "reasoning field": f"{said('q')}{ASK}<think>\n⟦why\n</think>\n\none{END}⟧",
        "tools": f"{said('q')}{ASK}<think>\n⟦\n</think>\n\n{XML_CALL}{END}⟧{RESULTS}"
        f"{ASK}<think>\n⟦\n</think>\n\ndone{END}⟧",
    },
    # The next message's marker ends a turn, and the engine stops at it.
    ("glm4", "qwen"): {
        "two turns": f"{GLM}<|user|>\n"
        "Hi<|assistant|>⟦\n"
        "Hello!<|user|>⟧\n"
        "2+2?<|assistant|>⟦\n"
        "4<|user|>⟧",
        "first not trained": f"{GLM}<|user|>\n"
        "Hi<|assistant|>\n"
        "no<|user|>\n"
        "2+2?<|assistant|>⟦\n"
        "4<|user|>⟧",
        "last not trained": f"{GLM}<|user|>\n"
        "Hi<|assistant|>⟦\n"
        "Hello!<|user|>⟧\n"
        "2+2?<|assistant|>\n"
        "4",
        "system": f"{GLM}<|system|>\nBe brief.<|user|>\nHi<|assistant|>⟦\nHello!<|user|>⟧",
        "assistant first": f"{GLM}<|assistant|>\n"
        "⟦Welcome<|user|>⟧\n"
        "Hi<|assistant|>⟦\n"
        "Hello!<|user|>⟧",
        "observation": f"{GLM}<|user|>\n"
        "q<|assistant|>⟦add\n"
        f"{{}}<|observation|>⟧\n"
        "1<|assistant|>⟦\n"
        "done<|user|>⟧",
        "ends with a call": f"{GLM}<|user|>\nq<|assistant|>⟦add\n{{}}<|observation|>⟧",
    },
    ("glm_z1", "qwen3"): {
        "thoughts": f"{GLM}<|user|>\nq<|assistant|>\n⟦one<|user|>⟧\nr<|assistant|>\n"
        "⟦<think>\nnew\n</think>\n\ntwo<|user|>⟧",
    },
    ("glm_z1", "qwen3_5"): {  # its header opens the thoughts
        "thoughts": f"{GLM}<|user|>\nq<|assistant|>\n⟦one<|user|>⟧\nr<|assistant|>\n"
        "<think>\n⟦new\n</think>\n\ntwo<|user|>⟧",
    },
    ("glm_z1", "distill_qwen"): {
        "thoughts": f"{GLM}<|user|>\nq<|assistant|>\none<|user|>\nr<|assistant|>\n"
        "<think>⟦\nnew\n</think>\n\ntwo<|endoftext|>⟧",
    },
    ("glm4_5", "qwen3"): {
        "two turns": f"{GLM}<|user|>\nHi<|assistant|>⟦{NO_THOUGHT}Hello!<|user|>⟧\n2+2?"
        f"<|assistant|>⟦{NO_THOUGHT}4<|user|>⟧",
        "thoughts": f"{GLM}<|user|>\nq<|assistant|>⟦{NO_THOUGHT}one<|user|>⟧\nr"
        "<|assistant|>⟦\n<think>new</think>\ntwo<|user|>⟧",
        "reasoning field": f"{GLM}<|user|>\nq<|assistant|>⟦\n<think>why</think>\none<|user|>⟧",
        "tools": "<|user|>\n"
        f"q<|assistant|>⟦{GLM_CALL}<|observation|>⟧\n"
        "<tool_response>\n"
        "1\n"
        "</tool_response>\n"
        "<tool_response>\n"
        "2\n"
        f"</tool_response><|assistant|>⟦{NO_THOUGHT}done<|user|>⟧",
        "last call": f"{GLM}<|user|>\nq<|assistant|>⟦{GLM_CALL}<|observation|>⟧",
    },
    ("deepseek_r1_distill", "distill_qwen"): {  # the last answer alone
        "two turns": f"{BOS}<｜User｜>Hi<｜Assistant｜>Hello!{EOS}<｜User｜>2+2?<｜Assistant｜><think>\n"
        f"⟦4{EOS}⟧",
        "system": f"{BOS}Be brief.<｜User｜>Hi<｜Assistant｜><think>\n⟦Hello!{EOS}⟧",
        "thoughts": f"{BOS}<｜User｜>q<｜Assistant｜>\n\none{EOS}<｜User｜>r<｜Assistant｜>"
        f"<think>\n⟦new\n</think>\n\ntwo{EOS}⟧",
    },
}
CASES = [(*model, name) for model, texts in EXPECTED.items() for name in texts]


@pytest.fixture(scope="module")
def base(smollm2: Path) -> Any:
    """A real fast tokenizer with the markers of ChatML."""
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def tokenizer_of(base: Any) -> Callable[[str, str], Any]:
    """The tokenizer for a template and a kind of masks. A copy is made once for all conversations,
    which takes a fifth of a second.
    """

    @functools.cache
    def make(template: str, kind: str) -> Any:
        tokenizer = copy.deepcopy(base)
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
        if template.startswith("glm"):
            tokenizer.add_tokens(GLM_TOKENS, special_tokens=True)
            tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
            tokenizer.eos_token = "<|endoftext|>"
        elif kind == "distill_qwen":
            tokenizer.add_tokens(R1_TOKENS, special_tokens=True)
            tokenizer.bos_token, tokenizer.eos_token = BOS, EOS
        return tokenizer

    return make


@pytest.mark.parametrize(("template", "kind", "name"), CASES)
def test_every_token_of_a_models_own_template(
    tokenizer_of: Callable[[str, str], Any], template: str, kind: str, name: str
) -> None:
    tokenizer = tokenizer_of(template, kind)
    tools = [ADD] if name == "tools" else None
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    generator.check(CONVERSATIONS[name], tools)
    ids, mask = generator.get_loss_mask(CONVERSATIONS[name], tools=tools)
    marked, inside = "", 0
    for token, trained in zip(ids, mask, strict=True):
        marked += {(0, 1): "⟦", (1, 0): "⟧"}.get((inside, trained), "") + tokenizer.decode([token])
        inside = trained
    marked += "⟧" * inside
    expected = EXPECTED[template, kind][name]
    if tools:  # before it the template describes the tools
        question = expected.partition("⟦")[0]
        assert "⟦" not in marked.partition(question)[0]
        marked = question + marked.partition(question)[2]
        ids = tokenizer(marked.replace("⟦", "").replace("⟧", ""), add_special_tokens=False)[
            "input_ids"
        ]
    assert marked == expected
    assert (
        ids
        == tokenizer(expected.replace("⟦", "").replace("⟧", ""), add_special_tokens=False)[
            "input_ids"
        ]
    )


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "qwen3_5", "deepseek_r1_distill"])
def test_arguments_of_calls_may_be_json_text_or_objects(
    base: Any, tmp_path: Path, template: str
) -> None:
    tokenizer = copy.copy(base)
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    file, made = tmp_path / "rows.jsonl", set()
    for arguments in ({"x": 1}, '{"x": 1}', '{"x":1}'):
        call = answer(
            "",
            tool_calls=[{"type": "function", "function": {"name": "add", "arguments": arguments}}],
        )
        # it writes calls of messages without a content, and needs text
        if template == "deepseek_r1_distill":
            call["content"] = None
        messages = [user("q"), call, user("r")]
        file.write_text(json.dumps({"prompt": messages}))
        sample = Dataset(str(file), tokenizer, apply_chat_template=True)[0]
        assert sample is not None
        made.add(str(sample.prompt).replace('{"x":1}', '{"x": 1}'))
        made.add(render(tokenizer, Sample(), messages).replace('{"x":1}', '{"x": 1}'))
        if template != "deepseek_r1_distill":
            ids, _ = MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(messages)
            assert tokenizer.decode(ids) == render(
                tokenizer, Sample(), messages, generation_prompt=False
            )
    assert len(made) == 1 and "add" in made.pop()
