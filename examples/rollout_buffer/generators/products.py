"""A generator: asks the engine for answers to the products of two digits, scores them, writes them
into the buffer.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp

TASK_TYPE = "products"
REQUEST_SECONDS = 600.0
Row = dict[str, Any]


async def run_rollout(task: Row) -> None:
    """All groups of a task at once; each is written as soon as it is whole."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(run_group(session, task, group) for group in task["groups"]))


async def run_group(session: aiohttp.ClientSession, task: Row, group: Row) -> None:
    answers = await asyncio.gather(
        *(answer(session, task, group, params) for params in group["sampling_params"])
    )
    written = {"task_type": TASK_TYPE, "group_index": group["group_index"], "samples": answers}
    await post(session, f"{task['buffer_url']}/buffer/write", written, task["buffer_headers"])


async def answer(session: aiohttp.ClientSession, task: Row, group: Row, params: Row) -> Row:
    """One sample. A weight update may end a request: it goes on from the tokens so far, with the
    new weights.
    """
    prompt = list(group["input_ids"])
    tokens: list[int] = []
    log_probs: list[float] = []
    versions: list[str] = []
    text, finish = "", "abort"
    while finish == "abort":
        left = {**params, "max_new_tokens": params["max_new_tokens"] - len(tokens)}
        body = {"input_ids": prompt + tokens, "sampling_params": left, "return_logprob": True}
        output = await post(session, task["engine_url"], body, task["engine_headers"])
        meta = output["meta_info"]
        finish = meta["finish_reason"]["type"]
        tokens += [item[1] for item in meta["output_token_logprobs"]]
        log_probs += [item[0] for item in meta["output_token_logprobs"]]
        versions.append(str(meta["weight_version"]))
        text += output["text"]
        if len(tokens) >= params["max_new_tokens"]:
            finish = "length"
    return {
        "tokens": prompt + tokens,
        "response": text,
        "response_length": len(tokens),
        "rollout_log_probs": log_probs,
        "loss_mask": [1] * len(tokens),
        "reward": score(text, group["label"]),
        "status": "truncated" if finish == "length" else "completed",
        "weight_versions": versions,
    }


def score(text: str, label: str) -> float:
    """1 when the last number is the label."""
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and numbers[-1] == label)


def is_valid_group(samples: list[Row]) -> bool:
    """Groups whose rewards are all equal teach nothing: they are refused, and others are made in
    their place.
    """
    return len({sample["reward"] for sample in samples}) > 1


async def post(session: aiohttp.ClientSession, url: str, body: Row, headers: dict[str, str]) -> Row:
    async with session.post(url, json=body, headers=headers) as response:
        answer = await response.json()
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {answer}")
        return dict(answer)
