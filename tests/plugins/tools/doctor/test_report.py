"""Healthy runs have no findings; each planted fault is the first finding."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slime.cli.main import main
from slime.config.args import FLAGS
from slime.observability.run_state import StateFile
from slime.plugins.tools.doctor import diagnose, page
from slime.plugins.tools.doctor.facts import Facts, Process, read_facts
from tests.plugins.tools.doctor.faults import (
    CHECKOUT,
    ERRORS,
    FAULTY,
    HEALTHY,
    HINTS,
    LEARNING,
    SETTINGS,
    TRACE,
    WORDS,
    Rows,
    both,
    constant,
    facts,
    faults,
    healthy,
    kinds,
    quickstart,
    rows_of,
    set_all,
    state,
)

HINTS_OF_HEALTHY = {
    "quickstart_cpu_16_steps": ["solved"],
    "async_filter_cpu": ["gap_of_old_tokens"],
    "two_ranks_cpu": ["slow_update_weights"],  # on a machine that others used, too
}


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_run_has_no_findings(path: Path) -> None:
    found = diagnose(healthy(path))
    assert [one.kind for one in found if not one.hint] == []
    assert [one.kind for one in found] == HINTS_OF_HEALTHY.get(path.stem, [])


def test_the_first_diagnosis_is_right_and_the_page_says_how_often() -> None:
    found = list(faults())
    right = [fault for fault in found if fault.right == len(fault.runs)]
    assert len(found) >= 25 and len(right) >= 23 / 25 * len(found)
    assert len(HEALTHY) >= 10 and {fault.expected for fault in found} >= set(WORDS)
    spec = importlib.util.spec_from_file_location(
        "doctor_page", CHECKOUT / "tools" / "doctor_page.py"
    )
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    written = tool.PAGE.read_text(encoding="utf-8")
    assert tool.page(written) == written, "run python tools/doctor_page.py"


def test_what_another_process_said_last_explains_why_it_was_lost() -> None:
    lost = state("failed", error=TRACE + ERRORS["process_lost"])
    survived = {"train-actor-1.log": ERRORS["gpu_memory"] + "\n" + "trained a step\n" * 1000}
    assert kinds(facts(quickstart(), state=lost, processes=[], logs=survived)) == ["process_lost"]
    dying = {"train-actor-1.log": "trained a step\n" * 1000 + ERRORS["gpu_memory"] + "\n"}
    first = diagnose(facts(quickstart(), state=lost, processes=[], logs=dying))[0]
    assert first.kind == "gpu_memory" and first.evidence[-1].endswith(ERRORS["process_lost"][-20:])


OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 139.80 GiB of which 1.20 GiB is free. Of the allocated memory 130.10 GiB is "
    "allocated by PyTorch, and 3.40 GiB is reserved by PyTorch but unallocated."
)


def test_out_of_memory_shows_the_memory_by_phase() -> None:
    rows = rows_of(CHECKOUT / "benchmarks" / "results" / "h200_curve_metrics.jsonl")
    failed = state("failed", error=TRACE + OUT_OF_MEMORY)
    evidence = diagnose(facts(rows, state=failed, processes=[]))[0].evidence
    assert evidence[1] == (
        "it asked for 2.00 GiB (the GPU has: 139.80 GiB; free on it: 1.20 GiB; in PyTorch's "
        "tensors: 130.10 GiB; reserved and not used by PyTorch: 3.40 GiB)"
    )
    last = [row for row in rows if "memory/train/device" in row][-1]
    assert evidence[2].startswith(f"GiB after each phase, step {last['rollout/step']:.0f} ")
    assert evidence[2].split()[-5:] == ["tensors", "reserved", "device", "process", "most"]
    (train,) = [line.split() for line in evidence if line.startswith("  train")]
    names = ("tensors", "reserved", "device", "process")
    most = max(row.get("memory/train/device") or 0.0 for row in rows)
    assert train == [
        "train",
        *(f"{last[f'memory/train/{name}']:.1f}" for name in names),
        f"{most:.1f}",
    ]
    without = diagnose(facts(quickstart(), state=failed, processes=[]))[0].evidence
    assert len(without) == 3 and "--record-memory-history" in without[2]


def test_outliers_of_the_log_prob_gap_are_named_by_sample_and_token(tmp_path: Path) -> None:
    import torch

    recorded = (
        CHECKOUT / "tests" / "plugins" / "tools" / "ui" / "tiny" / "details" / "train_data" / "2.pt"
    )
    dump = torch.load(recorded, weights_only=False)
    # a forced end token, of which the engine says that it was sure
    for sample in dump["samples"][:6]:
        sample["rollout_log_probs"][-1], sample["log_probs"][-1], sample["tokens"][-1] = (
            0.0,
            -20.0,
            2,
        )
    # is not trained
    dump["samples"][6]["rollout_log_probs"][0], dump["samples"][6]["loss_masks"][0] = -50.0, 0
    torch.save(dump, tmp_path / "2.pt")
    rows = quickstart()
    HINTS["logprob_outliers"](rows)
    next(row for row in rows if row.get("rollout/step") == 2)[
        "train/train_rollout_logprob_abs_diff_max"
    ] = 31.0
    known = {"save_debug_train_data": str(tmp_path / "{rollout_id}.pt")}
    found = diagnose(replace(facts(rows), settings={**SETTINGS, **known}))[0]
    trained = sum(int(sample["loss_masks"].sum()) for sample in dump["samples"])
    assert found.kind == "logprob_outliers"
    assert (
        found.evidence[1].startswith("step 2: ")
        and f" of {trained} trained tokens" in found.evidence[1]
    )
    first = dump["samples"][0]
    assert found.evidence[2] == (
        f"sample {first['sample_indices']}, token {len(first['loss_masks']) - 1} (the last), id "
        "2: engine 0.000, trainer -20.000; slime ui shows it"
    )
    assert not any("-50" in line for line in found.evidence)
    assert any("last token" in line for line in found.evidence)
    assert any("id 2" in line for line in found.evidence)
    without = diagnose(facts(rows))[0]
    assert "--dump-details FOLDER" in without.evidence[1]


def test_a_disagreement_about_fresh_tokens_is_found_beside_stale_ones() -> None:
    rows = quickstart()
    both(
        constant("train/train_rollout_logprob_abs_diff", 0.3), constant("train/logprob_gap_staleness_0", 0.3),
        constant("train/logprob_gap_staleness_1", 0.3),
    )(rows)  # fmt: skip
    assert kinds(facts(rows))[0] == "logprob_gap"


def test_rewards_that_scatter_have_not_collapsed() -> None:
    """Those of two runs of a random model, which learn nothing: their best steps are luck."""
    asynchronous = [
        3, 16, 3, 2, 3, 28, 15, 4, 3, 4, 15, 15, 15, 14, 29, 2, 3, 16, 16, 16, 15, 2, 41, 28, 16, 2, 15, 16, 16, 3, 3,
    ]  # fmt: skip
    for rewards in (asynchronous, [3, 41, 4, 39, 3, 15, 2, 16, 3, 4, 27, 15, 3]):
        rows: Rows = [
            {"rollout/step": step, "rollout/raw_reward": reward / 100, "train/grad_norm": 1.0}
            for step, reward in enumerate(rewards)
        ]
        assert kinds(facts(rows)) == []
        for row in rows[len(rows) // 2 :]:
            row["rollout/raw_reward"] = (row["rollout/raw_reward"] or 0) - 0.6
        assert kinds(facts(rows)) == ["reward_collapse"]


@pytest.mark.parametrize("name", ["replaced_group_count", "dynamic_filter/drop_prompt_too_long"])
def test_groups_that_no_filter_has_dropped_are_not_its_fault(name: str) -> None:
    """Groups are also replaced because their verifier gave no result, and dropped because their
    prompt is too long.
    """
    rows = quickstart()
    constant(f"rollout/{name}", 40.0)(rows)
    assert "filter_starvation" not in kinds(facts(rows))


@pytest.mark.parametrize(
    ("kind", "step"), [("gradient_spike", "at step 109"), ("reward_collapse", "around step 10")]
)
def test_a_step_is_named_by_its_number_in_the_run(kind: str, step: str) -> None:
    """A run that goes on in another folder has no rows of its first steps there."""
    rows = quickstart()
    LEARNING[kind](rows)
    later = [
        row | {"rollout/step": row["rollout/step"] + 100} for row in rows if "rollout/step" in row
    ]
    (found,) = [one for one in diagnose(facts(later)) if one.kind == kind]
    assert step in found.title


def test_a_slow_time_that_is_over_is_no_finding() -> None:
    rows = quickstart()
    set_all("perf/step_time", lambda step, steps: 90.0 if steps - 5 <= step < steps - 2 else 20.0)(
        rows
    )
    assert kinds(facts(rows)) == []


@pytest.mark.parametrize("kind", LEARNING)
def test_a_planted_fault_is_the_first_finding(kind: str) -> None:
    rows = quickstart()
    LEARNING[kind](rows)
    found = diagnose(facts(rows))
    assert found and found[0].kind == kind and not found[0].hint


@pytest.mark.parametrize("kind", HINTS)
def test_a_run_that_could_be_better_gets_a_hint(kind: str) -> None:
    rows = quickstart()
    HINTS[kind](rows)
    found = diagnose(facts(rows))
    assert [(one.kind, one.hint) for one in found] == [(kind, True)]


def test_a_disk_that_is_nearly_full() -> None:
    assert kinds(facts(quickstart(), free_bytes=10**8)) == ["little_room"]


# --- runs that died or hang
# -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_that_ended_the_run_is_explained(kind: str) -> None:
    found = facts(quickstart(), state=state("failed", error=TRACE + ERRORS[kind]), processes=[])
    first = diagnose(found)[0]
    assert (
        first.kind == kind
        and "train" in first.title
        and first.evidence[0].endswith(ERRORS[kind][-20:])
    )


@pytest.mark.parametrize("kind", ["gpu_memory", "host_memory", "disk_full"])
def test_a_cause_that_only_a_log_tells(kind: str) -> None:
    logs = {
        "engine-0.log": "a line\n" + ERRORS[kind] + "\nthe last line\n",
        "train-actor-0.log": "fine\n",
    }
    failed = state("failed", error=TRACE + "ValueError: an engine ended")
    assert kinds(facts(quickstart(), state=failed, processes=[], logs=logs))[0] == kind
    killed = facts(quickstart(), state=state(), processes=[], logs=logs)
    assert kinds(killed)[0] == kind and killed.died


def test_a_log_does_not_hide_the_error_of_ones_own_function() -> None:
    error = TRACE + "  File \"/home/me/reward.py\", line 12, in score\nKeyError: 'answer'"
    found = facts(
        quickstart(),
        state=state("failed", error=error),
        processes=[],
        logs={"a.log": ERRORS["disk_full"]},
    )
    first = diagnose(found)[0]
    assert first.kind == "own_function" and first.evidence == (
        "/home/me/reward.py:12",
        "KeyError: 'answer'",
    )


def test_slime_in_another_folder_is_not_the_users_function() -> None:
    """A traceback of a run in a container, where a rank lost the other one; a file of the user is
    next to it.
    """
    error = (
        'Traceback (most recent call last):\n  File "/opt/slime/train.py", line 48, in loop\n'
        '  File "/opt/slime/slime/cluster/engine_pool.py", line 164, in _send\n'
        '  File "/usr/lib/python3.12/concurrent/futures/_base.py", line 456, in result\n'
        '  File "/opt/slime/slime/plugins/megatron/groups.py", line 134, in gather_flat\n'
    )
    gloo = (
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.3]:6050."
    )
    lost = diagnose(facts(quickstart(), state=state("failed", error=error + gloo), processes=[]))[0]
    assert lost.kind == "collective_timeout"
    mine = '  File "/opt/slime/examples/reward.py", line 3, in score\nKeyError: 1'
    own = diagnose(facts(quickstart(), state=state("failed", error=error + mine), processes=[]))[0]
    assert own.kind == "own_function" and own.evidence[0] == "/opt/slime/examples/reward.py:3"
    long = f'  File "/opt/slime/{"x" * 300}.py", line 3, in score\nKeyError: 1'
    named = diagnose(facts(quickstart(), state=state("failed", error=error + long), processes=[]))[
        0
    ]
    assert named.kind == "own_function"


@pytest.mark.parametrize("path", FAULTY, ids=lambda path: path.stem)
def test_a_run_that_something_really_happened_to(path: Path) -> None:
    """Recordings of benchmarks/doctor_runs.py; the name of the file is the kind of the first
    finding.
    """
    found = replace(
        facts(rows_of(path)), settings={"rollout_batch_size": 4, "n_samples_per_prompt": 4}
    )
    first = diagnose(found)[0]
    assert (first.kind, first.hint) == (path.stem, False)


def test_equal_rewards_are_no_fault_of_a_run_that_does_not_learn_from_them() -> None:
    rows = rows_of(next(path for path in HEALTHY if path.stem == "sft_cpu"))
    with_rewards = replace(facts(rows), settings={"rollout_batch_size": 4})
    assert kinds(with_rewards) == ["no_reward", "no_spread"]
    for known in ({"loss_type": "sft_loss"}, {"use_opd": True}):
        assert kinds(replace(with_rewards, settings={"rollout_batch_size": 4, **known})) == []


def test_a_large_learning_rate_is_no_fault_of_an_adapter_or_of_a_run_that_learns() -> None:
    rows = rows_of(FAULTY[0].with_name("large_learning_rate.jsonl"))
    known = {"rollout_batch_size": 4}

    def first(rate: float, reward: float, **settings: int) -> str:
        set_all("train/lr-pg_0", lambda step, steps: rate)(rows)
        set_all("rollout/raw_reward", lambda step, steps: reward if step else 0.1)(rows)
        return kinds(replace(facts(rows), settings=known | settings))[0]

    assert [first(rate, 0.0) for rate in (1e-5, 1e-3, 2e-3)] == [
        "truncated",
        "truncated",
        "large_learning_rate",
    ]
    assert [first(rate, 0.0, lora_rank=8) for rate in (2e-3, 2e-2)] == [
        "truncated",
        "large_learning_rate",
    ]
    assert first(2e-3, 0.2) == "truncated"


def test_a_rollout_that_was_not_finished_in_time_is_the_filters_fault_if_it_drops_most_groups() -> (
    None
):
    text = (
        "TimeoutError: rollout 0 did not finish within 60 s (--phase-timeout): {} of 4 groups "
        "are accepted{}; it still waits for 4 groups, whose first samples are [320, 324, 328, "
        "332]"
    )
    for accepted, dropped, kind in (
        (0, " (80 dropped as no_reason)", "filter_starvation"),
        (3, " (8 dropped as zero_std; 2 dropped as no_reason)", "filter_starvation"),
        (3, " (5 dropped as zero_std)", "wait_expired"),
        (2, "", "wait_expired"),
    ):
        failed = state("failed", "rollout", TRACE + text.format(accepted, dropped))
        assert kinds(facts([], state=failed, processes=[])) == [kind]


@pytest.mark.parametrize(
    ("file", "words", "kind"),
    [
        ("cluster/ray_wait.py", "waited 3 s (deadline 3 s) for x", "wait_expired"),
        ("cluster/ray_wait.py", "waited 3 s (deadline 3 s, --phase-timeout) for x", "wait_expired"),
        (
            "cluster/ray_wait.py",
            "did not answer for 3 s (--status-timeout); waited for x",
            "wait_expired",
        ),
        ("cluster/prefetch.py", "waited 3 s (deadline 3 s, --phase-timeout) for x", "wait_expired"),
        (
            "rollout/evaluate.py",
            "the evaluation did not finish within 3 s (--phase-timeout): ",
            "wait_expired",
        ),
        (
            "rollout/fully_async_rollout.py",
            "3 groups did not finish within 3 s before a weight update",
            "wait_expired",
        ),
        (
            "rollout/abort.py",
            "3 groups did not end after the abort of all requests (--phase-timeout)",
            "wait_expired",
        ),
        ("engines/process.py", "x (pid 3) ended with status ", "server_failed"),
        ("engines/process.py", "x (pid 3) was not healthy after 3 s:", "server_failed"),
        (
            "data/dataset.py",
            "x: all 3 prompts are longer than --rollout-max-prompt-len 3",
            "data_exhausted",
        ),
        (
            "data/source.py",
            "all 3 prompts of the data set are longer than --rollout-max-prompt-len",
            "data_exhausted",
        ),
        (
            "rollout/loop.py",
            "the data source has no more groups: rollout 3 has accepted ",
            "data_exhausted",
        ),
    ],
)
def test_messages_of_the_package_are_known(file: str, words: str, kind: str) -> None:
    """The words are those of the source, in which 3 and x stand for values."""
    text = (CHECKOUT / "slime" / file).read_text(encoding="utf-8")
    text = re.sub(r'"\n\s*f?"', "", text)  # a message of several lines
    for place, value in (
        ("what", "x"),
        ("self.what", "x"),
        ("path", "x"),
        ("self.path", "x"),
        ("self.max_length", "3"),
        ("flag", "--phase-timeout"),
    ):
        text = text.replace(f"{{{place}}}", value)
    numbers = (
        r"\{[^{}]*:\.0f\}|\{[^{}]*:g\}|\{len\([^{}]*\)\}|\{self\.(pid|rollout_id)\}|\{max_length\}"
    )
    assert words in re.sub(numbers, "3", text)
    failed = state("failed", error=f"{TRACE}TimeoutError: {words}")
    assert kinds(facts([], state=failed, processes=[])) == [kind]


def test_what_the_processes_said_when_a_wait_expired_is_evidence() -> None:
    error = (
        "slime.cluster.ray_wait.WaitExpired: waited 30 s (deadline 30 s, --phase-timeout) for "
        "rollout 0 to be made\n"
        "what the processes say:\n"
        "  rollout manager: generate 0/4 for 30 s"
    )
    first = diagnose(facts([], state=state("failed", "rollout", TRACE + error), processes=[]))[0]
    assert first.kind == "wait_expired" and first.evidence[0].endswith("for rollout 0 to be made")
    assert first.evidence[1:] == (
        "what the processes say:",
        "rollout manager: generate 0/4 for 30 s",
    )


def test_compiled_code_of_a_library_is_not_the_users_function() -> None:
    """The traceback of a run with at most 40 open files, in which Ray's server died at once."""
    error = (
        "Traceback (most recent call last):\n"
        '  File "/opt/slime/slime/plugins/actors/ray_cluster.py", line 65, in connect\n'
        '    ray.init(\n  File "/opt/lib/python3.11/site-packages/ray/_private/node.py", line 1407, in start_head\n'
        '  File "python/ray/_raylet.pyx", line 428, in ray._raylet.wait_for_persisted_port\n'
        "RuntimeError: Timed out waiting for file /tmp/ray/session_1/gcs_server_port_1ae9b354192b4ba6c017cb33ab1e2368"
    )
    assert kinds(facts(quickstart(), state=state("failed", error=error), processes=[])) == ["error"]
    told = (
        f"{error}\n"
        "\n"
        "The above exception was the direct cause of the following exception:\n"
        "\n"
        "slime.cluster.actors.ClusterError: Ray did not start: "
        "/tmp/ray/session_1/logs/gcs_server.out: Unhandled exception: system_error. what(): "
        "signal_set_service pipe: Too many open files [system:24]"
    )
    assert kinds(facts(quickstart(), state=state("failed", error=told), processes=[])) == [
        "open_files"
    ]


