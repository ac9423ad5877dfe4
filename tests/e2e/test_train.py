"""The two loops, from the command line to the files they leave. Real Ray, engines and trainers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from run_processes import command_line

from slime.engines.http import request_blocking
from slime.plugins.tools.summary import read_state

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def _depends_on_the_clock(name: str) -> bool:
    """Seconds, and how much of a prompt was cached: that is a matter of which request came
    first.
    """
    return name.startswith(("perf/", "time")) or "cached_tokens" in name or "prefix_cache" in name


def assert_good(result) -> None:
    assert result.code == 0, result.output


def same_numbers(left: list[dict], right: list[dict]) -> list[str]:
    """Names and values that differ, times of the clock and of arrival aside."""
    differ = []
    assert len(left) == len(right)
    for step, (a, b) in enumerate(zip(left, right, strict=True)):
        keys = {key for key in a.keys() | b.keys() if not _depends_on_the_clock(key)}
        differ += [
            f"step {step} {key}: {a.get(key)} != {b.get(key)}"
            for key in sorted(keys)
            if a.get(key) != b.get(key)
        ]
    return differ


def digests(snapshot: Path) -> dict[str, str]:
    """Digest per tensor of the actor's weights and optimizer in a snapshot."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    from slime.models.digest import tensor_digest

    flat: dict[str, str] = {}

    def walk(value: object, path: str) -> None:
        if isinstance(value, torch.Tensor):
            flat[path] = tensor_digest(value)
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}/{key}")
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                walk(item, f"{path}/{i}")

    out = snapshot.parent / f"{snapshot.name}.pt"
    folder = next(path.parent for path in sorted((snapshot / "actor").rglob(".metadata")))
    dcp_to_torch_save(folder, out)
    walk(torch.load(out, weights_only=False), "")
    assert flat
    return flat


