"""``slime translate`` runs a script apart from everything else, and translates what bash makes of it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from slime.plugins.agents.sandbox import Sandbox, SandboxUnavailable
from slime.plugins.compat import translate as module
from slime.plugins.compat.recorder import record
from slime.plugins.compat.translate import translate

pytestmark = pytest.mark.real  # a sandbox is a process


def available() -> bool:
    try:
        Sandbox()
    except SandboxUnavailable:
        return False
    return True


needs_namespaces = pytest.mark.skipif(not available(), reason="there are no namespaces here")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that another user can read, from which scripts are translated."""
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(*words: str) -> tuple[list[str], str]:
    """The words after the program of the printed command, and the rest of the report."""
    lines: list[str] = []
    assert translate(list(words), lines.append) == 0
    command, _, changes = "\n".join(lines).partition("\n\n")
    return shlex.split(command.replace("\\\n", " "))[2:], changes


TRAIN = "python3 train.py --hf-checkpoint m"
SCRIPTS = {
    "case": (
        "case ${MODE:-fast} in slow) LR=1e-5 ;; fast) LR=2e-6 ;; esac\n" + TRAIN + " --lr $LR",
        "--lr 2e-6",
    ),
    "arrays": (
        'A=(--eval-prompt-data)\nfor i in 1 2; do A+=("set$i" "/d/$i.jsonl"); done\n'
        "unset 'A[4]'\n" + TRAIN + ' "${A[@]}"',
        "--eval-prompt-data set1 /d/1.jsonl set2",
    ),
    "arithmetic": (
        "L=$((1024 * 8)); N=$(echo 3 | sed s/3/4/)\n"
        + TRAIN
        + " --rollout-max-response-len $L --num-rollout $N",
        "--rollout-max-response-len 8192 --num-rollout 4",
    ),
    "functions": (
        "run() { local lr=$1; shift; " + TRAIN + ' --lr "$lr" "$@"; }\nrun 3e-6 --seed 5',
        "--lr 3e-6 --seed 5",
    ),
    "heredoc": (
        "cat > own.json <<EOF\n{\"lr\": 4e-6}\nEOF\n"
        "LR=$(python3 -c 'import json; print(json.load(open(\"own.json\"))[\"lr\"])')\n"
        + TRAIN
        + " --lr $LR",
        "--lr 4e-06",
    ),
    "ray": (
        "set -ex\npkill -9 sglang\nsleep 300\nray stop --force\nmkdir -p /data/logs\n"
        'E="{\\"env_vars\\": {\\"A\\": \\"b c\\"}}"\n'
        'ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="$E" \\\n   -- '
        + TRAIN
        + " --seed 6 2>&1 | tee train.log",
        "--seed 6",
    ),
    "ray with bash": (
        "ray job submit --working-dir . -- bash -c '" + TRAIN + ' --seed "$0"\' 7',
        "--seed 7",
    ),
    "container": (
        'docker run --gpus all -v "$PWD:/w" image bash -lc "cd /w && ' + TRAIN + ' --seed 8"',
        "--seed 8",
    ),
    "nodes": (
        "srun --nodes 2 bash -c '" + TRAIN + " --seed 9'",
        "--seed 9",
    ),
    "log elsewhere": (
        "LOG=/data/logs/run.log\nnohup " + TRAIN + ' --seed 10 > "$LOG" 2>&1 &',
        "--seed 10",
    ),
    "quotes": (
        TRAIN + """ --rollout-stop '$' "a b" '^x$' --apply-chat-template-kwargs '{"a": "b"}'""",
        """--rollout-stop '$' 'a b' '^x$' --apply-chat-template-kwargs '{"a": "b"}'""",
    ),
}  # fmt: skip


@needs_namespaces
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_words_are_those_of_bash(folder: Path, name: str) -> None:
    text, expected = SCRIPTS[name]
    (folder / "run.sh").write_text(f"#!/bin/bash\n{text}\n")
    words, changes = said("run.sh")
    assert words == ["--hf-checkpoint", "m", *shlex.split(expected)]
    assert "guess" not in changes and "did not reach" not in changes


