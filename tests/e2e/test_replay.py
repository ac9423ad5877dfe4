"""``slime replay`` on a real run: any step again, and what differs is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

EVIL = (
    "from pathlib import Path\n"
    "Path(__file__).with_name('ran').touch()\n"
    "def f(*_, **__):\n"
    "    raise ValueError\n"
)
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_step_is_computed_again_and_a_changed_record_is_named(
    runner, flags, tmp_path: Path
) -> None:
    ran = runner.inline(
        *flags, "--use-kl-loss", "--kl-loss-coef", "0.01", "--num-steps-per-rollout", 2,
        "--save", "saved", "--save-interval", 2, "--dump-details", "details",
    )  # fmt: skip
    assert ran.code == 0, ran.output

    def replay(*words: object) -> tuple[int, str]:
        result = runner.command("replay", ran.folder, *words)
        return result.code, result.output

    code, said = replay("--step", 2, "--sample", 33, "--tensors", tmp_path / "tensors")
    assert code == 0 and "equal: this step is the recorded one, bit for bit" in said, said
    assert "weights after the step: equal those that the engines had (version 0.3)" in said
    assert "optimizer step 0: it adds" in said and "dloss/dlogp" in said
    assert {"weights_before.safetensors", "actor_gradients_1.safetensors"} <= {
        path.name for path in (tmp_path / "tensors").iterdir()
    }

    code, said = replay("--step", 1, "--through", "--json")
    found = json.loads(said)
    assert code == 0 and found["exact"] and found["differs"] is None and found["tensors"] > 0, said

    code, said = replay("--step", 2, "--actor-num-gpus-per-node", 2)
    assert code == 0 and "equal within the tolerance" in said and "2 ranks, DP 2" in said, said

    # A run of a GPU is compared bit for bit if that is asked for.
    attempts = Path(ran.folder) / "attempts.jsonl"
    recorded = json.loads(attempts.read_text())
    recorded["settled"]["on_gpu"] = True
    attempts.write_text(json.dumps(recorded) + "\n")
    code, said = replay("--step", 2)
    assert code == 0 and "equal within the tolerance" in said, said
    code, said = replay("--step", 2, "--tolerance", 0)
    assert code == 0 and "equal: this step is the recorded one, bit for bit" in said, said

    file = tmp_path / "details" / "rollout_data" / "2.pt"
    dump = torch.load(file, weights_only=False)
    dump["samples"][0]["reward"] = dump["samples"][0]["reward"] + 0.5
    torch.save(dump, file)
    code, said = replay("--step", 2)
    assert code == 1 and "DIFFERS, first in rollout/" in said, said


def test_code_of_a_run_is_named_and_runs_only_where_that_is_asked(runner, flags, capsys) -> None:
    """With the command and its ranks as processes of their own, where they must import nothing."""
    ran = runner.inline(*flags, "--num-rollout", 1, "--dump-details", "details")
    assert ran.code == 0, ran.output

    # Python files in the working directory of the run, and in that of the command, are not
    # imported.
    config = Path(ran.folder) / "attempts.jsonl"
    started = Path(json.loads(config.read_text().splitlines()[0])["settled"]["working_directory"])
    for place in (started, Path(ran.folder)):
        for name in (
            "signal.py",
            "sitecustomize.py",
            "flash_attn.py",
            "kernels.py",
            "numexpr.py",
            "evil.py",
        ):
            (place / name).write_text(EVIL)

    words = ["replay", str(ran.folder), "--step", "0"]
    process = runner.spawn([sys.executable, "-P", "-m", "slime.cli.main", *words])
    result = runner.finish(process, "run")
    code, said = result.code, result.output
    assert code == 0 and "equal: this step is the recorded one, bit for bit" in said, said
    assert not (started / "ran").exists() and not (Path(ran.folder) / "ran").exists()
    settings = json.loads(config.read_text())
    settings["settings"] |= {
        "custom_tis_function_path": "evil.f",
        "use_tis": True,
        "loss_type": "policy_loss",
    }
    config.write_text(json.dumps(settings) + "\n")
    code, said = runner.command(*words).code, capsys.readouterr().err
    named = f"custom_tis_function_path: evil.f ({started}/evil.py)"
    assert code == 1 and named in said and "Traceback" not in said, said
    assert not (started / "ran").exists()
    runner.command(*words, "--run-its-code")
    said = capsys.readouterr().err
    assert f"runs {named}" in said and (started / "ran").exists(), said


@pytest.mark.long
def test_steps_of_ppo_with_a_kl_penalty_are_replayed_with_both_roles(runner, flags) -> None:
    """The critic's returns need the actor's log-probs, and the actor's advantages the critic's
    values.
    """
    ppo = ["--advantage-estimator", "ppo", "--kl-coef", "0.1", "--num-rollout", 2]
    ran = runner.inline(*flags, *ppo, "--dump-details", "details")
    assert ran.code == 0, ran.output
    assert all(
        row["perf/ref_log_probs_time"] > 0 and "train/critic-value_loss" in row
        for row in ran.metrics()
    )
    command = [
        sys.executable,
        "-m",
        "slime.cli.main",
        "replay",
        str(ran.folder),
        "--step",
        "1",
        "--through",
    ]
    result = runner.finish(runner.spawn(command), "run")
    assert (
        result.code == 0 and "equal: this step is the recorded one, bit for bit" in result.output
    ), result.output
