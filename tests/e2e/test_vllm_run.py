"""Whole runs with real vLLM on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.real, pytest.mark.timeout(900)]

STRIKE = '''
"""Long answers, and one blow: the first server dies with its requests. All groups of three steps
start at once, and those of one of the third step begin anew until an update meets them."""
import copy
import os
from pathlib import Path

import psutil

from slime.data.sample import Sample
from slime.rollout.generate import generate as ask

MARK = Path(__file__).with_name("struck")


def servers():
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLIME_TEST_RUN") == os.environ["SLIME_TEST_RUN"]:
                if process.cmdline()[1:4] == ["-P", "-m", "slime.plugins.vllm.server"]:
                    yield process
        except psutil.Error:
            continue


async def generate(args, sample, sampling_params):
    if sample.group_index >= 8 and not MARK.exists():
        victim = min(servers(), key=lambda process: process.pid)
        MARK.write_text(str(victim.pid))
        victim.kill()
    while True:
        made = await ask(args, copy.deepcopy(sample), sampling_params | {"ignore_eos": True})
        met = len(made.version_spans) > 1 or made.status is Sample.Status.ABORTED
        if met or sample.group_index != 9:
            return made
'''


@pytest.fixture
def vllm_flags(flags: list[object], save_tiny: Callable[..., Path]) -> list[object]:
    """The heads that vLLM's kernels for a CPU know have 32 numbers or more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(flags[1], head_dim=32)
    flags = [flags[0], save_tiny(LlamaForCausalLM, config), *flags[2:]]
    at = flags.index("--rollout-backend") + 1
    flags = [*flags[:at], "vllm", *flags[at + 1 :]]
    return [*flags, "--vllm-kv-cache-memory-bytes", 2**26, "--vllm-max-num-seqs", 16]


def test_grpo_over_two_servers_of_which_one_dies(
    runner, vllm_flags: list[object], tmp_path: Path
) -> None:
    """Each update aborts the requests of a standing pool, which go on with their tokens so far."""
    from slime.data.sample import flatten
    from slime.observability.debug_data import load_rollout

    (tmp_path / "strike.py").write_text(STRIKE)
    steps, dump = 4, str(tmp_path / "dump" / "{rollout_id}.pt")
    result = runner.run(
        *vllm_flags, "--rollout-num-gpus", 2, "--router-policy", "round_robin", "--use-fault-tolerance",
        "--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "--async-buffer-size", 2, "--num-rollout", steps, "--rollout-max-response-len", 100, "--lr", "1e-5",
        "--custom-generate-function-path", f"{tmp_path / 'strike.py'}:generate",
        "--update-weight-pause-mode", "abort", "--save-debug-rollout-data", dump,
        script="train_async.py", timeout=800,
    )  # fmt: skip
    assert result.code == 0, result.output
    rows = result.metrics()
    assert len(rows) == steps
    assert (tmp_path / "struck").exists()
    assert sum(row.get("rollout/engine_restart_count", 0) for row in rows) >= 1
    assert all(row["perf/audit_logprob_diff"] < 1e-4 for row in rows)
    samples = [one for step in range(steps) for one in flatten(load_rollout(str(dump), step))]
    assert all(len(one.rollout_log_probs) == one.response_length == 100 for one in samples)
    assert any(len(one.version_spans) > 1 for one in samples), "an update met requests"
    assert runner.wait_gone() == []


@pytest.mark.long
@pytest.mark.parametrize("how", ["weights", "adapter"])
def test_log_probs_of_vllm_are_those_of_the_trainer(
    runner, vllm_flags: list[object], how: str
) -> None:
    """After each update, also where every version of an adapter is loaded and named by requests."""
    adapter = ("--lora-rank", 8, "--lr", "1e-2", "--lora-sync", how) if how == "adapter" else ()
    result = runner.inline(*vllm_flags, "--rollout-temperature", 0.7, *adapter)
    assert result.code == 0, result.output
    for row in result.metrics():
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert row["perf/audit_logprob_diff"] < 1e-4
    assert runner.wait_gone() == []
