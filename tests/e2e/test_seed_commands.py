"""The commands of the original specification, typed as they stand (seed_desk.py says how), to their
end.
"""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import pytest
from seed_desk import TYPED, Desk

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.seeds, pytest.mark.timeout(600)]
MODEL_ARGS = "source scripts/models/qwen3-4B.sh"


def test_quick_start(desk: Desk) -> None:
    result = desk.train("quick_start", before='CKPT_ARGS=(--hf-checkpoint "$PWD/path/to/Qwen3-4B")')
    assert "MODEL_ARGS describe another model than hf_checkpoint of the" in result.output
    assert all("train/kl_loss" in step for step in result.metrics())


def test_grpo_and_tensorboard(desk: Desk) -> None:
    result = desk.train("grpo", before=MODEL_ARGS, save_interval=2)
    # the specification names no evaluation data
    assert "--eval-interval 50 has no data to evaluate" in result.output
    assert (
        result.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    ).read_text().strip() == "1"
    from slime.engines.process import free_port

    port = free_port()
    desk.start(f"exec {TYPED['tensorboard']['text'].strip()} --port {port}")
    assert any(
        name.startswith(result.folder.resolve().name)
        for name in answer(f"http://127.0.0.1:{port}/data/runs")
    )


def answer(url: str, seconds: float = 60) -> Any:
    """What a server that is being started answers, once it does."""
    until = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                if found := json.load(response):
                    return found
        except OSError:
            pass
        assert time.monotonic() < until, f"{url} gave no answer within {seconds} s"
        time.sleep(0.5)


def test_async(desk: Desk) -> None:
    result = desk.train("async", "async_interval", before=MODEL_ARGS)
    assert [step["rollout/step"] for step in result.metrics()] == [0, 1]


BEFORE = """
import contextvars
from slime.utils.http_utils import post

ARGS = contextvars.ContextVar("args")


async def generate_single(conversation):
    text = "".join(message["content"] for message in conversation)
    url = f"http://{ARGS.get().sglang_router_ip}:{ARGS.get().sglang_router_port}/generate"
    answer = await post(url, {"text": text, "sampling_params": {"max_new_tokens": 4}})
    return answer["text"]


def extract_tool_call(response):
    return response if len(response) % 2 else None


def execute_tool(call):
    return f"{len(call)} letters"


def compute_reward(sample):
    return float(len(sample.response) % 3)
"""
AFTER = """
as_typed = custom_generate


async def custom_generate(args, samples, evaluation=False):
    ARGS.set(args)
    return await as_typed(args, samples, evaluation)
"""


def test_multi_turn_with_the_list_form(desk: Desk) -> None:
    desk.python("custom_generate.py", BEFORE, "custom_generate", after=AFTER)
    result = desk.train("multi_turn", before=MODEL_ARGS)
    assert "sets no tokens" in (result.folder / "logs" / "inline.log").read_text()


@pytest.mark.long
def test_colocate_with_what_troubleshooting_adds(desk: Desk) -> None:
    fragments = ("engine_dies", "hangs_after_rollout", "out_of_memory")
    data = str(desk.root / "path/to/data.jsonl")
    result = desk.train("colocate", *fragments, before=MODEL_ARGS, prompt_data=data, inline=False)
    assert all("perf/update_weights_time" in step for step in result.metrics())


def test_fsdp_with_context_parallel_and_the_three_functions(desk: Desk) -> None:
    """``module.path:function`` as the guide has them; evaluation as the training guide has it."""
    head = "from slime.utils.types import Sample\n"
    score = "\n\ndef compute_score(response, label):\n    return 0.6 + 0.1 * (len(response) % 3)\n"
    functions = ("reward_function", "generate_function", "filter_function")
    desk.python("module/path.py", head + score, *functions)
    desk.write("module/__init__.py", "")
    flags = " ".join(TYPED[name]["flag"] for name in functions)
    result = desk.train(
        f"python train.py {flags} --prompt-data /path/to/data.jsonl --eval-interval 1",
        "fsdp",
        "evaluation",
        actor_num_gpus_per_node=2,
        inline=False,
        n_samples_per_eval_prompt=2,
    )
    assert all(step["rollout/raw_reward"] >= 0.6 for step in result.metrics())
    evaluated = result.metrics("eval/aime")
    assert len(evaluated) == 3 and all("eval/gsm8k" in row for row in evaluated)


