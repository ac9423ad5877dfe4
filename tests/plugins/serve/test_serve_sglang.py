"""The server with SGLang as its engine: adapters by name, scored as the trainer scores them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from serve_parts import WORDS, batch, last, log_probs_of, parse, serving

from slime.api.session import Session
from slime.cluster import actors
from slime.plugins.serve.command import SGLANG_ADAPTERS

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]


async def test_sglang_samples_with_the_adapter_of_the_sampler(
    tiny_model: Path, tmp_path: Path
) -> None:
    engine = {"sglang_device": "cpu", "sglang_max_total_tokens": 2048, **SGLANG_ADAPTERS}
    engine["sglang_lora_backend"] = "torch_native"
    flags = {"lora_rank": 8, "lora_sync": "merged", "rollout_backend": "sglang", "inline": True}
    try:
        with Session(
            tiny_model, output_dir=str(tmp_path / "runs"), audit_weights=False, **flags, **engine
        ) as session:
            async with serving(session, tmp_path / "state") as client:
                model = await client.model(await client.session(), rank=16)
                for number in (1, 3):
                    await client.train(model, number)
                    await client.step(model, number + 1)
                body = {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 0}
                name = (await client.do("/save_weights_for_sampler", body))["sampling_session_id"]
                prompt = {"chunks": [{"tokens": WORDS, "type": "encoded_text"}]}
                asked = {"sampling_session_id": name, "seq_id": 0, "prompt": prompt}
                params = {"max_tokens": 4, "temperature": 1.0}
                more = {"num_samples": 1, "prompt_logprobs": True, "sampling_params": params}
                answer = await client.do("/asample", {**asked, **more})
                scored = np.frombuffer(last(parse(answer), 2), "<f4")[1:].tolist()
                trained = await client.do("/forward_backward", batch(model, 6, forward=True))
    finally:
        actors.use(None)  # later tests of this process use Ray
    assert scored == pytest.approx(log_probs_of(trained), abs=1e-4)
