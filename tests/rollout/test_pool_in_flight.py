"""New weights reach a real engine while the pool generates on it: each token is of the weights that
it names.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from make_args import make_args
from rollout_parts import arguments, make_tokenizer, source_of

from slime.data.sample import flatten
from slime.data.staleness import step_of
from slime.rollout.fully_async_rollout import StandingPool

pytestmark = [pytest.mark.real, pytest.mark.timeout(200)]
LENGTH = 250


def new_model(seed: int) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, eos_token_id=256, bos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tokenizer(tmp_path_factory.mktemp("in-flight"))
    new_model(0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model_dir: Path, serve_embedded: Any) -> Any:
    args: Any = arguments(
        model_dir, rollout_dtype="float32", train_dtype="float32", embedded_device="cpu", threads_per_process=1,
        embedded_max_running_requests=4, embedded_max_total_tokens=None,
    )  # fmt: skip
    with serve_embedded(args) as process:
        yield process


class Trainer:
    """Brings weights to the engine, those of ``new_model(step)`` as version ``0.<step>``."""

    def __init__(self, url: str, model_dir: Path, pause_mode: str) -> None:
        from slime.engines.handle import EngineHandle
        from slime.weights.settings import WeightSyncSettings
        from slime.weights.transports import create_transport

        args = make_args(
            update_weight_buffer_size=2**20, hf_checkpoint=str(model_dir), train_dtype="float32", audit_weights=False,
            distributed_timeout_minutes=1, phase_timeout=60.0, update_weight_pause_mode=pause_mode,
        )  # fmt: skip
        self.settings = WeightSyncSettings.from_args(args)
        self.engines = [EngineHandle(url)]
        self.transport = create_transport(self.settings, colocated_host=True)
        self.models: list[Any] = []

    async def update(self) -> None:
        from slime.weights.sync import sync_weights

        step = len(self.models)
        self.models.append(new_model(step))
        weights = list(self.models[-1].state_dict().items())
        given = (self.settings, weights, self.engines, self.transport, f"0.{step}", True)
        await asyncio.to_thread(sync_weights, *given)

    async def close(self) -> None:
        from slime.engines.background import run

        await asyncio.to_thread(lambda: run(self.transport.close()))

    @torch.no_grad()
    def largest_gap(self, sample: Any) -> float:
        """Between the engine's log-probs and those of the versions that the sample names."""
        prompt, gaps = len(sample.tokens) - sample.response_length, [0.0]
        tokens = torch.tensor(sample.tokens)
        for version, start, end in sample.version_spans:
            scores = self.models[step_of(version) or 0](tokens[None]).logits[0].log_softmax(-1)
            own = torch.arange(prompt + start, prompt + end)
            theirs = torch.tensor(sample.rollout_log_probs[start:end])
            gaps.append(float((scores[own - 1, tokens[own]] - theirs).abs().max()))
        return max(gaps)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_each_token_has_the_log_prob_of_the_weights_that_it_names(
    model_dir: Path, engine: Any, mode: str
) -> None:
    host, port = engine.url.removeprefix("http://").split(":")
    args: Any = arguments(
        model_dir, sglang_router_ip=host, sglang_router_port=int(port), rollout_max_response_len=LENGTH,
        rollout_backend="embedded", rollout_batch_size=3, n_samples_per_prompt=2, update_weight_pause_mode=mode,
    )  # fmt: skip
    trainer = Trainer(engine.url, model_dir, mode)
    await trainer.update()
    pool = StandingPool(args, source_of(args), 0, 1)
    taking = asyncio.create_task(pool.take(0))
    while not taking.done() and len(trainer.models) < 6:
        await asyncio.wait([taking], timeout=0.15)
        await trainer.update()
    samples = flatten((await asyncio.wait_for(taking, 60)).samples)
    try:
        divided = [sample for sample in samples if len(sample.version_spans) > 1]
        assert divided, [sample.version_spans for sample in samples]
        for sample in samples:
            assert (
                sample.version_spans[0][1] == 0
                and sample.version_spans[-1][2] == sample.response_length
            )
            assert len(sample.rollout_log_probs) == sample.response_length <= LENGTH
            if mode != "in_place":
                assert trainer.largest_gap(sample) < 1e-3, "its cache was computed anew"
        if mode == "in_place":
            assert all(sample.metadata.get("kv_of_older_weights") for sample in divided)
            assert max(trainer.largest_gap(sample) for sample in divided) > 1e-2, (
                "the label is not for nothing"
            )
        else:
            assert not any("kv_of_older_weights" in sample.metadata for sample in samples)
    finally:
        await trainer.close()
