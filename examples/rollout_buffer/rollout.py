"""The rollout function that takes its samples from the buffer server.

``--rollout-function-path examples/rollout_buffer/rollout.py:generate_rollout``; the YAML file of
``--custom-config-path`` says where the server is (``buffer_server_url``), in which file its key is
(``buffer_server_key_file``), which generator (``buffer_server_task``) works there, and how many
groups more than a step needs may be under way (``buffer_server_ahead``).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.prompts import prompt_ids
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.rollout.sglang_rollout import generate_rollout as default_rollout
from slime.rollout.state import seeded
from slime.utils.async_utils import run
from slime.utils.http_utils import auth_headers, post
from slime.utils.types import Sample

POLL_SECONDS = 0.2
Group = list[Sample]
# by group index: given by the data source, not back from the server yet
under_way: dict[int, Group] = {}


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """``--rollout-batch-size`` groups from the server; the evaluation is slime's own."""
    if evaluation:
        return default_rollout(args, rollout_id, data_source, evaluation=True)
    return run(collect(args, rollout_id, data_source))


async def collect(args: Any, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    """Keep enough groups under way, and poll until the step has its own.

    Raises:
        TimeoutError: not there within ``--phase-timeout``.
        RuntimeError: the generator failed.
    """
    url = args.buffer_server_url.rstrip("/")
    # a snapshot holds them; a resume asks for them again
    data_source.under_way = lambda: list(under_way.values())
    deadline = time.monotonic() + args.phase_timeout
    accepted: list[Group] = []
    refused = 0
    while True:
        await ask(args, url, data_source, len(accepted))
        wanted = {
            "task_type": args.buffer_server_task,
            "num_groups": args.rollout_batch_size - len(accepted),
        }
        answer = await post(f"{url}/get_rollout_data", wanted, headers=headers(args))
        for index in answer["rejected"]:
            refused += under_way.pop(index, None) is not None
        accepted += [
            fill(under_way.pop(item["group_index"]), item["samples"]) for item in answer["groups"]
        ]
        if len(accepted) == args.rollout_batch_size:
            break
        if answer["error"]:
            raise RuntimeError(f"{url}: {answer['error']}")
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rollout {rollout_id}: {url} gave {len(accepted)} of {args.rollout_batch_size} "
                f"groups within {args.phase_timeout:g} s (--phase-timeout); {answer['waiting']} "
                f"are with the generator, {refused} were not valid"
            )
        if not answer["groups"] and not answer["rejected"]:
            await asyncio.sleep(POLL_SECONDS)
    # the server works while the trainer trains
    await ask(args, url, data_source, args.rollout_batch_size)
    metrics = {
        "rollout/buffer_refused": float(refused),
        "rollout/buffer_under_way": float(len(under_way)),
    }
    return RolloutFnTrainOutput(samples=accepted, metrics=metrics)


def headers(args: Any) -> dict[str, str]:
    """The key of the server, from the file that it has made."""
    return {
        "Authorization": f"Bearer {Path(args.buffer_server_key_file).expanduser().read_text().strip()}"
    }


async def ask(args: Any, url: str, data_source: Any, have: int) -> None:
    """Hand as many groups to the server as are missing from this step and the groups ahead of
    it.
    """
    state = GenerateState(args)
    seed = state.seed
    missing = args.rollout_batch_size + args.buffer_server_ahead - have - len(under_way)
    if missing <= 0:
        return
    groups = []
    for group in data_source.get_samples(missing):
        first = group[0]
        under_way[first.group_index] = group
        groups.append(
            {
                "group_index": first.group_index,
                "prompt": first.prompt,
                "input_ids": prompt_ids(state, first),
                "label": first.label,
                "metadata": first.metadata,
                # each sample has a seed of its own, without which a deterministic engine gives all
                # the same answer
                "sampling_params": [
                    seeded(seed, state.sampling_params, s, i) for i, s in enumerate(group)
                ],
            }
        )
    engine = get_model_url(args)
    # The server's generators ask the engines of this run, which answer only who has its key.
    task = {
        "task_type": args.buffer_server_task,
        "engine_url": engine,
        "engine_headers": auth_headers(engine),
    }
    await post(f"{url}/start_rollout", {**task, "groups": groups}, headers=headers(args))


def fill(group: Group, made: list[dict[str, Any]]) -> Group:
    """Put what the server made into the samples that the data source gave.

    Raises:
        ValueError: another number of samples than the group has.
    """
    if len(made) != len(group):
        raise ValueError(
            f"group {group[0].group_index}: {len(group)} samples asked for, {len(made)} came back"
        )
    return [
        Sample.from_dict({**sample.to_dict(), **fields})
        for sample, fields in zip(group, made, strict=True)
    ]
