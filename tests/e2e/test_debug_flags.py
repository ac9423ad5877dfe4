"""Halves of a run: what one leaves is what the other goes on with; traces of the trainer; what a
resume says.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from slime.observability.samples import read_samples
from slime.observability.trace_file import trace_of
from slime.plugins.tools.summary import read_trace

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]


def test_dumps_replays_and_traces(runner, flags, tmp_path: Path) -> None:
    import torch

    details = tmp_path / "details"
    whole = runner.inline(
        *flags, "--dump-details", details, "--log-correct-samples", "--log-passrate", "--use-pytorch-profiler",
        "--profile-target", "train_actor", "train_log_probs", "--use-kl-loss", "--kl-loss-coef", "0.01", "--lr", "1e-5",
        "--save", tmp_path / "save", "--save-interval", 1, "--save-keep-last", 1, "--save-retain-interval", 2,
        name="whole",
    )  # fmt: skip
    assert whole.code == 0, whole.output
    steps = whole.metrics()
    assert all("passrate/pass@4" in step and "rollout/correct_ratio" in step for step in steps)
    assert (details / "tokenizer" / "tokenizer.json").is_file()
    assert sorted(p.name for p in (tmp_path / "save").glob("iter_*")) == [
        "iter_0000001",
        "iter_0000002",
    ]
    for target, phase in (("train_actor", "actor_train"), ("train_log_probs", "ref_log_probs")):
        trace = whole.folder / "traces" / f"train-actor-0-{target}-000001.json.gz"
        names = {
            event.get("name")
            for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        }
        assert phase in names and any(str(name).startswith("aten::") for name in names)
    spans = {event["name"] for event in read_trace(trace_of(whole.folder, 2)) if event["ph"] == "X"}
    assert {"sglang_generate", "rollout", "train"} <= spans, "of samples and of the driver"
    dump = torch.load(details / "train_data" / "2.pt", weights_only=False)
    assert len(dump["samples"]) == 16 and dump["format_version"] == 2
    rollout = torch.load(details / "rollout_data" / "2.pt", weights_only=False)["samples"]
    for trained, made in zip(dump["samples"], rollout, strict=True):
        assert trained["tokens"].tolist() == made["tokens"] and math.isclose(
            trained["raw_reward"], made["reward"]
        )
        assert (
            len(trained["advantages"]) == len(trained["ref_log_probs"]) == made["response_length"]
        )

    template = details / "rollout_data" / "{rollout_id}.pt"
    kl = ["--use-kl-loss", "--kl-loss-coef", "0.01", "--lr", "1e-5"]
    again = runner.inline(*flags, *kl, "--load-debug-rollout-data", template, name="again")
    assert again.code == 0, again.output
    for name in ("train/loss", "train/grad_norm", "rollout/advantages", "train/kl_loss"):
        assert [step[name] for step in again.metrics()] == [step[name] for step in steps], name
    half = runner.inline(
        *flags, *kl, "--load-debug-rollout-data", template, "--load-debug-rollout-data-subsample", "0.5",
        "--log-samples", 5, "--log-keep-last", 1, "--log-compress", name="half",
    )  # fmt: skip
    assert half.code == 0, half.output
    (texts,) = (half.folder / "samples").iterdir()
    assert texts.name == "rollout_000002.jsonl.zst" and len(read_samples(texts)) == 5
    assert all(step["train/global_batch_size"] == 8 for step in half.metrics())
    forge = runner.inline(*flags, *kl, "--load-forge-rollout-data", template, name="forge")
    assert forge.code == 0, forge.output
    for name in ("train/loss", "rollout/raw_reward"):
        assert [step[name] for step in forge.metrics()] == [step[name] for step in steps], name
    assert all("perf/update_weights_time" in step for step in forge.metrics()), (
        "engines are alive and get the weights"
    )

    resumed = runner.inline(
        *flags,
        *kl,
        "--lr",
        "2e-5",
        "--load",
        tmp_path / "save",
        "--ckpt-step",
        1,
        "--num-rollout",
        3,
        name="resumed",
    )
    assert resumed.code == 0, resumed.output
    text = " ".join(resumed.output.split())
    assert "settings that differ from the saved run's:" in text and "lr: 1e-05 -> 2e-05" in text
    last = resumed.metrics()[-1]
    assert (
        last["rollout/step"] == 2 and last["rollout/raw_reward"] == steps[2]["rollout/raw_reward"]
    )


def test_only_rollouts_with_streamed_prompts(runner, flags, prompts: Path, tmp_path: Path) -> None:
    """Streaming by two worker processes: the prompts of a run that holds them all, and nothing left
    behind.
    """
    dumps = []
    for name, more in (("held", []), ("streamed", ["--streaming-data", "--num-data-workers", 2])):
        template = tmp_path / name / "{rollout_id}.pt"
        flags_of = [
            "--debug-rollout-only",
            "--save-debug-rollout-data",
            template,
            "--num-rollout",
            6,
        ]
        result = runner.inline(*flags, *flags_of, *more, name=name)
        assert result.code == 0, result.output
        assert runner.wait_gone() == []
        import torch

        loaded = [
            torch.load(tmp_path / name / f"{i}.pt", weights_only=False)["samples"] for i in range(6)
        ]
        dumps.append(
            [(s["prompt"], s["index"], s["response"]) for samples in loaded for s in samples]
        )
    assert dumps[0] == dumps[1] and len({prompt for prompt, _, _ in dumps[0]}) == 4
