"""Distillation through the real command: towards a teacher, and from the model itself with the label
in its prompt, where a resumed run goes on exactly.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]


@pytest.fixture
def teacher(save_tiny):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.2,
    )
    return save_tiny(LlamaForCausalLM, config)


@pytest.fixture
def served(teacher, tmp_path):
    """The address of a server with the teacher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "slime.engines.embedded.server", "--model-path", teacher, "--port", port]
    command = [sys.executable, *map(str, words), "--threads", "1"]
    with (tmp_path / "teacher.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, (tmp_path / "teacher.log").read_text()
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/generate"
    finally:
        process.terminate()
        process.wait(30)


def test_it_learns_what_the_teacher_does(runner, flags, teacher):
    common = [*flags, "--loss-type", "distill", "--lr", "3e-3"]
    result = runner.inline(*common, "--distill-teacher", teacher, "--num-rollout", 6)
    assert result.code == 0, result.output
    losses = [row["train/loss"] for row in result.metrics("train/loss")]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.long
def test_a_teacher_behind_a_server_is_the_same_teacher(runner, flags, teacher, served):
    common = [*flags, "--loss-type", "distill", "--lr", "3e-3", "--train-dtype", "float32"]
    common += ["--distill-divergence", "forward_kl", "--distill-top-k", 16, "--deterministic"]
    runs = [
        runner.inline(*common, "--distill-teacher", place, name=name)
        for name, place in (("held", teacher), ("served", served))
    ]
    assert all(run.code == 0 for run in runs), runs[1].output
    held, asked = ([row["train/loss"] for row in run.metrics("train/loss")] for run in runs)
    assert asked[0] == pytest.approx(held[0], rel=1e-4)
    assert asked[-1] < asked[0]


def test_a_teacher_that_follows_is_resumed_exactly(runner, flags, prompts, tmp_path):
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    assert all(row["label"] for row in rows)
    common = [*flags, "--loss-type", "distill", "--distill-context", "label"]
    common = [word for word in common if word != "--apply-chat-template"]
    common += ["--distill-ema", "0.5", "--lr", "1e-3", "--deterministic", "--num-rollout", 4]
    whole = runner.inline(*common, name="whole")
    assert whole.code == 0, whole.output
    save = ("--save", tmp_path / "save", "--save-interval", 2)
    first = runner.inline(*common, "--num-rollout", 2, *save, name="first")
    assert first.code == 0, first.output
    rest = runner.inline(*common, "--load", tmp_path / "save", name="rest")
    assert rest.code == 0, rest.output
    steps, resumed = (
        {row["rollout/step"]: row["train/loss"] for row in run.metrics("train/loss")}
        for run in (whole, rest)
    )
    assert resumed == {step: steps[step] for step in (1, 2, 3)}
    assert all(loss > 0 for loss in steps.values())
