"""Images on real SGLang: ids and pixels of two turns, against the log-probs that the trainer
computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from figure_samples import look, make_sample, save_model, trained_log_probs
from in_process_engine import rollout_args

from slime.engines.http import close_session
from slime.engines.process import EngineProcess
from slime.observability import files
from slime.rollout.state import GenerateState

pytestmark = [pytest.mark.sglang, pytest.mark.real, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "qwen3_vl"])
async def test_two_turns_with_an_image_each(
    architecture: str, start_engine: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """A random model answers with bytes that are no text, so ids that were decoded and tokenized
    again would differ, and the engine would read another number of tokens."""
    tiny = save_model(architecture, tmp_path)
    url = start_engine(
        tiny, rollout_backend="sglang", sglang={"device": "cpu", "max_total_tokens": 4096}
    ).url
    args = rollout_args(
        tiny, url, max_turns=2, rm_type="last_number", answer_tokens=8, rollout_max_response_len=64,
        rollout_backend="sglang",
    )  # fmt: skip
    files.take_warnings()
    broken = 0
    for seed in range(3):
        asked = make_sample(tmp_path)
        asked.label = "12345"  # no answer is right
        sample = await look.generate(
            args, asked, {**GenerateState(args).sampling_params, "sampling_seed": seed}
        )
        assert len(sample.metadata["model_turns"]) == len(sample.multimodal_inputs["images"]) == 2
        own = [
            log
            for log, kept in zip(sample.rollout_log_probs, sample.loss_mask, strict=True)
            if kept
        ]
        assert len(own) > 2 and trained_log_probs(tiny, sample) == pytest.approx(own, abs=1e-4)
        broken += "\ufffd" in sample.metadata["model_turns"][0]["text"]
    await close_session()
    assert broken and files.take_warnings() == []