CREATION = """Traceback (most recent call last):
  File "/site-packages/slime/plugins/actors/ray_actors.py", line 41, in get
    raise ActorLost(str(error)) from error
slime.cluster.actors.ActorLost: The actor died because of an error raised in its creation task, ray::T.__init__()
  File "/site-packages/slime/cluster/train_actor.py", line 7, in __init__
    self.backend = create()
                   ^^^^^^^^
"""
LINES = (
    "ValueError: GenerationConfig is invalid: ",
    "- `temperature`: `do_sample` is off.",
    "Fix these to save.",
)


@pytest.mark.parametrize("before", [TRACE, CREATION])
def test_an_error_of_several_lines_is_shown_whole(before: str) -> None:
    failed = state("failed", error=before + "\n".join(LINES) + "\n")
    (found,) = diagnose(facts(quickstart(), state=failed, processes=[], logs={}))
    assert found.evidence[: len(LINES)] == tuple(line.strip() for line in LINES)
    many = "\n".join([LINES[0], *(f"- {i}" for i in range(40)), LINES[-1]])
    (found,) = diagnose(
        facts(quickstart(), state=replace(failed, error=before + many), processes=[], logs={})
    )
    assert len(found.evidence) == 12 and (found.evidence[0], found.evidence[-1]) == (
        LINES[0].strip(),
        LINES[-1],
    )


