"""What top-p and top-k left of the vocabulary travels with the sample, and the trainer scores
tokens over just that.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_drivers import finish, load, make
from make_args import make_args

from slime.data.convert import samples_to_train_data, split_train_data
from slime.data.fields import to_rank_batch
from slime.data.sample import Sample
from slime.data.schedule import PackingSettings
from slime.models.inputs import InputBuilder
from slime.models.loading import load_hf_model
from slime.models.packed_attention import NAME
from slime.models.scorer import PolicyScorer
from slime.plugins.embedded.sequence import build_answer
from slime.rollout.generate import append_output, build_generate_body
from slime.rollout.state import GenerateState

CUTS: list[dict[str, Any]] = [
    {"top_p": 0.6},
    {"top_k": 4},
    {"top_k": 9, "top_p": 0.5},
    {"top_p": 0.8, "temperature": 0.7},
]


def sampled(model: Path, cut: dict[str, Any]) -> list[Sample]:
    loaded = load(model)
    sequences = [make([3, 5, 7, 2 + i], rid=str(i), seed=i, **cut) for i in range(4)]
    for sequence in sequences:
        sequence.request.return_top_p_token_ids = True
    finish(loaded, sequences)
    samples = []
    for i, sequence in enumerate(sequences):
        sample = Sample(
            index=i, group_index=i, reward=float(i), tokens=list(sequence.request.input_ids)
        )
        answer = build_answer(
            sequence, loaded.detokenizer, "0.0", sequence.num_output, sequence.finish_reason
        )
        args = make_args()
        # as it goes over HTTP
        append_output(GenerateState(args), sample, json.loads(json.dumps(answer)))
        samples.append(sample)
    return samples


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_trainer_and_engine_agree_on_the_restricted_log_probs(
    tiny_llama: Path, cut: dict[str, Any]
) -> None:
    samples = sampled(tiny_llama, cut)
    args = make_args(use_tis=True, rollout_batch_size=4, n_samples_per_prompt=1, micro_batch_size=4)
    data = samples_to_train_data(args, [[sample] for sample in samples])
    batch = to_rank_batch(split_train_data(PackingSettings.from_args(args), data, 1)[0])
    model = load_hf_model(tiny_llama, torch.float32, "cpu", NAME)
    inputs = InputBuilder(model.base_model, torch.device("cpu")).from_batch(batch, [2, 0, 3, 1])
    assert inputs.nuclei is not None
    sizes = torch.tensor(inputs.nuclei.offsets).diff()
    assert (sizes >= 1).all() and sizes.max() <= cut.get("top_k", 10_000)
    temperature = cut.get("temperature", 1.0)
    scores, _ = PolicyScorer(model)(inputs, temperature, True)
    engine = torch.cat([batch["rollout_log_probs"][i] for i in (2, 0, 3, 1)])
    torch.testing.assert_close(scores.log_probs, engine, rtol=1e-4, atol=1e-4)
    whole, _ = PolicyScorer(model)(InputBuilder(model.base_model, torch.device("cpu")).build(
        [torch.as_tensor(batch["tokens"][i]) for i in (2, 0, 3, 1)], [8] * 4, [0, 1, 2, 3], [None] * 4
    ), temperature, True)  # fmt: skip
    assert (scores.log_probs > whole.log_probs + 1e-3).any(), (
        "the rest of the vocabulary has some of the mass"
    )
    torch.testing.assert_close(scores.entropy, whole.entropy)  # of the whole distribution


def test_tokens_that_no_engine_drew_are_not_restricted(tiny_llama: Path) -> None:
    sample = sampled(tiny_llama, {"top_p": 0.6})[0]
    sample.append_response_tokens(tokens=[4, 5], log_probs=None, trainable=False)
    offsets = sample.rollout_top_p_token_offsets
    assert (
        offsets is not None
        and len(offsets) == sample.response_length + 1
        and offsets[-1] == offsets[-3]
    )


def test_only_the_embedded_engine_is_asked_and_only_where_something_is_cut() -> None:
    sample = Sample(tokens=[1])
    for backend, cut, asked in (
        ("embedded", {"top_p": 0.9, "top_k": -1}, True),
        ("embedded", {"top_k": 5}, True),
        ("embedded", {"top_p": 1.0, "top_k": -1}, False),
        ("sglang", {"top_p": 0.9}, False),
    ):
        state = SimpleNamespace(requests=GenerateState(make_args(rollout_backend=backend)).requests)
        body = build_generate_body(state, sample, cut)  # type: ignore[arg-type]
        assert body.get("return_top_p_token_ids", False) is asked


def test_without_a_filter_nothing_is_listed(tiny_llama: Path) -> None:
    from slime.plugins.embedded.protocol import parse_generate

    body = {"input_ids": [1, 2], "return_top_p_token_ids": True, "sampling_params": {"top_p": 1.0}}
    assert not parse_generate(body, 100).requests[0].return_top_p_token_ids
    body["sampling_params"] = {"top_p": 0.9}
    assert parse_generate(body, 100).requests[0].return_top_p_token_ids
