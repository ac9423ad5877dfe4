"""What the rollout manager spends per response token between an engine's answer and the trainers'
batches.

    python benchmarks/rollout_data.py                                   # 512 samples of 8,192 tokens
    python benchmarks/rollout_data.py --samples 2048 --tokens 9500      # a step of 19M tokens

All figures are CPU time of one process (two cores shared with other work change them little),
except for the longest time for which the event loop did not answer, which is wall time: once while
a rollout is completed with all samples in the pool (the state for a snapshot is taken on the event
loop), once while another thread converts and splits them. On a busy machine compare with the same
figure of an idle loop.
Memory is that of the samples, with 5.5 bytes of text for each token, and that of the parts of all
ranks, which are made one after the other.
``--lists`` reads every field once before the conversion, as hooks that look at the samples do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil

from slime.cluster.generation import GarbageCollection
from slime.cluster.rollout_state import Rollout, RolloutState
from slime.config.args import Args
from slime.config.layout import ParallelLayout
from slime.config.resolve import resolve_defaults
from slime.config.rules import Run
from slime.data.convert import each_part, samples_to_train_data
from slime.data.fields import Ragged
from slime.data.sample import Sample, flatten
from slime.data.schedule import PackingSettings
from slime.data.source import RolloutDataSourceWithBuffer
from slime.data.staleness import add_staleness, staleness_metrics
from slime.rollout.generate import append_output
from slime.rollout.metrics import rollout_metrics
from slime.rollout.state import GenerateState

PROMPT = 200
GROUP = 16


def main() -> None:
    options = parse()
    args = make_args(options)
    result: dict[str, float] = {}
    tokens = options.samples * options.tokens

    def timed(name: str, call: Callable[[], Any]) -> Any:
        started = time.process_time()
        value = call()
        result[name] = (time.process_time() - started) / tokens * 1e6
        return value

    groups = make_groups(options)
    garbage = GarbageCollection()  # as in the rollout manager
    empty = private_bytes()
    fill(options, args, groups, result)
    result["kept_bytes"] = (private_bytes() - empty) / tokens
    garbage.collect()
    leaves = [sample for group in groups for sample in group]
    timed("pack", lambda: [sample.pack() for sample in leaves if hasattr(sample, "pack")])
    asyncio.run(stalls(args, groups, result, timed, options.lists))
    result["convert_staleness_split"] = sum(
        result[name] for name in ("convert", "staleness", "split")
    )
    result["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    for name, value in result.items():
        unit = (
            "ms"
            if name.startswith("loop")
            else "GiB"
            if name.endswith("gib")
            else "µs of CPU per token"
        )
        print(
            f"{name:28s} {value:9.3f} {unit if not name.endswith('_bytes') else 'bytes per token'}"
        )
    print(json.dumps({"samples": options.samples, "tokens": options.tokens, **result}))


def private_bytes() -> int:
    return int(psutil.Process().memory_full_info().uss)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192, help="of each response")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks")
    parser.add_argument(
        "--lists", action="store_true", help="hooks read all per-token fields before the conversion"
    )
    return parser.parse_args()


def make_args(options: argparse.Namespace) -> Args:
    args = Args().with_values(
        hf_checkpoint="unused",
        rollout_batch_size=options.samples // GROUP,
        n_samples_per_prompt=GROUP,
        global_batch_size=options.samples,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=4 * options.tokens,
        save_interval=1000,
        save="unused",
        rollout_num_gpus=options.ranks,
    )
    resolve_defaults(Run(args))
    return args


def make_groups(options: argparse.Namespace) -> list[list[Any]]:
    messages = [{"role": "user", "content": "How much is 2 + 2? " * 40}]
    return [
        [
            Sample(
                group_index=i // GROUP,
                index=i + k,
                prompt=messages,
                label="4",
                metadata={"tags": ["a"]},
            )
            for k in range(GROUP)
        ]
        for i in range(0, options.samples, GROUP)
    ]


def fill(
    options: argparse.Namespace, args: Any, groups: list[list[Any]], result: dict[str, float]
) -> None:
    """Append one answer to each sample, as it comes out of the JSON parser."""
    draw = random.Random(0)
    # Engines send log-probs that are exact in float32, which samples keep in four bytes.
    scored = [
        [float(np.float32(-3 * draw.random())), draw.randrange(150_000), None]
        for _ in range(options.tokens)
    ]
    meta = {
        "finish_reason": {"type": "stop"},
        "weight_version": "0.3",
        "output_token_logprobs": scored,
    }
    body = orjson.dumps({"text": "The answer " * (options.tokens // 2), "meta_info": meta})
    used = parsing = 0.0
    state = GenerateState(args)
    for group in groups:
        for sample in group:
            sample.tokens = list(range(PROMPT))
            if hasattr(Sample, "pack"):
                sample.pack()  # as ``generate`` leaves it
            started = time.process_time()
            output = orjson.loads(body)
            parsed = time.process_time()
            append_output(state, sample, output)
            parsing, used = parsing + parsed - started, used + time.process_time() - parsed
            del output
            sample.reward, sample.status = float(sample.index % 2), Sample.Status.COMPLETED
    result["orjson"] = parsing / (options.samples * options.tokens) * 1e6
    result["append_output"] = used / (options.samples * options.tokens) * 1e6


async def stalls(
    args: Any,
    groups: list[list[Any]],
    result: dict[str, float],
    timed: Callable[..., Any],
    lists: bool,
) -> None:
    """The longest time for which it stood still: while a rollout was completed, and while it was
    converted.
    """
    longest = [0.0]

    async def beat() -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            longest[0] = max(longest[0], time.perf_counter() - started - 0.001)

    async def measured(name: str, call: Callable[[], Any]) -> Any:
        await asyncio.sleep(0.05)
        longest[0] = 0.0
        value = await call()
        await asyncio.sleep(0.01)
        result[name] = longest[0] * 1e3
        return value

    task = asyncio.ensure_future(beat())

    state = state_with(args, groups)

    async def complete() -> None:
        timed("complete", lambda: state.complete(0, Rollout([], {}, 1.0)))

    await measured("loop_stood_still_idle", lambda: asyncio.sleep(0.3))
    await measured("loop_stood_still_completing", complete)
    if lists:
        leaves = flatten(groups)
        timed(
            "hooks_read_lists",
            lambda: [(s.tokens, s.loss_mask, s.rollout_log_probs) for s in leaves],
        )
    await measured(
        "loop_stood_still_converting",
        lambda: in_thread(lambda: convert(args, groups, timed, result)),
    )
    task.cancel()


def state_with(args: Any, groups: list[list[Any]]) -> RolloutState:
    """State of a run whose pool has these groups under way."""
    source = RolloutDataSourceWithBuffer(args, _NoPrompts())
    source.under_way = lambda: groups
    state = RolloutState(args, Path(tempfile.mkdtemp()), source)
    state.ledger.strict = False
    return state


async def in_thread(call: Callable[[], None]) -> None:
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        call()
        loop.call_soon_threadsafe(done.set)

    thread = threading.Thread(target=work)
    thread.start()
    await done.wait()
    thread.join()


def convert(
    args: Any, groups: list[list[Any]], timed: Callable[..., Any], result: dict[str, float]
) -> None:
    """Everything of ``RolloutManager.generate`` that looks at tokens."""
    samples = flatten(groups)

    def staleness() -> None:
        add_staleness(data, samples, 5)
        staleness_metrics(samples, 5)

    def split() -> None:  # one part after the other, as the manager puts them into the object store
        parts = each_part(
            PackingSettings.from_args(args), data, ParallelLayout(args.rollout_num_gpus)
        )
        result["split_bytes"] = sum(map(array_bytes, parts)) / sum(
            sample.response_length for sample in samples
        )

    timed("metrics", lambda: rollout_metrics(args, args, samples, 1.0, args.rollout_num_gpus))
    data = timed("convert", lambda: samples_to_train_data(args, groups))
    timed("staleness", staleness)
    timed("split", split)


def array_bytes(part: Mapping[str, Any]) -> int:
    arrays = [
        array
        for value in part.values()
        for array in (value if isinstance(value, Ragged) else [value])
    ]
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


class _NoPrompts:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> Any:
        raise AssertionError("not asked for")

    def shuffle(self, epoch_id: int) -> None:
        """The order does not matter."""


if __name__ == "__main__":
    main()