def test_a_constructor_that_raised_is_no_death_of_a_process() -> None:
    failed = state("failed", error=CREATION + LINES[0])
    (found,) = diagnose(facts(quickstart(), state=failed, processes=[]))
    assert "set up" in found.title and "--max-restarts" not in found.advice
    known = replace(failed, error=CREATION + ERRORS["bad_checkpoint"])
    assert kinds(facts(quickstart(), state=known, processes=[])) == ["bad_checkpoint"]


def test_an_error_of_several_lines_at_the_end_of_a_log_has_its_first_and_its_last() -> None:
    logs = {"train.log": "step 3\n" + TRACE + "\n".join(LINES)}
    (line,) = facts(quickstart(), logs=logs).last_lines()
    assert line == f"train.log: {LINES[0].strip()} … {LINES[-1]}"


def test_a_driver_that_was_killed() -> None:
    found = facts(
        quickstart(),
        state=state(phase="rollout"),
        processes=[],
        logs={"engine-0.log": "generated\n"},
    )
    first = diagnose(found)[0]
    assert (
        first.kind == "driver_killed"
        and "rollout" in first.title
        and first.evidence == ("engine-0.log: generated",)
    )


def test_the_last_line_of_a_log_is_no_warning_and_no_part_of_a_traceback() -> None:
    logs = {
        "a.log": "epoch 3\nValueError: wrong\n  while reading\n\n",
        "b.log": "rank 1 is ready\n"
        "/lib/x.py:83: FutureWarning: `f` is deprecated.\n"
        "  return func(*args, **kwargs)\n",
        "c.log": "/lib/x.py:83: UserWarning: slow\n  return func(*args)\n",
    }
    assert facts(quickstart(), logs=logs).last_lines() == (
        "a.log: ValueError: wrong",
        "b.log: rank 1 is ready",
    )


