"""``slime translate``: launch scripts of slime 0.3 and commands of other frameworks become commands
of slime.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from slime.cli.command import CommandError
from slime.cli.main import main
from slime.config.parser import read_command_line
from slime.plugins.compat.frameworks import TARGET, tables
from slime.plugins.compat.translate import translate
from tools.translations_page import PAGE, page

SLIME = """
#!/bin/bash
set -ex
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/qwen3-4B.sh"
NODES=2
CKPT_ARGS=(
   --hf-checkpoint /root/Qwen3-4B
   #--ref-load /root/other
   --ref-load /root/Qwen3-4B_torch_dist   # converted
)
PERF_ARGS=(
   --use-precision-aware-optimizer
   --megatron-to-hf-mode bridge
   --sglang-enable-ep-moe
   --no-such-flag 3
)
GRPO_ARGS=(--advantage-estimator grpo --eps-clip 0.2)
GRPO_ARGS+=(--eps-clip-high 0.28)
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="${RUNTIME_ENV_JSON}" \\
   -- python3 train.py \\
   --actor-num-nodes ${NODES} --rollout-num-gpus ${GPUS:-8} \\
   ${MODEL_ARGS[@]} \\
   "${CKPT_ARGS[@]}" ${GRPO_ARGS[@]} ${PERF_ARGS[@]} $@ 2>&1 | tee log
"""


def said(*words: str) -> tuple[list[str], str]:
    """The words of the printed command, and the rest of the report."""
    lines: list[str] = []
    assert translate(list(words), lines.append) == 0
    command, _, changes = "\n".join(lines).partition("\n\n")
    return shlex.split(command.replace("\\\n", " ")), changes


def test_a_launch_script_of_slime(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SLIME)
    words, changes = said(str(script))
    assert words[:6] == ["python3", "train.py", "--actor-num-nodes", "2", "--rollout-num-gpus", "8"]
    assert words[words.index("--num-layers") + 1] == "36", "the model script of this checkout"
    assert (
        words[words.index("--ref-load") + 1] == "/root/Qwen3-4B_torch_dist"
        and "/root/other" not in words
    )
    assert words[words.index("--eps-clip-high") + 1] == "0.28"
    assert read_command_line(words[2:])[1] == []
    for part in (
        "--use-precision-aware-optimizer has no effect: Adam's moments",
        "--megatron-to-hf-mode has no effect",
        "--sglang-enable-ep-moe was removed: use --sglang-ep-size; it is left out",
        "--no-such-flag does not exist; it is left out",
        "--n-samples-per-prompt is not given: its default is 8, and was 1",
    ):
        assert part in changes, changes


VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.train_files=a.parquet
data.val_files=b.parquet data.train_batch_size=128 actor_rollout_ref.actor.ppo_mini_batch_size=64
actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.use_dynamic_bsz=False trainer.val_before_train=False
algorithm.filter_groups.enable=True +mine.own=3 trainer.logger=[console,wandb]"""
OPENRLHF = """ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --pretrain m --vllm_num_engines 4 --prompt_data
a.jsonl --vllm_tensor_parallel_size 2 --use_wandb KEY --advantage_estimator group_norm --init_kl_coef 0.01
--async_train"""
TRL = """accelerate launch grpo.py --model_name_or_path m --beta 0.04 --num_generations 8 --generation_batch_size 64
--scale_rewards False --lr_scheduler_type constant_with_warmup --bf16"""


