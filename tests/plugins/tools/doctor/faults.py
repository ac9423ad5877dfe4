"""Faults that are planted into recordings of healthy runs, for the tests and for
``tools/doctor_page.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from slime.observability.run_state import RunState
from slime.plugins.tools.doctor import diagnose
from slime.plugins.tools.doctor.facts import Facts, Finding, Process, Row

CHECKOUT = Path(__file__).resolve().parents[4]
HEALTHY = sorted(
    [
        *(Path(__file__).parent / "healthy").glob("*.jsonl"),
        *(CHECKOUT / "benchmarks" / "results").glob("h200_*_metrics.jsonl"),
    ]
)
"""Real runs that ended well. On the CPU: quickstarts, asynchronous ones, an environment, an agent,
LoRA, PPO, two engines, two ranks, one that was resumed, supervised fine-tuning. On two GPUs: FSDP
and Megatron with SGLang, one resumed in another layout, one whose engine was killed. And on
H200s."""
FAULTY = sorted((Path(__file__).parent / "faulty").glob("*.jsonl"))
"""Runs that something really happened to (``benchmarks/doctor_runs.py``), named by the first
finding.
"""
HOSTS = (
    "quickstart_cpu",
    "async_filter_cpu",
    "environment_cpu",
    "h200_quickstart_metrics",
    "h200_curve_metrics",
)
"""The recordings into which faults of metrics are planted."""
SETTINGS = {"rollout_batch_size": 8, "n_samples_per_prompt": 8}
Rows = list[dict[str, float | None]]


def rows_of(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def facts(rows: Rows, **known: object) -> Facts:
    steps: list[Row] = [row for row in rows if "rollout/step" in row]
    evaluations: list[Row] = [row for row in rows if "eval/step" in row]
    return Facts(Path("run"), SETTINGS, steps, evaluations, **known)  # type: ignore[arg-type]


SETTINGS_OF = {"sft_cpu": {"loss_type": "sft_loss"}}
"""The settings of recordings that the rules need beside :data:`SETTINGS`."""


def healthy(path: Path) -> Facts:
    """What is known of a healthy run."""
    known = facts(rows_of(path))
    return replace(known, settings={**known.settings, **SETTINGS_OF.get(path.stem, {})})


def quickstart() -> Rows:
    return rows_of(Path(__file__).parent / "healthy" / "quickstart_cpu.jsonl")


def kinds(found: Facts) -> list[str]:
    return [finding.kind for finding in diagnose(found)]


def state(
    status: str = "running", phase: str = "train", error: str = "", since: float = 1000.0
) -> RunState:
    return RunState(status, 1234, "host", phase, since, error)  # type: ignore[arg-type]


# --- runs that learn nothing, or stop to
# ------------------------------------------------------------


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
    "weights_differ": set_all(
        "perf/audit_logprob_diff", lambda step, steps: 0.0 if step < 4 else 4.2
    ),
    "logprob_gap": both(
        constant("train/train_rollout_logprob_abs_diff", 0.3),
        *(constant(f"train/logprob_gap_staleness_{age}", 0.3) for age in ("0", "1", "2+")),
    ),
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
        constant("rollout/truncated_ratio", 0.95),
        set_all("rollout/raw_reward", lambda step, steps: 0.2 + step / 1000),
    ),
    "length_collapse": both(
        set_all("rollout/response_len/mean", lambda step, steps: 300.0 if step < 6 else 4.0),
        set_all("rollout/raw_reward", lambda step, steps: 0.2 + step / 1000),
    ),
    "repetition": constant("rollout/repetition_frac", 0.6),
    "filter_starvation": constant("rollout/dynamic_filter/drop_zero_std_0.0", 40.0),
    "stale": constant("rollout/staleness/mean", 6.0),
    "no_spread": both(
        constant("rollout/zero_std/count_0.0", 8.0),
        set_all("rollout/raw_reward", lambda step, steps: 0.3 + step / 1000),
    ),
    "samples_failed": set_all("rollout/failed_ratio", lambda step, steps: float(step == 4)),
    "reward_timeouts": constant("rollout/reward_timeout_count", 20.0),
    "reward_errors": constant("rollout/reward_error_count", 20.0),
    "engines_lost": set_all(
        "rollout/engine_lost_count", lambda step, steps: float(step in (3, 7, 9))
    ),
    "ranks_lost": set_all("perf/trainer_restart_count", lambda step, steps: float(step in (3, 7))),
    "retries": constant("rollout/http_retry_count", 50.0),
    "slower": both(
        set_all("perf/step_time", lambda step, steps: 10.0 + step * 3),
        set_all("perf/rollout_time", lambda step, steps: 5.0 + step * 3),
    ),
}
HINTS = {
    "slow_update_weights": both(
        constant("perf/step_time", 20.0), constant("perf/update_weights_time", 12.0)
    ),
    "slow_save_model": both(
        constant("perf/step_time", 20.0), constant("perf/save_model_time", 12.0)
    ),
    "long_tail": both(
        constant("perf/step_time", 100.0),
        constant("perf/rollout_time", 80.0),
        constant("rollout/response_len/max", 4000.0),
        constant("rollout/response_len/mean", 300.0),
    ),
    "gap_of_old_tokens": both(
        constant("train/logprob_gap_staleness_0", 0.01),
        constant("train/logprob_gap_staleness_2+", 0.4),
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


TRACE = (
    f'Traceback (most recent call last):\n  File "{CHECKOUT}/slime/cluster/x.py", line 3, in f\n'
)
ERRORS = {
    "gpu_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
    "total capacity",
    "host_memory": "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    "shared_memory": "OSError: [Errno 28] No space left on device: '/dev/shm/slime-12-0'",
    "disk_full": "OSError: [Errno 28] No space left on device: '/data/iter_0000010/__0_0.distcp'",
    "open_files": "OSError: [Errno 24] Too many open files",
    "port_in_use": "OSError: [Errno 98] error while attempting to bind: address already in use",
    "collective_timeout": "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE)",
    "gpu_fault": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "gpu_software": "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "bad_checkpoint": "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
    "data_exhausted": "RuntimeError: the data source has no more groups: rollout 3 has accepted 4 of 8",
    "ledger": "slime.checkpoint.ledger.LedgerError: group 7 was asked for and has no outcome",
    "hidden_module": "AttributeError: module 'random' has no attribute 'Random'",
    "wait_expired": "slime.cluster.ray_wait.WaitExpired: waited 3600 s (deadline 3600 s, --phase-timeout) "
    "for rank 1 to train rollout 3",
    "process_lost": "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "server_failed": "slime.engines.process.ServerFailed: engine 0 (pid 41) was not healthy after 600 s:",
    "error": "ValueError: something that nobody has foreseen",
}


# --- the measurement
# --------------------------------------------------------------------------------

WORDS = {
    "not_finite": "the loss is NaN from step 6 on",
    "no_reward": "every reward is 0",
    "no_learning_rate": "the learning rate is 0",
    "no_gradient": "the gradient is 0",
    "weights_differ": "from step 4 on, the engines have other weights than the trainer",
    "logprob_gap": "the log-probs of both sides differ by 0.3 on average",
    "gradient_spike": "one gradient is 450 times as large as the others",
    "clipping": "55% of the tokens are clipped",
    "kl": "the KL to the reference grows by 0.5 per step",
    "entropy_collapse": "the entropy falls to 0.01 and the reward stays",
    "entropy_explosion": "the entropy grows by 0.5 per step and the reward stays",
    "reward_hacking": "the reward rises and the evaluation falls",
    "reward_collapse": "the reward falls from 0.8 to 0.1 in the middle of the run",
    "truncated": "95% of the responses are cut off",
    "length_collapse": "responses shrink from 300 to 4 tokens",
    "repetition": "60% of the responses repeat themselves",
    "filter_starvation": "the filter throws 40 groups away for 8 that are kept",
    "stale": "samples are 6 weight versions old",
    "no_spread": "all samples of a group have the same reward",
    "samples_failed": "all samples of one step fail",
    "reward_timeouts": "20 of 64 verifications do not end",
    "reward_errors": "20 of 64 verifications raise an error",
    "engines_lost": "an engine dies three times and comes back",
    "retries": "50 requests per rollout of 64 samples fail at first",
    "slower": "each step takes 3 s longer than the one before",
}


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        words: What is planted.
        runs: The healthy runs with the fault, by name.
        expected: The kind of the right diagnosis.
    """

    words: str
    runs: dict[str, Facts]
    expected: str

    def first(self, run: str) -> Finding | None:
        return next(iter(diagnose(self.runs[run])), None)

    @property
    def right(self) -> int:
        """In how many of the runs the first diagnosis is right."""
        return sum(
            (found := self.first(run)) is not None and found.kind == self.expected
            for run in self.runs
        )