MY_MODULE = """
from slime.data.source import RolloutDataSourceWithBuffer
from slime.utils.http_utils import post
from slime.utils.processing_utils import load_tokenizer


async def generate(args, sample, sampling_params):
    assert sample.metadata["session_id"] == "123"  # the row has metadata as a JSON string
    prompt_tokens = load_tokenizer(args.hf_checkpoint)(sample.prompt)["input_ids"]
    response_tokens = []
    for turn in range(2):
        output = await post(
            f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
            {"input_ids": prompt_tokens + response_tokens, "sampling_params": {**sampling_params, "max_new_tokens": 3},
             "return_logprob": True},
        )
        model_tokens = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        tool_tokens = [5, 6]
        sample.loss_mask += [1] * len(model_tokens)  # Train on actions
        sample.loss_mask += [0] * len(tool_tokens)  # Mask tool outputs
        response_tokens += model_tokens + tool_tokens
    sample.tokens = prompt_tokens + response_tokens
    sample.response_length = len(response_tokens)
    return sample


async def reward_func(args, sample, **kwargs):
    assert sample.label == "Expected answer" and sum(sample.loss_mask) == sample.response_length - 4
    return float(sample.index % 2)


class Newest(RolloutDataSourceWithBuffer):
    def buffer_filter(self, args, buffer, num_samples):
        with open("chosen.txt", "a") as file:
            print(len(buffer), file=file)
        return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]
"""


def test_multi_turn_with_dynamic_sampling_and_a_buffer_of_ones_own(desk: Desk) -> None:
    """The guide's hooks, row and filter; groups over 32 (4 here) come back from the buffer by the
    user's choice.
    """
    desk.rows("train.jsonl", "multi_turn_row")
    desk.write("my_module.py", MY_MODULE)
    result = desk.train(
        'python train.py "${ROLLOUT_ARGS[@]}" --prompt-data /path/to/train.jsonl '
        "--data-source-path my_module:Newest",
        "multi_turn_hooks",
        "idle_gpu",
        before="ROLLOUT_ARGS=()\n" + TYPED["dynamic_sampling"]["text"],
        input_key="question",
        label_key="final_answer",
        over_sampling_batch_size=8,
        num_data_workers=2,
    )
    chosen = [int(line) for line in (desk.root / "chosen.txt").read_text().split()]
    assert chosen and min(chosen) > 0
    assert all(step["rollout/raw_reward"] == 0.5 for step in result.metrics())


CUSTOM_RM = """
import torch
from pathlib import Path


def load_model(path):
    assert Path(path, "config.json").is_file()
    return lambda lengths: torch.tensor(lengths, dtype=torch.float32) / 8
"""
TOKENIZE = """
    def tokenize(self, prompts, responses):
        return [len(response) % 5 for prompt, response in zip(prompts, responses, strict=True)]
"""
MY_SOURCE = """
from slime.utils.types import Sample


def select_best(buffer, num_samples):
    raise AssertionError("nobody fills the buffer of the specification's class")


class Rows:
    number = 0

    def __init__(self, size):
        self.size = size

    def sample(self, num_samples):
        groups = []
        for _ in range(num_samples):
            groups.append([Sample(prompt="a b c", label="c", group_index=self.number) for _ in range(self.size)])
            self.number += 1
        return groups
"""
CONCRETE = """
class Mine(RolloutDataSourceWithBuffer):
    def __init__(self, args):
        super().__init__()
        self.dataset = Rows(args.n_samples_per_prompt)
"""