def test_ends_that_are_no_fault() -> None:
    for status in ("completed", "stopped"):
        assert kinds(facts(quickstart(), state=state(status), processes=[])) == []


def test_a_phase_that_lasts_too_long() -> None:
    living = [Process(1234, "python train.py", False)]
    usual = max(row.get("perf/train_time") or 0 for row in quickstart())
    waiting = facts(quickstart(), state=state(), processes=living, now=1000 + 100 * usual + 200)
    assert kinds(waiting) == ["phase_hangs"]
    assert kinds(facts(quickstart(), state=state(), processes=living, now=1000 + usual)) == []


def test_a_stopped_process_is_found_and_a_dead_driver_too(tmp_path: Path) -> None:
    """With real processes: a driver and its child, of which the child is stopped; then the driver
    is killed.
    """
    code = (
        "import subprocess, sys, time; from pathlib import Path; from "
        "slime.observability.run_state import StateFile; "
        f"StateFile(Path({str(tmp_path)!r})).enter('rollout'); child = "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    (tmp_path / "config.yaml").write_text("rollout_batch_size: 8\n")
    driver = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
        start_new_session=True,
    )
    assert driver.stdout is not None
    child = int(driver.stdout.readline())
    try:
        assert kinds(read_facts(tmp_path)) == []
        os.kill(child, signal.SIGSTOP)
        while not any(one.stopped for one in read_facts(tmp_path).processes or ()):
            time.sleep(0.01)
        assert kinds(read_facts(tmp_path)) == ["process_stopped"]
        driver.kill()
        driver.wait()
        assert kinds(read_facts(tmp_path)) == ["driver_killed"]
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        driver.stdout.close()


