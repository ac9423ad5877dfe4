"""``--true-on-policy`` with SGLang: its log-probs are the trainer's, to the last bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from both_sides import TEMPERATURE, make_trainer, trainer_scores
from engine_parts import make_tokenizer
from fsdp_helpers import VOCAB, save_tiny_llama, save_tiny_qwen3
from make_args import make_args
from test_true_on_policy import LLAMA3, save_tiny_qwen2
from transformers import AutoModelForCausalLM

from slime.config.machine import installed
from slime.engines.handle import EngineHandle
from slime.engines.launch import EngineSettings, EngineSpec, start_engine
from slime.plugins.sglang.launch import ServerPlace, server_environment, server_options
from slime.utils.async_utils import run
from slime.weights.settings import WeightSyncSettings
from slime.weights.sync import sync_weights
from slime.weights.transports import create_transport

START_SECONDS = 400.0
SAVE: dict[str, Any] = {
    "qwen3": save_tiny_qwen3,
    "llama 3": lambda path, **changes: save_tiny_llama(path, rope_parameters=LLAMA3, **changes),
    "qwen2": save_tiny_qwen2,
}
KINDS = ["qwen3", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("llama 3", "qwen2"))]


def flags(**changes: Any) -> Any:
    mode: dict[str, Any] = dict(
        true_on_policy=True, train_backend="fsdp", rollout_backend="sglang", train_dtype="bfloat16"
    )
    return make_args(**mode | changes)


def save(kind: str, path: Path, seed: int) -> Path:
    folder: Path = SAVE[kind](path, seed=seed, head_dim=16)
    make_tokenizer().save_pretrained(folder)
    return folder


async def _generate(
    engine: EngineHandle, prompts: list[list[int]], start: int = -1, **params: Any
) -> list[Any]:
    """Samples of requests that begin at different times, as a trainer gets them, and the log-probs
    of prompts from the token ``start`` on, for which SGLang computes the whole prompt."""

    async def one(i: int, prompt: list[int]) -> Any:
        await asyncio.sleep(0.02 * i)
        settings = {"max_new_tokens": 3 + 5 * (i % 4), "ignore_eos": True, **params}
        body = {"input_ids": prompt, "sampling_params": settings, "return_logprob": True}
        found = (await engine.generate({**body, "logprob_start_len": start}))["meta_info"]
        output = found["output_token_logprobs"]
        return SimpleNamespace(
            request=SimpleNamespace(input_ids=prompt),
            output_ids=[entry[1] for entry in output],
            output_logprobs=[entry[0] for entry in output],
            input_logprobs=[entry[0] for entry in found["input_token_logprobs"]],
            cached=found["cached_tokens"],
        )

    return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))


def make_prompts() -> list[list[int]]:
    """Some have a beginning in common, which SGLang computes once."""
    rng = random.Random(0)
    common = [rng.randrange(VOCAB) for _ in range(30)]
    own = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(12)]
    return [common + more if i % 3 else more for i, more in enumerate(own)]


def differences(folder: Path, samples: list[Any], **changes: Any) -> list[float]:
    order = list(range(len(samples)))[::-1]
    scores = trainer_scores(make_trainer(folder, **changes), samples, order, 5)
    sampled = [value for sample in samples for value in sample.output_logprobs]
    return [a - b for a, b in zip(sampled, scores, strict=True) if a != b]


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("served")
    models = [save(request.param, folder / f"{seed}", seed) for seed in range(2)]
    args = flags(
        hf_checkpoint=str(models[0]),
        sglang={"device": "cpu", "max_total_tokens": 4096},
        threads_per_process=1,
    )
    server = start_engine(
        EngineSettings.from_args(args), EngineSpec(0, str(models[0])), log_path=folder / "log"
    )
    try:
        server.wait_ready(START_SECONDS)
        yield args, models, EngineHandle(server.url)
    finally:
        server.stop()


@pytest.mark.sglang
@pytest.mark.real
@pytest.mark.skipif(not installed("sglang"), reason="needs SGLang: scripts/test_sglang.sh")
def test_log_probs_of_sglang_are_the_trainers(served: Any) -> None:
    args, models, engine = served
    # SGLang has the common beginning before the others come.
    run(_generate(engine, make_prompts()[1:2], temperature=TEMPERATURE))
    samples = run(_generate(engine, make_prompts(), temperature=TEMPERATURE))
    assert sum(len(sample.output_ids) for sample in samples) > 100
    assert sum(sample.cached for sample in samples) > 100, "some continue from cached prefixes"
    assert differences(models[0], samples) == []
    assert differences(models[1], samples), "the two models differ"

    # Also those of a prompt: what was sampled is scored again as a part of one, at temperature 1.
    first = run(_generate(engine, make_prompts(), temperature=1.0))
    assert differences(models[0], first, rollout_temperature=1.0) == []
    longer = [sample.request.input_ids + sample.output_ids for sample in first]
    for sample, again in zip(first, run(_generate(engine, longer, 0)), strict=True):
        assert again.input_logprobs[-len(sample.output_ids) :] == sample.output_logprobs

    # A greedy request, as health checks are, beside others.
    run(_generate(engine, make_prompts()[:1], temperature=0.0))

    settings = WeightSyncSettings.from_args(args)
    transport = create_transport(settings, colocated_host=True)
    trained = AutoModelForCausalLM.from_pretrained(models[1], dtype="bfloat16")
    weights = [
        (name, tensor)
        for name, tensor in trained.state_dict().items()
        if name != "lm_head.weight" or not trained.config.tie_word_embeddings
    ]
    sync_weights(settings, iter(weights), [engine], transport, "0.1", True)
    run(transport.close())
    samples = run(_generate(engine, make_prompts(), temperature=TEMPERATURE))
    assert differences(models[1], samples) == []


def test_only_engines_that_are_trained_get_the_kernels() -> None:
    settings = EngineSettings.from_args(flags())
    place = ServerPlace("127.0.0.1", 1)
    found = [
        "SGLANG_EXTERNAL_MODEL_PACKAGE" in server_environment(settings, spec)
        and bool(server_options(settings, spec, place)["disable_prefill_cuda_graph"])
        for spec in (EngineSpec(0, "/m"), EngineSpec(1, "/judge", updates=False))
    ]
    assert found == [True, False]
