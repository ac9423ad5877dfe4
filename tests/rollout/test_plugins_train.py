"""Functions in the shapes of public plug-ins, each through a whole rollout, the conversion and a
real training step.

The functions were written for these tests. The engine speaks the real HTTP; the trainer is FSDP on
the CPU with a tiny random model.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rollout_parts import SmallEngine, arguments, source_of
from test_public_plugins import COMMON, EMPTY, FRESH, RETOOL, SEARCH

from slime.backends.create import create_backend
from slime.backends.train_loop import train_on_rollout
from slime.config.hooks import load_function
from slime.data.convert import samples_to_train_data, split_train_data
from slime.data.fields import to_rank_batch
from slime.data.sample import flatten
from slime.data.schedule import PackingSettings
from slime.rollout.base_types import call_rollout_fn

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def leave_no_process_group() -> Iterator[None]:
    """A backend joins one, and other tests of this process make their own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# The form of multi_agent: agents that answer in turn. Each answer is a sample of its own; the list
# is returned. What the agents share is assigned to args, and their number is a flag of its own with
# a default.
AGENTS = (
    COMMON
    + """
import asyncio

async def answer(args, sample, prompt):
    params = args.sampling_params
    mine = copy.deepcopy(sample)
    mine.prompt, mine.tokens = prompt, encode(args, prompt)
    output, ids, log_probs = await ask(args, mine.tokens, params)
    mine.tokens, mine.response, mine.response_length = mine.tokens + ids, output["text"], len(ids)
    mine.loss_mask, mine.rollout_log_probs = [1] * len(ids), log_probs
    mine.status = Sample.Status.COMPLETED
    return mine

async def fn(args, sample, sampling_params):
    args.sampling_params = sampling_params
    args.tokenizer = GenerateState(args).tokenizer
    solvers = getattr(args, "max_turns", 2) if not hasattr(args, "num_solvers") else args.num_solvers
    solved = await asyncio.gather(*(answer(args, sample, sample.prompt) for _ in range(solvers)))
    texts = " or ".join(each.response for each in solved)
    chosen = await answer(args, sample, f"{sample.prompt}choose {texts}: ")
    for number, each in enumerate([*solved, chosen]):
        each.reward = float(number)
    return [*solved, chosen]
"""
)

# The form of a rollout function of its own: groups as a plain list, and hooks that each take what
# they know.
OWN = (
    COMMON
    + """
from slime.rollout.data_source import DataSource
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.async_utils import run
from slime.utils.logging_utils import log

class Numbers(DataSource):
    def __init__(self, args):
        self.args, self.number = args, 0

    def get_samples(self, num_samples):
        groups = []
        for _ in range(num_samples):
            self.number += 1
            each = [Sample(prompt=f"number {self.number}: ", group_index=self.number, index=2 * self.number + k)
                    for k in range(self.args.n_samples_per_prompt)]
            groups.append(each)
        return groups

    def add_samples(self, samples): pass
    def save(self, rollout_id): pass
    def load(self, rollout_id=None): pass
    def __len__(self): return 100

def rollout(args, rollout_id, data_source, evaluation=False):
    async def one(sample):
        params = {**GenerateState(args).sampling_params, "sampling_seed": sample.index}
        ids = encode(args, sample.prompt)
        output, new, log_probs = await ask(args, ids, params)
        sample.tokens, sample.response, sample.response_length = ids + new, output["text"], len(new)
        sample.rollout_log_probs, sample.reward = log_probs, float(len(new))
        sample.status = Sample.Status.COMPLETED
        return sample

    async def every(groups):
        import asyncio
        return [await asyncio.gather(*(one(sample) for sample in group)) for group in groups]

    return run(every(data_source.get_samples(args.rollout_batch_size)))
"""
)

# The form of fully_async as forks copy it: a thread of its own that always has some groups in
# flight.
STANDING = (
    COMMON
    + """
import asyncio, queue, threading, time
from slime.rollout.sglang_rollout import generate_and_rm_group

worker = None

class Worker:
    def __init__(self, args, data_source, at_once):
        self.args, self.data_source, self.at_once = args, data_source, at_once
        self.done, self.running = queue.Queue(), True
        self.thread = threading.Thread(target=lambda: asyncio.run(self.loop()), daemon=True)
        self.thread.start()

    async def loop(self):
        tasks, params = set(), GenerateState(self.args).sampling_params
        while self.running:
            while len(tasks) < self.at_once:
                (group,) = self.data_source.get_samples(1)
                job = generate_and_rm_group(self.args, group, sampling_params=params.copy(), evaluation=False)
                tasks.add(asyncio.create_task(job))
            finished, tasks = await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                self.done.put(task.result())
        for task in tasks:
            task.cancel()

def rollout(args, rollout_id, data_source, evaluation=False):
    global worker
    worker = Worker(args, data_source, 3)
    groups = []
    while len(groups) < args.rollout_batch_size:
        groups.append(worker.done.get(timeout=30))
    worker.running = False
    worker.thread.join(30)
    return sorted(groups, key=lambda group: group[0].index)
"""
)