@pytest.mark.parametrize(
    ("command", "has", "lacks", "changes"),
    [
        (
            VERL,
            ["--advantage-estimator ppo", "--prompt-data a.parquet", "--eval-prompt-data val b.parquet",
             "--rollout-batch-size 128", "--global-batch-size 512", "--use-kl-loss", "--skip-eval-before-train",
             "--dynamic-sampling-filter-path slime.rollout.filter_hub", "--use-wandb", "--colocate",
             "--calculate-per-token-loss", "--rollout-num-gpus-per-engine 2", "--kl-loss-coef 0.001"],
            ["--use-dynamic-batch-size", "own"],
            ["--global-batch-size is 512, which counts samples, not prompts", "mine.own 3: slime has no flag",
             "rollout.tensor_model_parallel_size is not given: it is 2 there"],
        ),
        (
            OPENRLHF,
            ["train_async.py", "--hf-checkpoint m", "--rollout-num-gpus 8", "--rollout-num-gpus-per-engine 2",
             "--advantage-estimator grpo", "--kl-coef 0.01", "--use-wandb"],
            ["KEY", "--kl-loss-coef"],
            ["--rollout-num-gpus is 8, which counts GPUs, not engines", "--async_train: use train_async.py"],
        ),
        (OPENRLHF + " --use_kl_loss", ["--kl-loss-coef 0.01", "--use-kl-loss"], ["--kl-coef"], []),
        (
            TRL,
            ["--use-kl-loss", "--kl-loss-coef 0.04", "--n-samples-per-prompt 8", "--rollout-batch-size 8",
             "--disable-grpo-std-normalization", "--lr-decay-style constant", "--bf16"],
            [],
            ["--lr-decay-style constant", "which counts prompts, not samples"],
        ),
        (TRL.replace("0.04", "0.0"), ["--hf-checkpoint m"], ["--use-kl-loss"], []),
        (
            VERL + " actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.max_num_seqs=64"
            " actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
            ["--rollout-backend vllm", "--vllm-max-num-seqs 64"], ["--sglang", "ulysses"], [],
        ),
        (
            VERL + " actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.max_num_seqs=64"
            " actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            ["--rollout-backend sglang", "--sglang-max-running-requests 64",
             "--context-parallel-size 2", "--context-parallel-kind ulysses"], ["--vllm"], [],
        ),
        (
            OPENRLHF + " --vllm_sync_backend nccl --vllm_gpu_memory_utilization 0.5",
            ["--rollout-backend vllm", "--vllm-gpu-memory-utilization 0.5"], [], [],
        ),
        (
            TRL + " --use_vllm True --vllm_gpu_memory_utilization 0.3",
            ["--rollout-backend vllm", "--vllm-gpu-memory-utilization 0.3"], [], [],
        ),
    ],
    ids=["verl", "openrlhf", "openrlhf-kl-loss", "trl", "trl-no-kl", "verl-vllm", "verl-sglang",
         "openrlhf-vllm", "trl-vllm"],
)  # fmt: skip
def test_commands_of_other_frameworks(
    command: str, has: list[str], lacks: list[str], changes: list[str]
) -> None:
    words, told = said("--", *shlex.split(command))
    line = " ".join(words)
    assert [part for part in has if part not in line] == [] and [
        part for part in lacks if part in line
    ] == []
    assert [part for part in changes if part not in told] == []
    assert read_command_line(words[2:])[1] == []


RL_TOML = """
max_steps = 20
seq_len = 2048
[model]
name = "m"
[ckpt]
interval = 5
[trainer.optim]
lr = 3e-6
[orchestrator]
batch_size = 128
rollouts_per_example = 16
[orchestrator.sampling]
max_tokens = 128
[[orchestrator.env]]
id = "reverse-text"
[inference]
gpu_memory_utilization = 0.5
[inference.parallel]
tp = 2
"""