@needs_namespaces
def test_arguments_sourced_files_and_own_programs(folder: Path) -> None:
    (folder / "scripts" / "models").mkdir(parents=True)
    (folder / "scripts" / "models" / "mine.sh").write_text("MODEL_ARGS=(--num-layers 3)\n")
    inner = folder / "scripts" / "inner.sh"
    inner.write_text('#!/bin/bash\npython3 train.py "$@"\n')
    inner.chmod(0o755)
    script = folder / "scripts" / "run.sh"
    script.write_text(
        'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
        'source "${HERE}/models/mine.sh"\nsource scripts/models/qwen3-4B.sh\n'
        '"$HERE/inner.sh" ${MODEL_ARGS[@]} --lr $1 --save "$HERE/out"\n'
    )
    words, changes = said(str(script), "1e-7")
    # The second file is missing: that of slime has 36 layers, and the reader is told.
    assert words[words.index("--num-layers") + 1] == "36"
    assert "scripts/models/qwen3-4B.sh is not here" in changes
    assert words[-4:] == ["--lr", "1e-7", "--save", str(folder / "scripts" / "out")]


@needs_namespaces
def test_a_script_changes_nothing_and_gets_no_secret(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_KEY", "very-secret")
    monkeypatch.setenv("OTHER", "not named")
    (folder / "kept").write_text("1")
    (folder / "run.sh").write_text(
        "rm -rf kept; echo 2 > kept; touch new; echo $$ > /tmp/left_by_a_script\n"
        "echo $(id -u) $(env | grep -c OTHER)\n"
        "(exec 3<>/dev/tcp/127.0.0.1/22) && NET=1\n"
        "python3 train.py --wandb-key $WANDB_KEY --seed $(id -u) --save ${NET:-none} "
        "--run-name $MASTER_ADDR\n"
    )
    lines: list[str] = []
    translate(["run.sh"], lines.append)
    assert "--wandb-key ${WANDB_KEY}" in lines[0] and "very-secret" not in "".join(lines)
    assert "--seed 0 " not in lines[0] and "--save none" in lines[0]
    assert "empty: MASTER_ADDR" in "".join(lines)
    assert (folder / "kept").read_text() == "1"
    assert sorted(path.name for path in folder.iterdir()) == ["kept", "run.sh"]
    assert not Path("/tmp/left_by_a_script").exists()


@needs_namespaces
def test_a_script_that_does_not_end_or_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.plugins.compat.recorder.SECONDS", 2.0)
    (folder / "run.sh").write_text(f"{TRAIN} --seed 1\nwhile :; do :; done\n")
    words, changes = said("run.sh")
    assert words[-2:] == ["--seed", "1"] and "bash did not end within 1 s" in changes
    (folder / "run.sh").write_text(f"set -eu\necho ${{1:?give a size}}\n{TRAIN} --seed 2\n")
    words, changes = said("run.sh")
    assert words[-2:] == ["--seed", "2"]
    assert "this is a guess: bash ended with status 1" in changes and "give a size" in changes


@needs_namespaces
def test_the_environment_of_slime_is_not_made_and_its_programs_stand_for_what_they_print(
    folder: Path,
) -> None:
    checkout = Path(__file__).resolve().parents[3]
    (folder / "run.sh").write_text(
        f"python=$(bash {checkout}/scripts/env.sh | tail -n 1)\n"
        'data="$("$python" prepare.py "two words")/train.jsonl"\n'
        '"$python" - <<< "raise SystemExit(1)"\n'
        '"$python" train.py --prompt-data "$data" --custom-rm-path "$python judge.py"\n'
    )
    lines: list[str] = []
    translate(["run.sh"], lines.append)
    # bash asks the program when the command is run.
    assert '--prompt-data "$(python prepare.py two\\ words)/train.jsonl"' in lines[0]
    assert "--custom-rm-path 'python judge.py'" in lines[0] and "guess" not in "".join(lines)


@needs_namespaces
def test_what_only_a_sourced_file_reads_and_a_folder_that_is_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LR", "3e-6")
    monkeypatch.setenv("OUT", str(folder.parent / "new"))
    (folder / "common.sh").write_text(
        'here="$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)"\nmkdir -p "$OUT"\n'
        f'cd "$OUT" || exit 1\ntrain() {{ {TRAIN} --lr "$LR" --save "$PWD" --load "$here" "$@"; }}\n'
    )
    (folder / "scripts").mkdir()
    (folder / "scripts" / "run.sh").write_text(
        'source "$(dirname "$0")/../common.sh"\ntrain --seed 1\n'
    )
    words, changes = said("scripts/run.sh")
    assert words[2:] == [
        "--lr", "3e-6", "--save", str(folder.parent / "new"), "--load", str(folder / "scripts"), "--seed", "1",
    ]  # fmt: skip
    assert "there is no such folder" not in changes


@needs_namespaces
def test_each_training_of_a_script_is_translated(folder: Path) -> None:
    (folder / "run.sh").write_text(
        f"N=$(nvidia-smi -L | wc -l)\nfor lr in 1e-6 2e-6; do {TRAIN} --lr $lr; done\npip install trl x\n"
    )
    lines: list[str] = []
    translate(["run.sh"], lines.append)
    report = "\n".join(lines)
    assert "--lr 1e-6" in report and "--lr 2e-6" in report and "starts 2 trainings" in report
    assert "nvidia-smi has no answer here" in report


def test_without_namespaces_the_text_is_read_and_that_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: object) -> None:
        raise SandboxUnavailable("no namespaces")

    monkeypatch.setattr(module, "record", unavailable)
    (folder / "run.sh").write_text(f"LR=1e-6\n{TRAIN} --lr $LR --seed $(date +%s)\n")
    words, changes = said("run.sh")
    assert words[:4] == ["--hf-checkpoint", "m", "--lr", "1e-6"]
    assert "this is a guess" in changes and "no namespaces" in changes