@pytest.fixture
def reward_of_the_folder(tmp_path: Path) -> str:
    """A reward that imports a neighbour when it is called, in a folder whose files are named like
    modules of Python or of packages, which no process may import.
    """
    failing = "raise RuntimeError('a file of the working directory was imported')\n"
    for name in ("random", "types", "queue", "logging", "statistics", "code"):
        (tmp_path / f"{name}.py").write_text(failing)
    for name in ("ray", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(failing)
    (tmp_path / "neighbour.py").write_text("def count(text):\n    return float(len(text))\n")
    (tmp_path / "own_reward.py").write_text(
        "async def reward(args, sample, **kwargs):\n"
        "    from neighbour import count\n"
        "    return count(sample.response) + 0.01 * (sample.index % 7)\n"
    )
    return "own_reward.reward"


@pytest.mark.slow
def test_a_run_leaves_what_it_promises_and_no_process(
    runner, flags, prompts, reward_of_the_folder: str
) -> None:
    result = runner.run(
        *flags,
        *("--eval-interval", 2, "--eval-prompt-data", "letters", prompts, "--save-interval", 3),
        *("--custom-rm-path", reward_of_the_folder),
    )
    assert_good(result)
    assert result.metrics()[0]["rollout/raw_reward"] > 0
    steps = result.metrics()
    assert [row["rollout/step"] for row in steps] == [0, 1, 2]
    for row in steps:
        assert math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0
        # engine and trainer agree in fp32
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert [row["eval/step"] for row in result.metrics("eval/step")] == [0, 2, 3]
    folder = result.folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["reward_per_rollout"]
    started = re.search(r"^  start +([\d.]+) s$", result.output, re.MULTILINE)
    assert started, result.output
    stepping = sum(row["perf/step_time"] for row in steps)
    assert stepping + float(started[1]) <= summary["seconds_total"] + 0.1, (
        "no step counts the time of the start"
    )
    assert (folder / "config.yaml").is_file()
    state = read_state(folder)
    assert state is not None and (state.status, state.error) == ("completed", "")
    assert "step 3/3" in (folder / "logs" / "driver.log").read_text()
    assert list((folder / "tensorboard").glob("events*"))
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert runner.wait_gone() == []


@pytest.mark.slow
def test_two_ranks_and_two_engines_behind_the_router(runner, flags) -> None:
    """And none of their processes listens where another machine could reach it, or answers without
    the run's key.
    """
    process = runner.start(
        "--run-name",
        "run",
        *flags,
        "--actor-num-gpus-per-node",
        2,
        "--rollout-num-gpus",
        2,
        "--num-rollout",
        2,
    )
    listening: dict[str, set[str]] = {}
    answers: dict[str, int] = {}
    keys: set[str] = set()
    asked = {
        "slime.plugins.embedded.server": "server_info",
        "slime.engines.router_server": "workers",
    }
    metrics = runner.tmp / "outputs" / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and len(answers) == 3):
        for each in runner.alive():
            with contextlib.suppress(psutil.Error):
                found = {
                    c.laddr.ip
                    for c in each.net_connections("tcp")
                    if c.status == psutil.CONN_LISTEN
                }
                listening.setdefault(each.name(), set()).update(found)
                words = each.cmdline()
                path = next((asked[word] for word in words if word in asked), None)
                if path is not None and "--port" in words:
                    url = f"http://127.0.0.1:{words[words.index('--port') + 1]}/{path}"
                    keys.add(each.environ()["SLIME_SERVER_API_KEY"])
                    with contextlib.suppress(OSError):
                        answers[url] = request_blocking("GET", url)[0]
        time.sleep(0.5)
    # the start of the driver and of the rollout manager would take two seconds longer
    if process.poll() is None:
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        managers = [
            each
            for each in runner.alive()
            if "".join(command_line(each)).startswith("ray::RolloutManager")
        ]
        for each in managers:
            with contextlib.suppress(OSError):  # it may have ended meanwhile
                assert "libtorch" not in Path(f"/proc/{each.pid}/maps").read_text()
    result = runner.finish(process, "run")
    # Ray adds the method that an actor is just running to the name of its process.
    names = {name.partition(".")[0] for name, found in listening.items() if found}
    assert {"ray::TrainActor", "gcs_server"} <= names
    addresses = {
        address.removeprefix("::ffff:") for found in listening.values() for address in found
    }
    assert addresses <= {"127.0.0.1", "::1"}, listening
    assert len(answers) == 3 and set(answers.values()) == {401}, answers
    (key,) = keys
    written = [file for file in result.folder.rglob("*") if file.is_file()]
    assert len(written) > 10 and not [file for file in written if key.encode() in file.read_bytes()]
    assert_good(result)
    assert (result.folder / "logs" / "router.log").exists()
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in result.metrics()) < 1e-4
    assert runner.wait_gone() == []


@pytest.mark.slow
@pytest.mark.long
def test_replicas_of_the_model_give_their_weights_to_the_engines_beside_them(runner, flags) -> None:
    """Colocated, each of the two ranks sends to an engine of its own."""
    given = [
        "--fsdp-shard-size",
        1,
        "--actor-num-gpus-per-node",
        2,
        "--rollout-num-gpus",
        2,
        "--num-rollout",
        2,
    ]
    result = runner.run(
        *flags, *given, "--colocate", "--save", runner.tmp / "saved", "--save-interval", 2
    )
    assert_good(result)
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in result.metrics()) < 1e-4
    (snapshot,) = (runner.tmp / "saved").glob("iter_*/actor/dcp")
    sizes = sorted(file.stat().st_size for file in snapshot.glob("*.distcp"))
    assert len(sizes) == 2 and sizes[1] < 0.7 * sum(sizes), "each replica writes a part"
    assert runner.wait_gone() == []