def recording(name: str) -> Rows:
    return rows_of(next(path for path in HEALTHY if path.stem == name))


def planted(kind: str, host: str) -> Facts:
    rows = recording(host)
    LEARNING[kind](rows)
    return facts(rows)


def ended(kind: str, host: str) -> Facts:
    return facts(recording(host), state=state("failed", error=TRACE + ERRORS[kind]), processes=[])


def faults() -> Iterator[Fault]:
    """Yield all faults, each planted into every recording of :data:`HOSTS`."""
    for kind, words in WORDS.items():
        yield Fault(words, {host: planted(kind, host) for host in HOSTS}, kind)
    for kind, text in ERRORS.items():
        if kind != "error":
            yield Fault(
                f"the run ends with `{text}`", {host: ended(kind, host) for host in HOSTS}, kind
            )
    for words, kind, known in KILLED:
        begun = kind != "long_wait"  # whose run has no step yet
        yield Fault(
            words, {host: facts(recording(host) if begun else [], **known) for host in HOSTS}, kind
        )


LIVING = [Process(1234, "python train.py", False)]
OWN = TRACE + "  File \"/home/me/reward.py\", line 12, in score\nKeyError: 'answer'"
MISSING = OWN.replace("KeyError: 'answer'", "ModuleNotFoundError: No module named 'grader'")
LOST = (
    TRACE
    + "slime.cluster.ray_wait.ProcessLost: rank 1 of the actor was lost: its process has ended"
)
WAITING = RunState(
    "running", 1234, "host", "rollout", 0.0, "", "rollout 4 to be generated", 1000.0, 3600.0
)
KILLED: tuple[tuple[str, str, dict[str, object]], ...] = (
    (
        "the driver gets SIGKILL",
        "driver_killed",
        {"state": state(phase="rollout"), "processes": []},
    ),
    (
        "the driver gets SIGKILL after an engine's log has said that the disk is full",
        "disk_full",
        {"state": state(), "processes": [], "logs": {"engine-0.log": ERRORS["disk_full"] + "\n"}},
    ),
    (
        "a rank runs out of GPU memory; the driver only sees that it died",
        "gpu_memory",
        {
            "state": state("failed", error=LOST),
            "processes": [],
            "logs": {
                "train-actor-0.log": "step 3\n",
                "train-actor-1.log": ERRORS["gpu_memory"] + "\n",
            },
        },
    ),
    (
        "a rank gets SIGSEGV; the driver only sees that it died",
        "process_lost",
        {
            "state": state("failed", error=LOST),
            "processes": [],
            "logs": {"train-actor-1.log": "Segmentation fault\n"},
        },
    ),
    (
        "the user's reward function raises KeyError; a log has a survived error of another kind",
        "own_function",
        {
            "state": state("failed", error=OWN),
            "processes": [],
            "logs": {"a.log": ERRORS["port_in_use"]},
        },
    ),
    (
        "the user's reward function imports a package that is not installed",
        "own_function",
        {
            "state": state(
                "failed",
                error=OWN.replace("KeyError: 'answer'", "ModuleNotFoundError: No module named 'x'"),
            ),
            "processes": [],
        },
    ),
    (
        "a training phase lasts hours instead of seconds",
        "phase_hangs",
        {"state": state(), "processes": LIVING, "now": 20_000.0},
    ),
    (
        "the first rollout waits for more than half of its deadline, in a run without a step",
        "long_wait",
        {"state": WAITING, "processes": LIVING, "now": 3100.0},
    ),
    (
        "a process gets SIGSTOP",
        "process_stopped",
        {"state": state(), "processes": [*LIVING, Process(99, "engine", True)], "now": 1001.0},
    ),
)
