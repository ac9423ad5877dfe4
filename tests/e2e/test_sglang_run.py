"""``train.py`` with real SGLang on the CPU: servers of its own behind a router, and one that runs
already.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from make_args import make_args

from slime.engines.launch import EngineSettings, plan_engines, start_engine
from slime.engines.process import EngineProcess

pytestmark = [pytest.mark.sglang, pytest.mark.real, pytest.mark.timeout(1300)]

# As the original specification types them, but for the context length, which is that of the tiny
# model. Its --sglang-cuda-graph-bs needs CUDA.
OF_THE_SEEDS = (
    "--sglang-mem-fraction-static", 0.8, "--sglang-context-length", 512, "--sglang-log-level", "INFO",
    "--sglang-server-concurrency", 160,
)  # fmt: skip


@pytest.fixture
def sglang_flags(flags: list[object]) -> list[object]:
    at = flags.index("--rollout-backend") + 1
    assert flags[at] == "embedded"
    return [
        *flags[:at],
        "sglang",
        *flags[at + 1 :],
        "--sglang-device",
        "cpu",
        "--sglang-max-total-tokens",
        8192,
    ]


def assert_trained(result, steps: int) -> None:
    """All steps were made, with tokens whose log-probs are those of the weights that the trainer
    has.
    """
    assert result.code == 0, result.output
    rows = result.metrics()
    assert len(rows) == steps
    for row in rows:
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-3
        assert row["perf/audit_logprob_diff"] < 1e-3  # also after the update of this step
        assert row["rollout/http_retry_count"] == 0
    assert any(abs(row["train/grad_norm"]) > 0 for row in rows)


def test_grpo_over_two_servers_and_the_router(runner, sglang_flags: list[object]) -> None:
    result = runner.run(
        *sglang_flags,
        "--rollout-num-gpus",
        2,
        "--router-policy",
        "round_robin",
        *OF_THE_SEEDS,
        timeout=600,
    )
    assert_trained(result, 3)
    for number in range(2):
        log = (result.folder / "logs" / f"engine-{number}.log").read_text()
        assert "/generate" in log or "Prefill batch" in log, log[-2000:]
        for setting in (
            "'mem_fraction_static': 0.8",
            "'context_length': 512",
            "'log_level': 'INFO'",
        ):
            assert setting in log, setting
    assert runner.wait_gone() == []


@pytest.mark.parametrize("how", [pytest.param("merged", marks=pytest.mark.long), "adapter"])
def test_an_adapter_reaches_a_server(runner, sglang_flags: list[object], how: str) -> None:
    """The server's log-probs are those of the trainer only if every update merges the adapter, or
    if every version of it is loaded and every request names it."""
    result = runner.inline(*sglang_flags, "--lora-rank", 8, "--lr", "1e-2", "--lora-sync", how)
    assert_trained(result, 3)
    log = (result.folder / "logs" / "engine-0.log").read_text()
    assert ("/load_lora_adapter_from_tensors" in log) == (how == "adapter")
    assert runner.wait_gone() == []


@pytest.mark.long
def test_a_flag_that_sglang_refuses_ends_the_run_before_an_engine_starts(
    runner, sglang_flags: list[object]
) -> None:
    result = runner.inline(*sglang_flags, "--sglang-attention-backend", "abacus")
    assert result.code == 2
    assert "--sglang-attention-backend: invalid choice: 'abacus'" in result.output
    assert not result.folder.exists()
    assert runner.wait_gone() == []


@pytest.fixture
def running_server(tiny_model: Path, tmp_path: Path) -> Iterator[EngineProcess]:
    args = make_args(
        hf_checkpoint=str(tiny_model), rollout_backend="sglang", train_dtype="float32", rollout_num_gpus=1,
        sglang={"device": "cpu", "max_total_tokens": 8192},
    )  # fmt: skip
    (spec,) = plan_engines(args)
    server = start_engine(EngineSettings.from_args(args), spec, log_path=tmp_path / "server.log")
    try:
        server.wait_ready(600)
        yield server
    finally:
        server.stop()


@pytest.mark.long
def test_a_server_that_runs_already_gets_weights_by_disk_and_lives_on(
    runner, sglang_flags: list[object], running_server: EngineProcess, tmp_path: Path
) -> None:
    result = runner.run(
        *sglang_flags, "--rollout-external-engine-addrs", running_server.url.removeprefix("http://"),
        "--update-weight-transport", "disk", "--update-weight-disk-dir", tmp_path / "weights", timeout=600,
    )  # fmt: skip
    assert_trained(result, 3)
    assert runner.wait_gone() == []
    assert running_server.alive()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_new_weights_go_through_a_standing_pool(
    runner, sglang_flags: list[object], long_answers: str, tmp_path: Path, mode: str
) -> None:
    """Answers of 400 tokens meet the updates; each token's log-prob stays near that of the weights
    it names.
    """

    from slime.data.sample import flatten
    from slime.data.staleness import token_staleness
    from slime.observability.debug_data import load_rollout

    steps, dump = 4, str(tmp_path / "dump" / "{rollout_id}.pt")
    result = runner.run(
        *sglang_flags, "--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "--async-buffer-size", 2, "--num-rollout", steps, "--rollout-max-response-len", 400, "--lr", "1e-5",
        "--custom-generate-function-path", long_answers,
        "--update-weight-pause-mode", mode, "--save-debug-rollout-data", dump, script="train_async.py", timeout=600,
    )  # fmt: skip
    assert result.code == 0, result.output
    divided = 0
    for step in range(steps):
        for sample in flatten(load_rollout(str(dump), step)):
            assert (
                sample.version_spans[-1][2]
                == sample.response_length
                == len(sample.rollout_log_probs)
            )
            assert (
                token_staleness(sample, step).min() >= 0
                and token_staleness(sample, step).max() <= 2
            )
            divided += len(sample.version_spans) > 1
    assert divided, "an update went through while samples were generated"
    assert all(row["perf/audit_logprob_diff"] < 1e-3 for row in result.metrics())
    assert runner.wait_gone() == []
