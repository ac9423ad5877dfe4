"""Agents of one prompt: siblings with seeds, prompts and rewards of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_scripts import load_example
from in_process_engine import rollout_args, serving
from make_args import make_args

from slime.data.sample import Sample
from slime.rollout.group import generate_and_rm_group

agents = load_example("multi_agent/agents.py")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("agents")
    tokenizer = load_example("geo3k_vlm/geometry.py").make_tokenizer()
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), eos_token_id=1, **sizes)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def question(index: int = 0) -> Sample:
    return Sample(
        index=index,
        group_index=0,
        prompt=[{"role": "user", "content": "What is 3 times 4?"}],
        label="12",
    )


async def test_a_prompt_becomes_five_samples_of_one_rollout(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny) as url:
        path = f"{agents.__file__}:generate"
        args = rollout_args(tiny, url, custom_generate_function_path=path, rm_type="last_number")
        params = {"temperature": 1.0, "max_new_tokens": 6, "skip_special_tokens": False}
        group = await generate_and_rm_group(args, [question(0), question(1)], params)
        chosen = await agents.generate(
            args, question(2), params | {"sampling_seed": 3}, evaluation=True
        )
    for siblings in group:
        roles = [part.metadata["agent"] for part in siblings]
        assert roles == ["solver", "solver", "rewriter", "rewriter", "selector"]
        assert len({part.rollout_id for part in siblings}) == 1 and all(
            part.reward is not None for part in siblings
        )
        assert siblings[0].tokens != siblings[1].tokens, "two solvers, two seeds"
        said = agents.numbered(siblings[:2])
        assert (
            said in siblings[2].prompt[-1]["content"] and siblings[2].prompt == siblings[3].prompt
        )
        assert agents.numbered(siblings[2:4]) in siblings[4].prompt[-1]["content"]
        assert all(
            len(part.loss_mask or [1] * part.response_length) == part.response_length
            for part in siblings
        )
    assert group[0][0].rollout_id != group[1][0].rollout_id
    assert isinstance(chosen, Sample) and chosen.metadata["agent"] == "rewriter"


def test_the_first_number_chooses() -> None:
    answers = [Sample(response="a"), Sample(response="b")]
    assert agents.choice("Friend 2 is right, not 1.", answers) is answers[1]
    assert [agents.choice(text, answers) for text in ("none", "3", "0")] == [None, None, None]


def test_each_role_is_measured_by_its_peers() -> None:
    def part(role: str, reward: float, group: int = 0) -> Sample:
        return Sample(group_index=group, reward=reward, metadata={"agent": role})

    samples = [
        part("solver", 1.0),
        part("selector", 0.0),
        part("solver", 1.0),
        part("selector", 1.0),
    ]
    samples += [part("solver", 0.0, group=1), part("solver", 1.0, group=1)]
    raw, trained = agents.by_role(make_args(), samples)
    assert raw == [1, 0, 1, 1, 0, 1]
    half = 0.5 / (0.5**0.5 + 1e-6)
    assert trained == pytest.approx([0, -half, 0, half, -half, half])
    metrics: dict[str, float] = {}
    assert not agents.log_roles(0, make_args(), samples, metrics, 1.0)
    assert metrics == {"multi_agent/selector_reward": 0.5, "multi_agent/solver_reward": 0.75}
