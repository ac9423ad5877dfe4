"""``--dry-run``: what it prints with a real model, and that nothing starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from make_args import make_args
from safetensors.torch import save_file

from slime.cluster import checks
from slime.data.sample import Sample
from slime.engines.background import run
from slime.plugins.tools.dry_run import dry_run, own_answer
from slime.plugins.tools.plan.read import memory_lines, snapshot_bytes
from slime.plugins.tools.plan.setups import KINDS, count_parameters
from slime.rollout.rm_hub import async_rm

MESSAGES = [{"role": "user", "content": "What is 3 times 2?"}]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    rows = [{"prompt": MESSAGES, "label": str(6 + i)} for i in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def words(model: Path, data: Path, *more: object) -> list[str]:
    given = [
        "--hf-checkpoint",
        model,
        "--prompt-data",
        data,
        "--rollout-batch-size",
        2,
        "--n-samples-per-prompt",
        4,
    ]
    return [
        *map(str, given),
        "--train-backend",
        "fsdp",
        "--rollout-backend",
        "embedded",
        *map(str, more),
    ]


def report(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        checks.parse_and_check([*flags, "--dry-run"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_what_would_happen(
    capsys: pytest.CaptureFixture[str],
    smollm2: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    flags = words(
        smollm2, data, "--apply-chat-template", "--num-rollout", 6, "--rollout-max-response-len", 16
    )
    said = report(capsys, *flags, "--num-steps-per-rollout", "2", "--train-dtype", "float32")
    assert (
        "  --rollout-batch-size 2  (default 32)\n" in said and "  --global-batch-size 4\n" in said
    )
    assert "= 8 samples" in said and "2 per rollout" in said
    assert "48 samples, 12 optimizer steps, 4.00 epochs" in said
    assert (
        "<|im_start|>user" in said
        and "<|im_start|>assistant" in said
        and "What is 3 times 2?" in said
    )
    assert "label: '6'" in said and "3 prompts: 1.0, 1.0, 1.0" in said
    assert "134.5 M parameters" in said and "2.00 GiB" in said
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"


def test_supervised_fine_tuning_shows_what_is_trained_on(
    capsys: pytest.CaptureFixture[str], smollm2: Path, tmp_path: Path
) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "Six."}]
    file = tmp_path / "conversations.jsonl"
    file.write_text(json.dumps({"messages": turns}) + "\n")
    function = "slime.rollout.sft_rollout.generate_rollout"
    flags = words(smollm2, file, "--input-key", "messages", "--loss-type", "sft_loss")
    said = report(
        capsys, *flags, "--rollout-function-path", function, "--n-samples-per-prompt", "1"
    )
    whole, trained = said.split("first conversation")[1].split("trained on")
    assert "What is 3 times 2?" in whole and "Six.<|im_end|>" in whole
    assert "Six.<|im_end|>" in trained and "What is" not in trained


def test_the_ranks_of_a_critic_are_told(
    capsys: pytest.CaptureFixture[str], smollm2: Path, data: Path
) -> None:
    ppo = ("--advantage-estimator", "ppo", "--critic-num-gpus-per-node", 2)
    flags = words(smollm2, data, "--apply-chat-template", "--num-rollout", 1, *ppo)
    assert "  critic ranks    2, beside the others\n" in report(capsys, *flags)


def test_without_the_flag_the_arguments_are_returned(smollm2: Path, data: Path) -> None:
    assert not checks.parse_and_check(words(smollm2, data, "--apply-chat-template")).dry_run


def test_problems_come_before_the_report(
    capsys: pytest.CaptureFixture[str], smollm2: Path, data: Path
) -> None:
    with pytest.raises(SystemExit) as stopped:
        checks.parse_and_check([*words(smollm2, data), "--lr", "fast", "--dry-run"])
    said = capsys.readouterr()
    assert stopped.value.code == 2 and said.out == "" and "--lr: 'fast'" in said.err


def test_a_missing_chat_template_and_an_error_of_the_users_reward_are_told(
    smollm2: Path, tmp_path: Path
) -> None:
    texts, mine = tmp_path / "texts.jsonl", tmp_path / "mine.py"
    texts.write_text(json.dumps({"prompt": "3 x 2 =", "label": "6"}) + "\n")
    mine.write_text(
        "def reward(args, sample, **kwargs):\n    return 1.0 / (int(sample.response) - 6)\n"
    )
    lines: list[str] = []
    args = make_args(
        hf_checkpoint=str(smollm2),
        prompt_data=str(texts),
        custom_rm_path=f"{mine}:reward",
        rollout_batch_size=1,
    )
    lines += dry_run(args)
    assert any("chat template" in line for line in lines)
    assert any("'6'" in line and "ZeroDivisionError" in line for line in lines)


@pytest.mark.parametrize(
    ("reward", "ends"),
    [("(1.0, 'why')", True), ("float('nan')", True), ("{'a': 'b'}", True), ("{'a': 1}", False)],
)
def test_a_reward_that_would_end_the_run_is_told(
    reward: str, ends: bool, smollm2: Path, data: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(f"def reward(args, sample, **kwargs):\n    return {reward}\n")
    args = make_args(
        hf_checkpoint=str(smollm2), prompt_data=str(data), custom_rm_path=f"{mine}:reward"
    )
    (line,) = (line for line in dry_run(args) if "reward of its own answer" in line)
    assert ("ValueError: the reward of sample 0 is" in line) is ends


def test_memory_by_phase_on_the_machines_gpus_and_a_warning_if_it_will_not_fit(
    smollm2: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(tokens: int, kind: str | None) -> list[str]:
        for module in ("dry_run", "plan.read"):
            found = f"slime.plugins.tools.{module}.installed_kind"
            monkeypatch.setattr(found, lambda: KINDS[kind] if kind else None)
        lines: list[str] = []
        args = make_args(
            hf_checkpoint=str(smollm2), prompt_data=str(data), apply_chat_template=True, rollout_batch_size=256,
            rollout_backend="sglang", max_tokens_per_gpu=tokens, colocate=True, offload_train=True,
            offload_rollout=True,
        )  # fmt: skip
        lines += dry_run(args)
        first = next(number for number, line in enumerate(lines) if "slime plan" in line)
        return [
            lines[first],
            *(line for line in lines[first:] if "warning: " in line or " GiB of " in line),
        ]

    fits, too_much = said(2048, "l40s"), said(4_000_000, "l40s")
    phases = ["generate", "log-probs", "train", "weight", "save"]
    assert "(l40s;" in fits[0] and [line.split()[0] for line in fits[1:]] == phases
    assert [line.split()[0] for line in too_much[1:6]] == phases
    assert too_much[-1].startswith("  warning: train ") and "--max-tokens-per-gpu" in too_much[-1]
    assert len(said(2048, None)) == 1


def test_of_an_asynchronous_run_and_of_static_micro_batches(smollm2: Path, data: Path) -> None:
    lines: list[str] = []
    args = make_args(
        hf_checkpoint=str(smollm2), prompt_data=str(data), apply_chat_template=True, micro_batch_size=2,
        rollout_batch_size=1, async_buffer_size=3, asynchronous=True,
    )  # fmt: skip
    lines += dry_run(args, True)
    assert any("4 per step" in line for line in lines)
    assert any("3 rollouts" in line for line in lines)
    assert any("3 rollouts (1 epoch(s))" in line for line in lines)


@pytest.mark.parametrize(
    ("rm_type", "label", "metadata"),
    [
        ("math", "\\frac{1}{2}", {}),
        ("math", "so it is #### 42", {}),
        ("boxed_math", "42", {}),
        ("deepscaler", "42", {}),
        ("dapo", "42", {}),
        ("f1", "the lazy dog", {}),
        ("f1", ["the lazy dog", "a dog"], {}),
        ("boxed_f1", "the lazy dog", {}),
        ("last_number", "-3.5", {}),
        ("gpqa", "B", {"choices": ["red", "blue"]}),
        ("f1", "B", {"rm_type": "gpqa", "choices": ["red", "blue"]}),
    ],
)
def test_each_reward_type_accepts_its_labels_own_answer(
    rm_type: str, label: object, metadata: dict
) -> None:
    args = make_args(rm_type=rm_type)
    sample = Sample(prompt="?", label=label, metadata=metadata)  # type: ignore[arg-type]
    answer = own_answer(args, sample)
    assert answer is not None
    sample.response = answer
    scored = run(async_rm(args, sample))
    assert (scored["f1"] if isinstance(scored, dict) and "f1" in scored else scored) in (
        1.0,
        True,
    ) or (isinstance(scored, dict) and scored.get("score") == 1.0)


@pytest.mark.parametrize("rm_type", ["random", "remote_rm", "ifbench"])
def test_some_rewards_know_no_answer(rm_type: str) -> None:
    assert (
        own_answer(make_args(rm_type=rm_type, rm_url="http://x"), Sample(prompt="?", label="1"))
        is None
    )


def test_memory_follows_from_the_headers(smollm2: Path) -> None:
    parameters = count_parameters(str(smollm2))
    assert parameters == 134_515_008
    base = {
        "hf_checkpoint": str(smollm2),
        "train_backend": "fsdp",
        "rollout_dtype": "bfloat16",
        "save": "x",
    }
    assert snapshot_bytes(make_args(**base)) == 12 * parameters
    model, training, engine, snapshot = memory_lines(make_args(**base, actor_num_gpus_per_node=2))
    assert (
        "134.5 M" in model
        and "1.00 GiB" in training
        and "0.25 GiB" in engine
        and "1.50 GiB" in snapshot
    )
    assert next(memory_lines(make_args(hf_checkpoint="/nowhere"))).startswith("not known")
    # A run whose snapshot has room must not be refused for the size of another one.
    small = base | {"bf16_master_weights": True, "optimizer_8bit": True}
    assert snapshot_bytes(make_args(**small)) == 4 * parameters
    _, training, *_ = memory_lines(make_args(**small, actor_num_gpus_per_node=2))
    assert "0.38 GiB" in training
    _, training, *_ = memory_lines(make_args(**base, fsdp_cpu_offload=True))
    assert "CPU memory" in training


def test_a_quantized_checkpoint_has_the_parameters_of_its_config(
    smollm2: Path, tmp_path: Path
) -> None:
    """A stored number of it may hold several."""
    config = json.loads((smollm2 / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"w_blocks": torch.zeros(4, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    assert count_parameters(str(tmp_path)) == 0
    known = count_parameters(str(smollm2))
    assert snapshot_bytes(make_args(hf_checkpoint=str(tmp_path))) == pytest.approx(12 * known, 0.01)