@pytest.mark.slow
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    runner, flags, prompts
) -> None:
    flags = [*flags, "--deterministic", "--num-rollout", 4, "--save-interval", 1]
    flags += ["--eval-interval", 2, "--eval-prompt-data", "letters", prompts]
    whole = runner.inline(*flags, "--save", runner.tmp / "whole", name="whole")
    assert_good(whole)

    saved, flags = runner.tmp / "parts", [*flags, "--async-save"]
    process = runner.start("--run-name", "parts", *flags, "--save", saved)
    latest = saved / "latest_checkpointed_iteration.txt"
    runner.wait_until(process, lambda: latest.exists() and latest.read_text().strip() == "1")
    process.send_signal(signal.SIGKILL)  # the driver dies without a word
    process.wait()
    assert runner.wait_gone() == []
    resumed = runner.inline(*flags, "--save", saved, "--load", saved, name="parts")
    assert_good(resumed)
    assert "going on with rollout 2" in resumed.output

    assert same_numbers(whole.metrics(), resumed.metrics()) == []
    assert same_numbers(whole.metrics("eval/step"), resumed.metrics("eval/step")) == []
    assert digests(runner.tmp / "whole" / "iter_0000003") == digests(saved / "iter_0000003")


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param([], id="apart", marks=pytest.mark.long),
        pytest.param(["--colocate"], id="colocated", marks=pytest.mark.long),
    ],
)
def test_sigterm_saves_and_ends_in_order(runner, flags, placement) -> None:
    saved = runner.tmp / "saved"
    flags = [*flags, *placement, "--num-rollout", 200, "--save", saved, "--save-interval", 150]
    process = runner.start("--run-name", "run", *flags)
    metrics = runner.tmp / "outputs" / "run" / "metrics.jsonl"
    runner.wait_until(process, lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    os.kill(process.pid, signal.SIGTERM)
    result = runner.finish(process, "run")
    assert result.code == 143, result.output
    assert "go on with --load" in result.output
    assert int((saved / "latest_checkpointed_iteration.txt").read_text()) >= 1
    assert runner.wait_gone() == []


def epochs(flags: list[object]) -> list[object]:
    """Two epochs of 16 prompts in rollouts of 4, with a decay: the trainers must know their number
    of steps.
    """
    at = flags.index("--num-rollout")
    return [*flags[:at], *flags[at + 2 :], "--num-epoch", 2, "--lr-decay-style", "cosine"]


DECAY = [1e-3 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)]
"""The learning rates of :func:`epochs`."""


@pytest.mark.slow
def test_the_loop_with_a_reference_an_old_actor_and_a_decay(runner, flags) -> None:
    result = runner.inline(
        *epochs(flags), "--use-kl-loss", "--kl-loss-coef", "0.001", "--keep-old-actor"
    )
    assert_good(result)
    rows = result.metrics()
    assert [row["train/lr-pg_0"] for row in rows] == pytest.approx(DECAY)
    assert "learning rate of the" not in result.output
    assert abs(rows[0]["train/kl_loss"]) < 1e-6 < abs(rows[1]["train/kl_loss"])
    # with one optimizer step a rollout, the policy that trains is the one that sampled
    for row in rows:
        assert abs(row["train/ppo_kl"]) < 1e-6 and row["train/pg_clipfrac"] == 0.0
        assert row["train/grad_norm"] > 0


@pytest.mark.slow
def test_the_asynchronous_loop_trains_in_order_within_its_bound(runner, flags) -> None:
    flags = [*epochs(flags), "--async-buffer-size", 2, "--update-weights-interval", 2]
    result = runner.inline(*flags, script="train_async.py")
    assert_good(result)
    rows = result.metrics()
    assert [row["rollout/step"] for row in rows] == list(range(8))
    assert [row["train/lr-pg_0"] for row in rows] == pytest.approx(DECAY)
    assert "at most 3 step(s)" in result.output
    assert runner.wait_gone() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("train.py", ["--num-steps-per-rollout", 2]),
        ("train_async.py", []),
        ("train_async.py", ["--update-weights-interval", 2, "--num-steps-per-rollout", 2]),
        ("train_async.py", ["--max-weight-staleness", 0, "--num-steps-per-rollout", 2]),
    ],
    ids=["two-steps", "asynchronous", "interval-2", "always-fresh"],
)
def test_the_old_log_probs_are_those_of_the_weights_that_made_the_samples(
    runner, flags, script, more
) -> None:
    """A rollout that is made while the one before trains is of the weights before the update
    between them, and so are the old log-probs: they equal those that the engine gave."""
    result = runner.inline(*flags, "--keep-old-actor", "--num-rollout", 5, *more, script=script)
    assert_good(result)
    for row in result.metrics():
        assert row["rollout/log_probs"] == pytest.approx(row["rollout/rollout_log_probs"], abs=1e-4)
    assert max(abs(row["train/ppo_kl"]) for row in result.metrics()[1:]) > 1e-4


