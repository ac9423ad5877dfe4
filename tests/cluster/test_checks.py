"""What the driver finds wrong before a process starts."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from make_args import make_args

from slime.checkpoint import snapshot
from slime.cluster.checks import (
    check_checkpoints,
    check_schedules,
    check_snapshots,
)
from slime.config.args import Args
from slime.config.rules import Run
from slime.plugins.agents.environments.source import check_environment
from slime.plugins.tools.plan.read import check_save_folder, snapshot_bytes

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
from tiny_checkpoints import (
    FP8_CONFIG,
    llama_config,
    read_tensors,
    rewrite,
    save_model,
    to_block_fp8,
)


def test_a_folder_with_checkpoints_of_another_program_is_named_before_the_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "iter_0000100").mkdir()
    (tmp_path / snapshot.TRACKER).write_text("100")
    args = Args()
    assert check_snapshots(Run(args)) == []
    args.load = args.save = str(tmp_path)
    saving, loading = check_snapshots(Run(args))
    assert saving.startswith(f"--save {tmp_path} holds") and "(iter_0000100/" in saving
    assert (
        loading.startswith(f"--load {tmp_path} holds") and "convert_torch_dist_to_hf.py" in loading
    )


def test_a_missing_iteration_and_a_damaged_snapshot_are_named_before_the_start(
    tmp_path: Path,
) -> None:
    temp = snapshot.begin(tmp_path, 3)
    (temp / "a").write_bytes(b"abc")
    path = snapshot.commit(temp, {"rollout_id": 3})
    args = Args()
    args.load = args.save = str(tmp_path)
    assert check_snapshots(Run(args)) == []
    args.ckpt_step = 4
    assert "iteration 4" in check_snapshots(Run(args))[0]
    args.ckpt_step = 3
    (path / "a").write_bytes(b"ab")
    assert "2 bytes" in check_snapshots(Run(args))[0]


@pytest.mark.parametrize(
    ("changed", "asynchronous", "named"),
    [
        ({}, True, None),
        ({"update_weights_interval": 2}, True, "update_weights_interval: 3 -> 2"),
        ({"async_buffer_size": 2}, True, "async_buffer_size: 1 -> 2"),
        ({"max_weight_staleness": 2}, True, "max_weight_staleness: 3 -> 2"),
        ({}, False, "train.py instead of train_async.py"),
        ({"update_weights_interval": 2, "keep_old_actor": False}, True, None),
        ({"update_weights_interval": 2, "finetune": True}, True, None),
    ],
    ids=str,
)
def test_rollouts_ahead_that_another_old_actor_would_score_are_refused_before_the_start(
    tmp_path: Path, changed: dict[str, Any], asynchronous: bool, named: str | None
) -> None:
    """Their old log-probs would be those of other weights, or the run would wait for a rollout that
    has no room.
    """
    flags = dict(
        keep_old_actor=True, async_buffer_size=1, update_weights_interval=3, max_weight_staleness=3
    )
    for ahead in (0, 2):
        folder = tmp_path / f"{ahead}"
        temp = snapshot.begin(folder, 3)
        (temp / "a").write_bytes(b"abc")
        snapshot.commit(temp, {"rollout_id": 3, "ahead": ahead, "settings": flags})
        args = make_args().with_values(load=str(folder), **(flags | changed))
        problems = check_snapshots(Run(args, asynchronous))
        assert len(problems) == (ahead > 0 and named is not None)
        if problems:
            assert "2 rollout(s)" in problems[0] and str(named) in problems[0]
            assert "\n" not in problems[0]


def test_a_folder_with_nothing_to_load_is_no_silent_fresh_start(tmp_path: Path) -> None:
    args = Args()
    args.load, args.save, args.train_backend = (
        str(tmp_path / "load"),
        str(tmp_path / "save"),
        "fsdp",
    )
    (tmp_path / "load").mkdir()
    assert check_snapshots(Run(args)) == []  # empty: a first run
    (tmp_path / "load" / "logs").mkdir()
    (problem,) = check_snapshots(Run(args))
    assert "neither snapshots" in problem and problem.endswith("only logs")
    args.save = args.load
    assert check_snapshots(Run(args)) == []


@pytest.mark.parametrize(("inside", "backend"), [("torch_dist", "megatron"), ("dcp", "fsdp")])
def test_a_snapshot_of_the_other_backend_is_told_before_the_start(
    tmp_path: Path, inside: str, backend: str
) -> None:
    temp = snapshot.begin(tmp_path, 3)
    (temp / "actor" / inside).mkdir(parents=True)
    (temp / "actor" / "trainer.json").write_text("{}")
    (temp / "actor" / inside / ".metadata").write_bytes(pickle.dumps({}))
    snapshot.commit(temp, {"rollout_id": 3})
    args = Args()
    args.load = args.save = str(tmp_path)
    args.train_backend = backend
    assert check_snapshots(Run(args)) == []
    args.train_backend = {"fsdp": "megatron", "megatron": "fsdp"}[backend]
    (problem,) = check_snapshots(Run(args))
    assert f"with --train-backend {backend}" in problem


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama_config(), tmp_path_factory.mktemp("model"))


def test_every_checkpoint_that_the_run_reads_is_compared_with_its_model(
    model: Path, tmp_path: Path
) -> None:
    tensors = read_tensors(model)
    leftover = rewrite(
        model,
        tmp_path / "leftover",
        {**tensors, "mtp.weight": tensors["model.norm.weight"].clone()},
    )
    del tensors["model.norm.weight"]
    broken = rewrite(model, tmp_path / "broken", tensors)
    args = Args()
    args.hf_checkpoint, args.ref_load, args.rollout_backend = str(leftover), str(broken), "embedded"
    assert check_checkpoints(args) == []  # nothing uses the reference
    assert args.notices[-1].startswith(f"{leftover} has 1 tensors") and args.notices[-1].endswith(
        ": mtp.weight"
    )
    args.use_kl_loss, args.opd_teacher_load = True, str(broken / "..")
    (problem,) = check_checkpoints(args)
    assert problem.startswith(f"--ref-load: checkpoint {broken} ") and "LlamaForCausalLM" in problem
    assert "1 tensors: model.norm.weight" in problem
    args.hf_checkpoint = str(broken)
    for content in (
        '{"model_type": "llama", "hidden_size": "wide"}',
        '{"model_type": "other"}',
        "{",
        "[]",
    ):
        (broken / "config.json").write_text(content)
        assert "config.json" in check_checkpoints(args)[0]
    (broken / "config.json").write_text('{"model_type": "clip_text_model"}')  # no language model
    assert "transformers" in check_checkpoints(args)[0]
    args.rollout_backend, args.train_backend = "sglang", "megatron"  # these may know it
    assert not [problem for problem in check_checkpoints(args) if "cannot build" in problem]
    assert args.notices[-1].startswith(f"{broken} was not compared")


def test_sglang_with_a_quantized_checkpoint_is_refused(model: Path, tmp_path: Path) -> None:
    args = Args()
    args.rollout_backend = "sglang"
    folder = rewrite(model, tmp_path, to_block_fp8(read_tensors(model), 16))
    args.hf_checkpoint = str(folder)
    assert "quantized tensors" in check_checkpoints(args)[0]
    quantization = {**FP8_CONFIG, "weight_block_size": [16, 16]}
    rewrite(
        model, tmp_path, to_block_fp8(read_tensors(model), 16), quantization_config=quantization
    )
    (problem,) = check_checkpoints(args)
    assert "is quantized (fp8)" in problem and "tools/dequantize_hf.py" in problem
    args.debug_rollout_only = True  # the engines keep what they have read
    assert check_checkpoints(args) == []
    args.debug_rollout_only = False
    args.rollout_backend = "embedded"
    assert check_checkpoints(args) == []


def test_a_save_folder_that_cannot_be_written_or_has_no_room_is_told(
    model: Path, tmp_path: Path
) -> None:
    args = Args()
    args.hf_checkpoint, args.save = str(model), str(tmp_path / "save")
    assert check_save_folder(args) == [] and not (tmp_path / "save").exists()
    parameters = sum(t.numel() for t in read_tensors(model).values())
    assert snapshot_bytes(args) == 12 * parameters
    args.no_save_optim = True
    assert snapshot_bytes(args) == 4 * parameters
    (tmp_path / "file").touch()
    args.save = str(tmp_path / "file" / "save")
    (problem,) = check_save_folder(args)
    assert problem.startswith(f"--save {args.save} ")
    args.save, args.save_hf = str(tmp_path / "save"), str(tmp_path / "file" / "{rollout_id}")
    (problem,) = check_save_folder(args)
    assert problem.startswith(f"--save-hf {tmp_path / 'file' / '0'} ")


def test_a_schedule_that_cannot_be_made_is_named_before_the_start_where_the_length_is_known() -> (
    None
):
    args = make_args(num_rollout=10, lr_decay_style="cosine", lr_warmup_iters=20)
    (problem,) = check_schedules(args)
    assert problem.startswith("actor: ") and "20 steps" in problem and "10 steps" in problem
    args.num_rollout = None
    assert check_schedules(args) == []
    args.num_rollout = 100
    assert check_schedules(args) == []


def test_an_environment_that_cannot_be_created_or_needs_a_template_is_told(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text(
        "from slime.plugins.agents.environments import Environment, Task\n"
        "class One(Environment):\n"
        "    def __len__(self):\n        return 1\n"
        "    def task(self, number):\n        return Task([{'role': 'user', 'content': 'x'}])\n"
        "    async def start(self, number, limits):\n        raise AssertionError\n"
    )
    (tmp_path / "tokenizer_config.json").write_text("{}")
    args = make_args(environment=f"{file}:One")
    assert check_environment(args) == []
    args.hf_checkpoint = str(tmp_path)
    assert "chat template" in check_environment(args)[0]
    args.environment = "reasoning_gim:chain_sum"
    assert "'reasoning_gim'" in check_environment(args)[0]


def test_an_output_layer_that_config_json_denies_is_refused_where_it_would_be_dropped(
    tmp_path: Path,
) -> None:
    tied = save_model(llama_config(tie_word_embeddings=True), tmp_path / "tied")
    tensors = read_tensors(tied)
    for name, value in (("same", 0.0), ("another", 1.0)):
        rewrite(
            tied,
            tmp_path / name,
            {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + value},
        )
    for train, engine, who in (
        ("fsdp", "embedded", ""),
        ("fsdp", "sglang", "SGLang"),
        ("megatron", "embedded", "Megatron"),
    ):
        args = make_args(
            hf_checkpoint=str(tmp_path / "same"), train_backend=train, rollout_backend=engine
        )
        args.notices.clear()
        assert (check_checkpoints(args), args.notices) == ([], [])
        args = make_args(
            hf_checkpoint=str(tmp_path / "another"), train_backend=train, rollout_backend=engine
        )
        args.notices.clear()
        problems, said = check_checkpoints(args), "output layer that is not its embedding"
        assert [said in text and f"{who} would" in text for text in problems] == [True] * bool(who)
        assert [said in text for text in args.notices] == [True] * (not who)