# --- the command
# ------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("rollout_batch_size: 8\nn_samples_per_prompt: 8\n")
    rows = quickstart()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    StateFile(tmp_path).end("completed")
    assert main(["doctor", str(tmp_path)]) == 0
    assert "completed" in (said := capsys.readouterr().out) and "Nothing conspicuous" in said
    LEARNING["no_reward"](rows)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["doctor", str(tmp_path)]) == 1
    assert "1. No response" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["kind"] == "no_reward"
    assert main(["doctor", str(tmp_path / "none")]) == 1
    assert f"near it: {tmp_path}" in capsys.readouterr().err


def test_a_run_without_a_state_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    found = read_facts(tmp_path)
    assert found.state is None and diagnose(found) == [] and "not known" in next(page(found, []))


def test_advice_names_flags_that_exist() -> None:
    known = {flag.option for flag in FLAGS.values()}
    known |= {f"--no-{option[2:]}" for option in known} | {
        "--recompute-granularity",
        "--shm-size",
        "--pid",
        "--n",
        "--nonblocking",
    }
    for file in (CHECKOUT / "slime" / "plugins" / "tools" / "doctor").glob("*.py"):
        named = set(re.findall(r"--[a-z][\w-]+", file.read_text()))
        assert not [name for name in named - known if not name.startswith("--sglang-")], file.name


