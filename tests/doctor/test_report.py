"""Healthy runs have no findings; each planted fault is the first finding."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.cli.main import main
from slime.config.args import FLAGS
from slime.doctor.facts import Facts, Process, Row, read_facts
from slime.doctor.report import diagnose, page
from slime.observability.run_state import RunState, StateFile

CHECKOUT = Path(__file__).resolve().parents[2]
HEALTHY = sorted(
    [
        *(Path(__file__).parent / "healthy").glob("*.jsonl"),
        *(CHECKOUT / "benchmarks" / "results").glob("h200_*_metrics.jsonl"),
    ]
)
"""Real runs that ended well: on the CPU quickstarts, an asynchronous one and one with an environment, and on H200s."""
HINTS_OF_HEALTHY = {"quickstart_cpu_16_steps": ["solved"], "async_filter_cpu": ["gap_of_old_tokens"]}
SETTINGS = {"rollout_batch_size": 8, "n_samples_per_prompt": 8}
Rows = list[dict[str, float | None]]


def rows_of(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def facts(rows: Rows, **known: object) -> Facts:
    steps: list[Row] = [row for row in rows if "rollout/step" in row]
    evaluations: list[Row] = [row for row in rows if "eval/step" in row]
    return Facts(Path("run"), SETTINGS, steps, evaluations, **known)  # type: ignore[arg-type]


def quickstart() -> Rows:
    return rows_of(Path(__file__).parent / "healthy" / "quickstart_cpu.jsonl")


def kinds(found: Facts) -> list[str]:
    return [finding.kind for finding in diagnose(found)]


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_run_has_no_findings(path: Path) -> None:
    found = diagnose(facts(rows_of(path)))
    assert [one.kind for one in found if not one.hint] == []
    assert [one.kind for one in found] == HINTS_OF_HEALTHY.get(path.stem, [])


def test_there_are_recordings_of_healthy_runs() -> None:
    assert len(HEALTHY) >= 9


def test_a_disagreement_about_fresh_tokens_is_found_beside_stale_ones() -> None:
    rows = quickstart()
    both(
        constant("train/train_rollout_logprob_abs_diff", 0.3), constant("train/logprob_gap_staleness_0", 0.3),
        constant("train/logprob_gap_staleness_1", 0.3),
    )(rows)  # fmt: skip
    assert kinds(facts(rows))[0] == "logprob_gap"


def test_a_slow_time_that_is_over_is_no_finding() -> None:
    rows = quickstart()
    set_all("perf/step_time", lambda step, steps: 90.0 if steps - 5 <= step < steps - 2 else 20.0)(rows)
    assert kinds(facts(rows)) == []


def state(status: str = "running", phase: str = "train", error: str = "", since: float = 1000.0) -> RunState:
    return RunState(status, 1234, "host", phase, since, error)  # type: ignore[arg-type]


# --- runs that learn nothing, or stop to ------------------------------------------------------------


def set_all(name: str, value: Callable[[int, int], float | None]) -> Callable[[Rows], None]:
    """Plant ``value(step, number of steps)`` in each step."""

    def plant(rows: Rows) -> None:
        steps = [row for row in rows if "rollout/step" in row]
        for number, row in enumerate(steps):
            row[name] = value(number, len(steps))

    return plant


def constant(name: str, value: float | None) -> Callable[[Rows], None]:
    return set_all(name, lambda step, steps: value)


def both(*plants: Callable[[Rows], None]) -> Callable[[Rows], None]:
    def plant(rows: Rows) -> None:
        for one in plants:
            one(rows)

    return plant


def falling_evaluation(rows: Rows) -> None:
    rows[:] = [row for row in rows if "eval/step" not in row]
    rows += [
        {"eval/step": step, "eval/held_out": 0.5 - step / 100, "eval/held_out-truncated_ratio": 0.0}
        for step in (0, 10, 20)
    ]


LEARNING = {
    "not_finite": set_all("train/loss", lambda step, steps: None if step > 5 else 0.1),
    "no_reward": constant("rollout/raw_reward", 0.0),
    "no_learning_rate": constant("train/lr-pg_0", 0.0),
    "no_gradient": constant("train/grad_norm", 0.0),
    "weights_differ": set_all("perf/audit_logprob_diff", lambda step, steps: 0.0 if step < 4 else 4.2),
    "logprob_gap": constant("train/train_rollout_logprob_abs_diff", 0.3),
    "gradient_spike": set_all("train/grad_norm", lambda step, steps: 900.0 if step == 9 else 2.0),
    "clipping": constant("train/pg_clipfrac", 0.55),
    "kl": set_all("rollout/kl", lambda step, steps: step / 2),
    "entropy_collapse": both(
        set_all("train/entropy_loss", lambda step, steps: 2.0 if step < 5 else 0.01),
        set_all("rollout/raw_reward", lambda step, steps: 0.3 + step / 1000),
    ),
    "entropy_explosion": both(
        set_all("train/entropy_loss", lambda step, steps: 1.0 + step / 2),
        set_all("rollout/raw_reward", lambda step, steps: 0.3 - step / 1000),
    ),
    "reward_hacking": falling_evaluation,
    "reward_collapse": set_all(
        "rollout/raw_reward", lambda step, steps: 0.8 if step < steps // 2 else 0.1 + step / 1e4
    ),
    "truncated": both(
        constant("rollout/truncated_ratio", 0.95), set_all("rollout/raw_reward", lambda step, steps: 0.2 + step / 1000)
    ),
    "length_collapse": both(
        set_all("rollout/response_len/mean", lambda step, steps: 300.0 if step < 6 else 4.0),
        set_all("rollout/raw_reward", lambda step, steps: 0.2 + step / 1000),
    ),
    "repetition": constant("rollout/repetition_frac", 0.6),
    "filter_starvation": constant("rollout/replaced_group_count", 40.0),
    "stale": constant("rollout/staleness/mean", 6.0),
    "no_spread": both(
        constant("rollout/zero_std/count_0.0", 8.0),
        set_all("rollout/raw_reward", lambda step, steps: 0.3 + step / 1000),
    ),
    "reward_timeouts": constant("rollout/reward_timeout_count", 20.0),
    "reward_errors": constant("rollout/reward_error_count", 20.0),
    "engines_lost": set_all("rollout/engine_lost_count", lambda step, steps: float(step in (3, 7, 9))),
    "retries": constant("rollout/http_retry_count", 50.0),
    "slower": both(
        set_all("perf/step_time", lambda step, steps: 10.0 + step * 3),
        set_all("perf/rollout_time", lambda step, steps: 5.0 + step * 3),
    ),
}
HINTS = {
    "slow_update_weights": both(constant("perf/step_time", 20.0), constant("perf/update_weights_time", 12.0)),
    "slow_save_model": both(constant("perf/step_time", 20.0), constant("perf/save_model_time", 12.0)),
    "long_tail": both(
        constant("perf/step_time", 100.0),
        constant("perf/rollout_time", 80.0),
        constant("rollout/response_len/max", 4000.0),
        constant("rollout/response_len/mean", 300.0),
    ),
    "gap_of_old_tokens": both(
        constant("train/logprob_gap_staleness_0", 0.01), constant("train/logprob_gap_staleness_2+", 0.4)
    ),
    "logprob_outliers": both(
        constant("train/train_rollout_logprob_abs_diff", 0.02),
        constant("train/train_rollout_logprob_abs_diff_max", 30.0),
    ),
    "clock": set_all("time", lambda step, steps: 1e9 + step * 10 - (3600 if step > 5 else 0)),
    "aborted": constant("rollout/aborted_group_count", 30.0),
    "solved": both(
        constant("rollout/zero_std/count_1.0", 8.0),
        set_all("rollout/raw_reward", lambda step, steps: 0.96 + step / 1000),
    ),
}


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


# --- runs that died or hang -------------------------------------------------------------------------

TRACE = f'Traceback (most recent call last):\n  File "{CHECKOUT}/slime/cluster/x.py", line 3, in f\n'
ERRORS = {
    "gpu_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity",
    "host_memory": "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    "shared_memory": "OSError: [Errno 28] No space left on device: '/dev/shm/slime-12-0'",
    "disk_full": "OSError: [Errno 28] No space left on device: '/data/iter_0000010/__0_0.distcp'",
    "open_files": "OSError: [Errno 24] Too many open files",
    "port_in_use": "OSError: [Errno 98] error while attempting to bind: address already in use",
    "collective_timeout": "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
    "gpu_fault": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "gpu_software": "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "bad_checkpoint": "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
    "data_exhausted": "slime.rollout.loop.X: the data source has no more groups: rollout 3 has accepted 4 of 8",
    "ledger": "slime.checkpoint.ledger.LedgerError: group 7 was asked for and has no outcome",
    "wait_expired": "slime.cluster.polling.WaitExpired: waited 3600 s (deadline 3600 s) for rank 1 to train rollout 3",
    "process_lost": "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "error": "ValueError: something that nobody has foreseen",
}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_that_ended_the_run_is_explained(kind: str) -> None:
    found = facts(quickstart(), state=state("failed", error=TRACE + ERRORS[kind]), processes=[])
    first = diagnose(found)[0]
    assert first.kind == kind and "train" in first.title and first.evidence[0].endswith(ERRORS[kind][-20:])


@pytest.mark.parametrize("kind", ["gpu_memory", "host_memory", "disk_full"])
def test_a_cause_that_only_a_log_tells(kind: str) -> None:
    logs = {"engine-0.log": "a line\n" + ERRORS[kind] + "\nthe last line\n", "train-actor-0.log": "fine\n"}
    failed = state("failed", error=TRACE + "ValueError: an engine ended")
    assert kinds(facts(quickstart(), state=failed, processes=[], logs=logs))[0] == kind
    killed = facts(quickstart(), state=state(), processes=[], logs=logs)
    assert kinds(killed)[0] == kind and killed.died


def test_a_log_does_not_hide_the_error_of_ones_own_function() -> None:
    error = TRACE + "  File \"/home/me/reward.py\", line 12, in score\nKeyError: 'answer'"
    found = facts(quickstart(), state=state("failed", error=error), processes=[], logs={"a.log": ERRORS["disk_full"]})
    first = diagnose(found)[0]
    assert first.kind == "own_function" and first.evidence == ("/home/me/reward.py:12", "KeyError: 'answer'")


def test_a_driver_that_was_killed() -> None:
    found = facts(quickstart(), state=state(phase="rollout"), processes=[], logs={"engine-0.log": "generated\n"})
    first = diagnose(found)[0]
    assert first.kind == "driver_killed" and "rollout" in first.title and first.evidence == ("engine-0.log: generated",)


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
    """With real processes: a driver and its child, of which the child is stopped; then the driver is killed."""
    code = (
        "import subprocess, sys, time; from pathlib import Path; from slime.observability.run_state import StateFile; "
        f"StateFile(Path({str(tmp_path)!r})).enter('rollout'); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    (tmp_path / "config.yaml").write_text("rollout_batch_size: 8\n")
    driver = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=CHECKOUT, start_new_session=True
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


# --- the command ------------------------------------------------------------------------------------


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
    assert "1. No response has ever got a reward." in capsys.readouterr().out
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["kind"] == "no_reward"
    assert main(["doctor", str(tmp_path / "none")]) == 1
    assert "has no config.yaml" in capsys.readouterr().err


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
    for file in (CHECKOUT / "slime" / "doctor").glob("*.py"):
        named = set(re.findall(r"--[a-z][\w-]+", file.read_text()))
        assert not [name for name in named - known if not name.startswith("--sglang-")], file.name
