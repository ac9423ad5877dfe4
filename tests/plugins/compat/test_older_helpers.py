"""Small functions that older scripts and logging functions call."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from make_args import make_args

from slime.data.sample import Sample
from slime.observability.logging_utils import logged_into
from slime.ray.rollout import compute_perf_metrics_from_samples
from slime.utils.external_utils.command_utils import execute_train
from slime.utils.tensorboard_utils import _TensorboardAdapter

LOOP = """
import json, os, sys
json.dump([sys.argv[1:], os.environ.get("MINE")], open(os.environ["OUT"], "w"))
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.mark.real
def test_a_launch_script_in_python(tmp_path: Path) -> None:
    loop = tmp_path / "my loop.py"
    loop.write_text(LOOP)
    out = tmp_path / "out.json"
    called = []
    execute_train(
        train_args="--lr 1e-6 \n --apply-chat-template-kwargs '{\"enable_thinking\": false}' ",
        num_gpus_per_node=8,
        megatron_model_type="qwen3-4B",
        train_script=str(loop),
        before_ray_job_submit=lambda: called.append(1),
        extra_env_vars={"OUT": str(out), "MINE": "a b"},
    )
    words, mine = json.loads(out.read_text())
    assert called == [1] and mine == "a b"
    assert words[:2] == ["--num-layers", "36"]
    assert words[-4:] == [
        "--lr",
        "1e-6",
        "--apply-chat-template-kwargs",
        '{"enable_thinking": false}',
    ]
    with pytest.raises(subprocess.CalledProcessError):
        execute_train("", train_script=str(loop), extra_env_vars={"OUT": str(out), "STATUS": "3"})
    with pytest.raises(FileNotFoundError, match=r"no-such-model\.sh"):
        execute_train("", megatron_model_type="no-such-model")


@pytest.mark.real
def test_the_loops_of_slime_get_the_flags(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        execute_train("--no-such-flag 1", train_script="train_async.py")
    assert error.value.returncode == 2
    assert "--no-such-flag" in capfd.readouterr().err


def test_the_speed_of_a_rollout() -> None:
    samples = [Sample(tokens=[1, 2, 3, 4], response_length=n) for n in (1, 3)]
    found = compute_perf_metrics_from_samples(make_args(rollout_num_gpus=2), samples, 2.0)
    assert found["tokens_per_gpu_per_sec"] == 1.0
    assert found["longest_sample_tokens_per_sec"] == 1.5


def test_what_goes_to_the_tensorboard_is_a_metric_of_the_run() -> None:
    metrics: dict[str, float] = {}
    with logged_into(metrics):
        _TensorboardAdapter(make_args()).log(data={"mine/one": 1}, step=3)
    assert metrics == {"mine/one": 1.0}