@needs_namespaces
def test_the_recipes_of_slime_are_recorded() -> None:
    scripts = sorted((Path(__file__).resolve().parents[3] / "scripts").glob("run-*.sh"))
    assert scripts
    for script in scripts[:3]:
        recorded = record(script)
        assert any("--hf-checkpoint" in words for words in recorded.commands), script


OPENRLHF = """ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m
--actor.adam.lr 5e-7 --actor.adam.betas 0.9 0.98 --vllm.num_engines 4 --vllm.tensor_parallel_size 2
--algo.kl.init_coef 1e-4 --algo.kl.use_loss --data.prompt_dataset a.jsonl --reward.remote_url r.py --odd.one 1"""
TRL = """torchrun --nproc_per_node 4 grpo.py --config own.yaml --use_peft --report_to wandb
--reward_funcs accuracy_reward think_format_reward"""


@pytest.mark.parametrize(
    ("command", "has", "changes"),
    [
        (
            OPENRLHF,
            ["--lr 5e-7", "--adam-beta1 0.9 --adam-beta2 0.98", "--rollout-num-gpus 8", "--kl-loss-coef 1e-4",
             "--use-kl-loss", "--rollout-batch-size 1024", "--n-samples-per-prompt 1", "--lr-decay-style cosine",
             "--rollout-backend vllm"],
            ["--odd.one 1: slime has no flag", "--reward.remote_url r.py: --rm-url takes the URL"],
        ),
        (
            TRL,
            ["--hf-checkpoint m", "--lora-rank 16", "--lora-alpha 32", "--rm-type math", "--use-wandb",
             "--actor-num-gpus-per-node 4", "--global-batch-size 64", "--rollout-batch-size 8", "--colocate",
             "--lr 3e-06"],
            ["think_format_reward: it gets lists", "--torch_compile True: slime has no flag",
             "2 samples of a device x 8 accumulation steps x 4 devices"],
        ),
        (
            "python3 -m verl.trainer.main_ppo data.train_files=\"['a.parquet','b.parquet']\" +x.y=1 "
            "actor_rollout_ref.model.path=m trainer.logger='[\"console\"]' config=2",
            ["--prompt-data a.parquet", "--advantage-estimator ppo", "--n-samples-per-prompt 1", "--colocate"],
            ["left out: b.parquet", "x.y 1: slime has no flag", "config 2: slime has no flag",
             "rollout.n is not given: it is 1 there"],
        ),
    ],
    ids=["openrlhf", "trl", "verl"],
)  # fmt: skip
def test_defaults_and_what_has_no_translation_are_named(
    folder: Path, command: str, has: list[str], changes: list[str]
) -> None:
    (folder / "own.yaml").write_text(
        "model_name_or_path: m\nlearning_rate: 0.000003\nper_device_train_batch_size: 2\n"
        "gradient_accumulation_steps: 8\ntorch_compile: true\n"
    )
    words, told = said("--", *shlex.split(command))
    line = " ".join(words)
    assert [part for part in has if part not in line] == [], line
    assert [part for part in changes if part not in told] == [], told