def test_reward_model_class_and_data_source_classes(desk: Desk) -> None:
    """Both classes word for word; the user's file gives what they call."""
    desk.python("custom_rm.py", CUSTOM_RM, "reward_model", after=TOKENIZE)
    desk.python("my_source.py", MY_SOURCE, "data_source", after=CONCRETE)
    flags = (
        f"{TYPED['reward_model']['flag']} --rm-model-path {desk.model} --data-source-path "
        "my_source:Mine"
    )
    result = desk.train(f"python train.py {flags}", "disaggregated")
    assert all(0 <= step["rollout/raw_reward"] <= 0.5 for step in result.metrics())


def test_the_recipe(desk: Desk) -> None:
    for name in ("dapo-math-17k", "aime-2024"):
        desk.rows(f"../../data/{name}/{name}.jsonl", "text_rows", "chat_row")
    alone = dict.fromkeys(("tensor_model_parallel_size", "sequence_parallel", "recompute_method"))
    result = desk.train(
        "recipe",
        here=False,
        train_backend="fsdp",
        rollout_backend="embedded",
        rollout_num_gpus_per_engine=1,
        n_samples_per_eval_prompt=2,
        eval_max_response_len=8,
        eval_interval=2,
        save_interval=2,
        **alone,
    )
    assert result.folder.resolve().name == "qwen3-4B" and len(result.metrics("eval/aime")) == 2


@pytest.mark.timeout(900)
def test_ray_start_and_ray_job_submit(desk: Desk) -> None:
    """Two raylets on the loopback interface stand for two nodes; free ports, and Ray's files where
    a socket's path is short. Ray asks whoever joins for its token."""
    import secrets
    import shutil
    import tempfile

    from slime.engines.process import free_port

    ports = {":6379": f":{free_port()}", ":8265": f":{free_port()}"}
    sockets = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    loopback = {"MASTER_ADDR": "127.0.0.2", "GLOO_SOCKET_IFNAME": "lo"}
    # Linux' default; slime.cluster sets 0 where a test imports it
    loopback["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
    loopback |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        # An agent whose port another cluster on this machine holds serves no jobs; only its log
        # says so.
        agent = " --dashboard-agent-listen-port "
        more = (
            f" --port {ports[':6379'][1:]} --dashboard-port {ports[':8265'][1:]} --temp-dir "
            f"{sockets}"
        )
        more += f"{agent}{free_port()}"
        # its daemons would hold this test's pipe
        aside = " >ray.txt 2>&1 || { cat ray.txt; exit 1; }"
        desk.type(TYPED["ray_head"]["text"].rstrip() + more + aside, **loopback)
        worker = TYPED["ray_worker"]["text"].rstrip().replace(":6379", ports[":6379"])
        desk.type(f"{worker} --node-ip-address 127.0.0.3 {agent}{free_port()} {aside}", **loopback)
        text = TYPED["ray_submit"]["text"].replace(":8265", ports[":8265"])
        text = text.replace(
            'Megatron-LM/",\n... # e.g., no_proxy, API variables, etc.', 'Megatron-LM/"'
        )
        nodes = "--actor-num-nodes 8 --actor-num-gpus-per-node 8"
        assert all(words in TYPED["submit_multi_node"]["text"] for words in nodes.split(" --"))
        more = f"{nodes} --prompt-data /path/to/train.jsonl"
        text = text.replace("--... # Other Megatron/SGLang/slime arguments", more)
        scale = {
            "actor_num_nodes": 2,
            "inline": False,
            "run_name": "job",
            "num_rollout": 1,
            "output_dir": f"{desk.root}/outputs",
        }
        command = desk.command(text, **scale)
        until = time.monotonic() + 240
        result = desk.runner.finish(desk.start(command, **loopback), "latest", 400)
        while "No available agent to submit job" in result.output and time.monotonic() < until:
            time.sleep(1)  # a node's agent comes up after `ray start` has returned
            result = desk.runner.finish(desk.start(command, **loopback), "latest", 400)
        assert result.code == 0 and "succeeded" in result.output, result.output
        assert (
            '"rollout/raw_reward"' in (desk.root / "outputs" / "job" / "metrics.jsonl").read_text()
        )
    finally:
        desk.runner.stop()
        shutil.rmtree(sockets, ignore_errors=True)