def test_a_script_of_prime_rl_keeps_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rl.toml").write_text(RL_TOML)
    (tmp_path / "infer.toml").write_text("[model]\nenforce_eager = true\n[own]\nkey = 3\n")
    script = tmp_path / "run.sh"
    script.write_text(
        "cd rl && ls\nuv run rl @ rl.toml --inference @ infer.toml --trainer.optim.weight-decay 0.1\n"
        "echo rl done\n"
    )
    words, told = said(str(script))
    line = " ".join(words)
    for part in (
        "train_async.py", "--rollout-backend vllm", "--vllm-gpu-memory-utilization 0.5", "--num-rollout 20",
        "--rollout-num-gpus-per-engine 2", "--vllm-enforce-eager", "--hf-checkpoint m", "--lr 3e-06",
        "--rollout-batch-size 8", "--n-samples-per-prompt 16", "--weight-decay 0.1", "--save-interval 5",
    ):  # fmt: skip
        assert part in line, line
    assert "--orchestrator.env: --environment verifiers" in told
    assert "--inference.own.key 3: slime has no flag" in told
    assert read_command_line(words[2:])[1] == []
    with pytest.raises(CommandError, match=r"absent\.toml cannot"):
        translate(["--", "uv", "run", "rl", "@", "absent.toml"])


@pytest.mark.parametrize("name", tables())
def test_every_flag_of_the_tables_exists(name: str) -> None:
    """And takes a value or not, as the table says."""
    table = tables()[name]
    targets = [
        (foreign, part) for foreign, text in table["flags"].items() for part in text.split(" + ")
    ]
    for foreign, target in targets:
        found = TARGET.fullmatch(target)
        if found is None:
            continue
        value = (
            []
            if found[3] in ("on", "off", "given") or (found[3] or "").startswith(("is_", "has_"))
            else [next(iter(table["values"].get(found[1], {}).values()), "1")]
        )
        problems = read_command_line([found[1], *([found[2]] if found[2] else []), *value])[1]
        assert [
            p for p in problems if "no such" in p or "expected" in p or "does not" in p
        ] == [], foreign
    assert table.get("defaults", {}).keys() <= table["flags"].keys()
    for flag, more in table.get("implied", {}).items():
        assert {flag, *more} <= table["flags"].keys()
    for flag, values in table["values"].items():
        for value in values.values():
            assert read_command_line([flag, value])[1] == []


def test_what_is_no_command_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.sh").write_text("echo hello\n")
    for words, part in (
        ([str(tmp_path / "a.sh")], "no command"),
        ([str(tmp_path / "b.sh")], "cannot be read"),
    ):
        with pytest.raises(CommandError, match=part):
            translate(words)
    with pytest.raises(CommandError, match="launch script"):
        translate([])
    assert main(["translate", "--", "python3", "train.py", "--lr", "1e-6"]) == 0
    assert "--lr 1e-6" in capsys.readouterr().out


def test_the_page_of_the_tables_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python tools/translations_page.py"


@pytest.mark.parametrize(
    "line",
    [
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.lora_rank=8 "
        "actor_rollout_ref.model.lora_alpha=16",
        "python3 -m openrlhf.cli.train_ppo_ray --lora_rank 8 --lora_alpha 16",
        "python3 trl/scripts/grpo.py --use_peft --lora_r 8 --lora_alpha 16",
    ],
)
def test_adapters_of_other_frameworks_are_translated(line: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(line + "\n")
    words, _ = said(str(script))
    assert (
        words[words.index("--lora-rank") + 1] == "8"
        and words[words.index("--lora-alpha") + 1] == "16"
    )


@pytest.mark.parametrize(
    "end", ["2> err.log", "&> log", "|& tee log", "; echo done", ";", "2>&1 | tee log", ">> log"]
)
def test_what_follows_a_command_is_no_value_of_its_last_flag(end: str, tmp_path: Path) -> None:
    """The script of a batch system may have any suffix."""
    script = tmp_path / "job.sbatch"
    space = "" if end == ";" else " "
    script.write_text(f"python3 train.py --hf-checkpoint m --lr 1e-6{space}{end}\necho done\n")
    lines: list[str] = []
    translate([str(script)], lines.append)
    assert shlex.split(lines[0].replace("\\\n", "")) == [
        "python3",
        "train.py",
        "--hf-checkpoint",
        "m",
        "--lr",
        "1e-6",
    ]