# The form of mis.py: a correction per sequence with the helpers of context parallelism. And a loss
# of its own.
LOSSES = """
import torch
from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

seen = []

def correction(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **_):
    weights = []
    for train, engine, mask, total, length in zip(
        train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths
    ):
        difference = all_gather_with_cp(train - engine, total, length)
        mean = (difference * mask).sum() / mask.sum().clamp(min=1)
        weights.append(slice_log_prob_with_cp(mean.exp().clamp(max=2).expand(length), total, length))
    weight = torch.cat(weights)
    seen.append(len(weight))
    return pg_loss * weight, loss_masks, {"own_weight": weight}

def loss(args, batch, logits, sum_of_sample_mean):
    _, found = get_log_probs_and_entropy(
        logits, args=args, unconcat_tokens=batch["unconcat_tokens"], total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"], with_entropy=True,
    )
    log_probs = torch.cat(found["log_probs"])
    value = sum_of_sample_mean(-log_probs * torch.cat(batch["advantages"]).to(log_probs))
    return value, {"own_loss": value.detach(), "own_entropy": sum_of_sample_mean(torch.cat(found["entropy"])).detach()}
"""


@pytest.fixture(scope="module")
def model(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama for the tokenizer of one token per byte."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in tokenizer_dir.iterdir():
        if file.name != "config.json":  # the model has one of its own
            shutil.copy(file, folder / file.name)
    return folder


GENERATE = {"custom_generate_function_path": "fn"}
FORMS: dict[str, tuple[str, dict[str, Any], int]] = {
    "search": (SEARCH, GENERATE, 8),
    "retool": (RETOOL, GENERATE, 8),
    "a fresh sample": (FRESH, {"custom_generate_function_path": "one"}, 8),
    "an empty response": (EMPTY, GENERATE, 8),
    "several agents": (AGENTS, GENERATE, 24),
    "a rollout function of its own": (OWN, {"rollout_function_path": "rollout", "data_source_path": "Numbers"}, 8),
    "a standing worker": (STANDING, {"rollout_function_path": "rollout"}, 8),
    "a correction": (SEARCH + LOSSES, {**GENERATE, "custom_tis_function_path": "correction"}, 8),
    "a loss": (RETOOL + LOSSES, {**GENERATE, "custom_loss_function_path": "loss"}, 8),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
async def test_from_the_prompt_to_the_weights(model: Path, tmp_path: Path, form: str) -> None:
    code, hooks, count = FORMS[form]
    (tmp_path / "plugin.py").write_text(code)
    settings: dict[str, Any] = {
        name: f"{tmp_path / 'plugin.py'}:{fn}" for name, fn in hooks.items()
    }
    settings["max_turns"] = None  # not given
    settings |= {
        "use_tis": form == "a correction",
        "loss_type": "custom_loss" if form == "a loss" else "policy_loss",
    }
    args = arguments(
        model, train_backend="fsdp", train_dtype="float32", lr=1e-2, global_batch_size=8, **settings
    )
    source = (
        load_function(args.data_source_path)(args)
        if "data_source_path" in hooks
        else source_of(args)
    )
    rollout = load_function(args.rollout_function_path)
    async with SmallEngine() as engine:
        output = await asyncio.to_thread(
            call_rollout_fn, rollout, engine.serve(args), 0, source, evaluation=False
        )
    samples = flatten(output.samples)
    assert len(samples) == count
    for number, sample in enumerate(samples):
        sample.reward = float(number % 2)  # a group whose rewards are all equal trains nothing
    data = samples_to_train_data(args, output.samples)
    batch = to_rank_batch(split_train_data(PackingSettings.from_args(args), data, 1)[0])
    batch["rollout_id"] = 0
    backend = create_backend(args, "actor", 0, 1, "127.0.0.1", 0)
    before = {name: tensor.clone() for name, tensor in backend.named_weights()}
    metrics, _ = train_on_rollout(backend, batch)
    after = dict(backend.named_weights())
    assert metrics["train/grad_norm"] > 0 and any(
        not torch.equal(before[name], after[name]) for name in before
    )
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
    own = {"a correction": "train/own_weight", "a loss": "train/own_entropy"}.get(form)
    assert own is None or metrics[own] > 0


async def test_tool_output_changes_no_gradient(model: Path, tmp_path: Path) -> None:
    """The same step with the tokens of the last tool output replaced gives the same weights:
    nothing after them is trained, and they are not trained themselves."""
    (tmp_path / "plugin.py").write_text(RETOOL)
    hook = f"{tmp_path / 'plugin.py'}:fn"
    args = arguments(
        model, train_backend="fsdp", train_dtype="float32", lr=1e-2, global_batch_size=8, attn_implementation="eager",
        custom_generate_function_path=hook,
    )  # fmt: skip
    async with SmallEngine() as engine:
        rollout = load_function(args.rollout_function_path)
        output = await asyncio.to_thread(
            call_rollout_fn, rollout, engine.serve(args), 0, source_of(args), evaluation=False
        )
    found = []
    for replaced in (False, True):
        for number, sample in enumerate(flatten(output.samples)):
            sample.reward = float(number % 2)
            if replaced:
                sample.tokens = [*sample.tokens[:-7], *[5] * 7]  # " [tool] " has 8 tokens
        batch = to_rank_batch(
            split_train_data(
                PackingSettings.from_args(args), samples_to_train_data(args, output.samples), 1
            )[0]
        )
        batch["rollout_id"] = 0
        backend = create_backend(args, "actor", 0, 1, "127.0.0.1", 0)
        train_on_rollout(backend, batch)
        found.append(dict(backend.named_weights()))
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-6) for name in found[0])