@pytest.mark.slow
def test_a_run_resumed_between_two_updates_goes_on_with_the_weights_of_its_engines(
    runner, flags
) -> None:
    """One rollout was generated ahead. The next one, of the same weights, is generated after the
    resume.
    """
    saved = runner.tmp / "saved"
    flags = [
        *flags,
        "--keep-old-actor",
        "--update-weights-interval",
        3,
        "--num-rollout",
        6,
        "--save",
        saved,
    ]
    flags += ["--save-interval", 1]
    whole = runner.inline(*flags, name="whole", script="train_async.py")
    resumed = runner.inline(
        *flags, "--load", saved, "--ckpt-step", 3, name="resumed", script="train_async.py"
    )
    for result in (whole, resumed):
        assert_good(result)
        for row in result.metrics():
            assert row["rollout/log_probs"] == pytest.approx(
                row["rollout/rollout_log_probs"], abs=1e-4
            )
    assert same_numbers(resumed.metrics()[-2:], whole.metrics()[-2:]) == []


@pytest.mark.slow
def test_ppo_trains_a_critic(runner, flags) -> None:
    result = runner.inline(*flags, "--advantage-estimator", "ppo", "--num-rollout", 3)
    assert_good(result)
    losses = [row["train/critic-value_loss"] for row in result.metrics()]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.long  # test_seed_commands.py has one of two nodes
def test_joins_a_cluster_that_ray_start_made(runner, flags, tmp_path_factory) -> None:
    """`ray start --head` on this machine stands for a cluster; the run leaves it alive and
    empty.
    """
    import shutil
    import subprocess
    import sys
    import tempfile

    from slime.engines.process import free_port

    # sockets want a short path
    port, sockets = free_port(), tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    command = [
        Path(sys.executable).with_name("ray"),
        "start",
        "--head",
        "--node-ip-address",
        "127.0.0.1",
    ]
    command += [
        "--port",
        port,
        "--num-cpus",
        2,
        "--include-dashboard",
        "false",
        "--temp-dir",
        sockets,
        "--block",
    ]
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "SLIME_TEST_RUN": runner.marker}
    head = subprocess.Popen(
        [*map(str, command)], env={**os.environ, **loopback}, stdout=subprocess.DEVNULL
    )
    try:
        result = runner.run(
            *flags, "--num-rollout", 1, env={"RAY_ADDRESS": f"127.0.0.1:{port}", **loopback}
        )
        assert_good(result)
        assert len(result.metrics()) == 1
        left = [p for p in runner.alive() if "embedded.server" in " ".join(p.cmdline())]
        assert head.poll() is None and not left
    finally:
        runner.stop()
        head.wait(30)
        shutil.rmtree(sockets, ignore_errors=True)


def test_bad_input_is_reported_together_before_any_process_starts(runner, flags, prompts) -> None:
    prompts.write_text('{"prompt": "a", "label": "b"}\n{"prompt": broken\n')
    result = runner.inline(
        *flags, "--global-batch-size", 7, "--rolout-temperature", 1, "--hf-checkpoint", "nowhere"
    )
    assert result.code == 2
    assert "--rollout-temperature" in result.output  # the suggestion
    without_typo = runner.inline(*flags, "--global-batch-size", 7, "--hf-checkpoint", "nowhere")
    assert without_typo.code == 2
    for word in ("nowhere", f"{prompts}:2", "= 16", "--global-batch-size 7"):
        assert word in without_typo.output, without_typo.output
    assert not (runner.tmp / "outputs").exists()