def test_groups_with_a_spread_may_have_the_same_mean_in_each_step() -> None:
    """As with one group of binary rewards, of which half are right in all three steps."""
    known = {"rollout_batch_size": 1, "n_samples_per_prompt": 8}
    rows = [{"rollout/step": step, "rollout/raw_reward": 0.5} for step in range(4)]
    assert diagnose(Facts(Path("run"), known, rows)) == []
    for row in rows:
        row["rollout/zero_std/count_0.5"] = 1.0
    assert [one.kind for one in diagnose(Facts(Path("run"), known, rows))] == [
        "no_reward",
        "no_spread",
    ]


@pytest.mark.parametrize(("interval", "kinds_"), [(10, []), (1, ["slow_save_model"])])
def test_a_phase_that_is_not_in_every_step_counts_by_its_share(
    interval: int, kinds_: list[str]
) -> None:
    """A snapshot of 12 s in every tenth step of 10 s takes a tenth of the time."""
    rows: list[dict[str, float]] = [
        {"rollout/step": step, "perf/step_time": 10.0} for step in range(50)
    ]
    for row in rows[interval - 1 :: interval]:
        row |= {"perf/step_time": 22.0, "perf/save_model_time": 12.0}
    assert [one.kind for one in diagnose(Facts(Path("run"), {}, rows))] == kinds_


def test_groups_of_all_reasons_of_a_filter_are_counted_but_not_prompts_that_are_too_long() -> None:
    from slime.rollout.metrics import Counts

    def said(**dropped: int) -> list[str]:
        counts = Counts()
        counts.dropped.update(dropped)
        error = (
            "TimeoutError: rollout 3 did not finish within 600 s (--phase-timeout): 2 of 4 "
            f"groups are accepted{counts.drop_report()}; it still waits for 0 groups"
        )
        return [
            one.title for one in diagnose(Facts(Path("run"), state=state("failed", error=error)))
        ]

    assert said(**{"zero_std_0.0": 7, "zero_std_1.0": 6, "zero_std_0.5": 5})[0].startswith(
        "The filter threw 18"
    )
    assert "filter" not in said(prompt_too_long=70, **{"zero_std_1.0": 2})[0]
