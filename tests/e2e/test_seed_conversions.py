"""The converters of the original specification, typed as they stand, on tiny models of its
families.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from seed_desk import CHECKOUT, TYPED, Desk

pytestmark = [
    pytest.mark.real, pytest.mark.slow, pytest.mark.seeds, pytest.mark.megatron, pytest.mark.timeout(900),
]  # fmt: skip
SMALL: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=512, eos_token_id=1, pad_token_id=None, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture
def workshop(desk: Desk) -> Desk:
    """Checkpoints where the specification has them; its Megatron-LM folder makes megatron-core run
    on the CPU.
    """
    import torch
    import transformers as t

    tokenizer = t.AutoTokenizer.from_pretrained(desk.model)
    glm = SMALL | dict(attention_bias=True, partial_rotary_factor=0.5, rms_norm_eps=1e-5)
    experts = dict(
        moe_intermediate_size=16, num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=1, use_qk_norm=True,
        first_k_dense_replace=1,
    )  # fmt: skip
    for name, config in {
        "path/to/GLM-Z1-9B-0414": t.Glm4Config(**glm, vocab_size=len(tokenizer)),
        "path/to/GLM-4.5-355B-A32B": t.Glm4MoeConfig(**glm, **experts, vocab_size=len(tokenizer)),
    }.items():
        torch.manual_seed(0)
        t.AutoModelForCausalLM.from_config(config).save_pretrained(desk.root / name)
        tokenizer.save_pretrained(desk.root / name)
    (desk.root / "path/to/Megatron-LM").symlink_to(
        CHECKOUT / "tests" / "plugins" / "megatron" / "cpu_site"
    )
    return desk


def tensors(folder: Path) -> dict[str, Any]:
    from slime.weights.hf_folder import HfFolder

    loaded = HfFolder(folder)
    return {name: loaded.get(name) for name in loaded.shapes()}


def assert_same_tensors(left: Path, right: Path) -> None:
    import torch

    ours, theirs = tensors(left), tensors(right)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.long
def test_glm4_there_training_and_back_by_both_ways(workshop: Desk) -> None:
    """convert_hf_to_torch_dist → training that starts from it → convert_torch_dist_to_hf and
    convert_to_hf agree.
    """
    glm = workshop.root / "path/to/GLM-Z1-9B-0414"
    workshop.type(workshop.command("convert_glm4", hf_checkpoint=str(glm)))
    assert (glm.parent / f"{glm.name}_torch_dist").is_dir()

    training = (
        "--hf-checkpoint /path/to/GLM-Z1-9B-0414 --ref-load /path/to/GLM-Z1-9B-0414_torch_dist "
        "--train-backend megatron --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2 "
        "--prompt-data /path/to/data.jsonl --rollout-batch-size 2 --n-samples-per-prompt 2 "
        "--rollout-max-response-len 8 --rm-type random --lr 1e-3"
    )
    before = "source scripts/models/glm4-9B.sh\nexport PYTHONPATH=/path/to/Megatron-LM\n"
    run = (
        "python train.py ${MODEL_ARGS[@]} --save /path/to/torch_dist_ckpt --save-interval 1 "
        "--num-rollout 1"
    )
    scale = {
        "hf_checkpoint": str(glm),
        **dict.fromkeys(("num_rollout", "global_batch_size"), "as typed"),
    }
    ranks = ("actor_num_gpus_per_node", "inline")  # two ranks of Megatron are processes
    same = dict.fromkeys((*ranks, "rollout_batch_size", "rollout_max_response_len"), "as typed")
    workshop.type(workshop.command(f"{before}{run} {training}", **scale, **same), timeout=500)
    trained = workshop.root / "path/to/torch_dist_ckpt"
    (workshop.root / "your/saved").mkdir(parents=True)
    (workshop.root / "your/saved/megatron_ckpt").symlink_to(trained)

    back = workshop.local(TYPED["convert_back"]["text"]).replace("iter_xxx", "iter_0000000")
    workshop.type(back)
    by_trainer = TYPED["convert_by_trainer"]["text"].replace(
        "... # Other training args", "${MODEL_ARGS[@]} --ckpt-format torch " + training
    )
    workshop.type(
        workshop.command(before + by_trainer, **scale, **same), NUM_GPU="2", GLOO_SOCKET_IFNAME="lo"
    )
    ways = [
        workshop.root / "path/to/GLM-Z1-9B-0414-iter_0000000",
        workshop.root / "your/converted/hf_ckpt",
    ]
    assert_same_tensors(*ways)
    assert json.loads((ways[0] / "config.json").read_text())["model_type"] == "glm4"
    start, end = tensors(glm), tensors(ways[0])
    assert any(not start[name].equal(end[name]) for name in start), "training changed the weights"


@pytest.mark.long
def test_two_nodes_convert_together(workshop: Desk) -> None:
    """``torchrun`` on two nodes: here two launchers with one process each instead of eight."""
    from slime.engines.process import free_port

    moe = workshop.root / "path/to/GLM-4.5-355B-A32B"
    text = workshop.command("convert_two_nodes", hf_checkpoint=str(moe))
    text = text.replace("--nproc-per-node 8", "--nproc-per-node 1").replace(
        "12345", str(free_port())
    )
    env = {"MASTER_ADDR": "127.0.0.1", "BASE_DIR": str(moe.parent), "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [workshop.start(text, NODE_RANK=str(rank), **env) for rank in range(2)]
    results = [workshop.runner.finish(node, "latest") for node in nodes]
    assert [result.code for result in results] == [0, 0], "\n".join(
        result.output for result in results
    )
    assert "written by 2 process(es)" in results[0].output
    back = workshop.local(TYPED["convert_back"]["text"]).replace(
        "torch_dist_ckpt/iter_xxx", f"{moe.name}_torch_dist"
    )
    workshop.type(
        back.replace("GLM-Z1-9B-0414-iter_xxx", "again").replace("GLM-Z1-9B-0414", moe.name)
    )
    assert_same_tensors(moe, moe.parent / "again")


def test_qwen3_converts_for_the_quick_start(workshop: Desk) -> None:
    import torch
    import transformers as t

    model = workshop.root / "qwen3"
    torch.manual_seed(0)
    vocabulary = len(t.AutoTokenizer.from_pretrained(workshop.model))
    t.Qwen3ForCausalLM(t.Qwen3Config(**SMALL, vocab_size=vocabulary)).save_pretrained(model)
    result = workshop.type(workshop.command("convert_qwen3", hf_checkpoint=str(model)))
    assert (
        "qwen3, 4 layers" in result.output
        and (workshop.root / "path/to/Qwen3-4B_torch_dist").is_dir()
    )
