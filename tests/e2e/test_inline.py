"""Runs in one process: with the numbers of a run with Ray, without its processes, and open to a
debugger.
"""

from __future__ import annotations

import gc
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from seed_desk import CHECKOUT

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
# Who comes first decides these: the state of the engine's cache, and how many rollouts of an
# asynchronous run have been finished when the trainer takes one.
BY_CHANCE = (
    "rollout/avg_cached_tokens_per_sample",
    "rollout/prefix_cache_hit_rate",
    "rollout/buffered",
)
AGENT = """
async def generate(args, sample, sampling_params):
    from slime.rollout.sglang_rollout import generate
    return await generate(args, sample, sampling_params)
"""


def numbers(folder: Path) -> list[dict[str, object]]:
    """The metrics of each step that are no times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("perf/", "time", "memory")
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(timed) and name not in BY_CHANCE
        }
        for row in rows
    ]


def texts(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted((folder / "samples").glob("*.jsonl"))]


@pytest.mark.slow
@pytest.mark.long
def test_a_process_with_several_threads_has_the_numbers_of_a_run_with_ray(
    runner, flags, smollm2: Path
) -> None:
    """Without the variables of an engine's process, the inline engine would compute row by row,
    with other bits.
    """
    threads = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    runs = [
        runner.run(
            *flags, "--hf-checkpoint", smollm2, "--num-rollout", 1, *more, name=name, env=threads
        )
        for name, more in (("ray", ("--threads-per-process", 2)), ("inline", ("--inline",)))
    ]
    assert [run.code for run in runs] == [0, 0], [run.output for run in runs]
    with_ray, inline = (run.folder for run in runs)
    assert numbers(inline) == numbers(with_ray)
    assert texts(inline) == texts(with_ray)


PPO = ("--advantage-estimator", "ppo", "--num-steps-per-rollout", 2)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("train.py", ("--lora-rank", 4, "--lora-sync", "adapter")),
        ("train_async.py", ()),
    ],
    ids=["lora", "async"],
)
def test_the_numbers_are_those_of_a_run_with_ray(
    runner, flags, script: str, more: tuple[object, ...]
) -> None:
    with_ray = runner.run(*flags, *more, name="ray", script=script)
    assert with_ray.code == 0, with_ray.output
    inline = runner.inline(*flags, *more, name="inline", script=script)
    assert inline.code == 0, inline.output
    assert numbers(inline.folder) == numbers(with_ray.folder)
    assert texts(inline.folder) == texts(with_ray.folder)


@pytest.mark.slow
def test_a_run_with_ray_goes_on_from_the_snapshot_of_an_inline_one(runner, flags) -> None:
    """With an actor and a critic: the numbers are those of one inline run. The other way round is in
    ``test_train.py``, after a kill.
    """
    saves = (*flags, *PPO, "--save-interval", 2, "--num-rollout", 4, "--save")
    whole = runner.inline(*saves, "whole", name="whole")
    assert whole.code == 0, whole.output
    with_ray = runner.run(*saves, "on", "--load", "whole", "--ckpt-step", 1, name="with_ray")
    assert with_ray.code == 0, with_ray.output
    assert numbers(with_ray.folder)[-2:] == numbers(whole.folder)[-2:]


def listening() -> set[object]:
    """Addresses at which this process accepts connections."""
    found = psutil.Process().net_connections(kind="tcp")
    return {connection.laddr for connection in found if connection.status == psutil.CONN_LISTEN}


def test_no_process_and_no_port_of_an_engine(runner, flags, tmp_path: Path) -> None:
    # of earlier tests
    before: set[object] = {*psutil.Process().children(recursive=True), *listening()}
    seen: list[tuple[set[psutil.Process], set[object]]] = []
    hook = tmp_path / "watch.py"
    hook.write_text(
        "SEEN = []\n"
        "def watch(args, rollout_id, samples, metrics, seconds):\n"
        "    SEEN.append(look())\n"
    )

    def look() -> tuple[set[psutil.Process], set[object]]:
        return set(psutil.Process().children(recursive=True)) - before, listening() - before

    import builtins

    vars(builtins)["look"] = look
    try:
        own = [flag for flag in flags if "letters.py" not in str(flag)]
        own[own.index("--custom-rm-path")] = "--rm-type"
        own.insert(own.index("--rm-type") + 1, "f1")
        run = runner.inline(*own, "--custom-rollout-log-function-path", f"{hook}:watch")
    finally:
        del vars(builtins)["look"]
    assert run.code == 0, run.output
    from slime.config.hooks import load_function

    seen = load_function(f"{hook}:watch").__globals__["SEEN"]
    assert len(seen) == 3
    started = {
        name for children, _ in seen for child in children for name in [" ".join(child.cmdline())]
    }
    assert not [name for name in started if "verifier" not in name], started
    # torch's process group of one rank has a socket on the loopback interface, and nothing else
    # listens.
    assert {len(ports) for _, ports in seen} == {1}


def test_a_users_function_finds_the_engine_at_its_address(runner, flags, tmp_path: Path) -> None:
    hook = tmp_path / "own_client.py"
    hook.write_text(
        "import aiohttp\n"
        "async def generate(args, sample, sampling_params):\n"
        "    url = f'http://{args.sglang_router_ip}:{args.sglang_router_port}/generate'\n"
        "    body = {'text': 'a', 'sampling_params': {'max_new_tokens': 1}}\n"
        "    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:\n"
        "        assert answer.status == 200, await answer.text()\n"
        "    from slime.rollout.sglang_rollout import generate\n"
        "    return await generate(args, sample, sampling_params)\n"
    )
    run = runner.inline(
        *flags, "--num-rollout", 1, "--custom-generate-function-path", f"{hook}:generate"
    )
    assert run.code == 0, run.output


def test_an_error_of_a_users_function_ends_in_its_line(runner, flags, tmp_path: Path) -> None:
    hook = tmp_path / "broken.py"
    hook.write_text("def shape(args, samples):\n    total = 1\n    return total / 0  # here\n")
    run = runner.inline(*flags, "--custom-reward-post-process-path", f"{hook}:shape")
    assert run.code == 1
    trace = run.output[run.output.rindex("Traceback") :]
    assert "RayTaskError" not in trace and "/ray/" not in trace
    assert re.search(
        r'broken\.py", line 3, in shape\n.*# here\n(?:\s*[~^]+\n)?ZeroDivisionError', trace
    ), trace


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--actor-num-gpus-per-node", 2), "several training ranks exclude"),
        (("--rollout-num-gpus", 2), "--rollout-num-gpus"),
        (("--use-fault-tolerance",), "--use-fault-tolerance"),
        (("--train-backend", "megatron"), "--train-backend megatron"),
        (("--rollout-workers", 2), "--rollout-workers"),
        (("--use-router",), "--use-router"),
        (("--train-env-vars", '{"A": "1"}'), "--train-env-vars"),
    ],
)
def test_what_one_process_cannot_do_is_refused(
    runner, flags, more: tuple[object, ...], said: str
) -> None:
    run = runner.inline(*flags, *more)
    assert run.code == 2 and said in run.output, run.output


@pytest.mark.parametrize(
    "where",
    ["reward", *(pytest.param(x, marks=pytest.mark.long) for x in ("generate", "loss", "slime"))],
)
def test_a_debugger_stops_in_a_users_function_and_in_the_loop(
    runner, flags, tmp_path: Path, where: str
) -> None:
    """As on a terminal: commands are typed, an expression is printed, and the run goes on to its
    end.
    """
    hook = tmp_path / "stops.py"
    hook.write_text(
        "stopped = []\n"
        "def once():\n"
        "    stopped.append(1)\n"
        "    return len(stopped) == 1\n"
        "async def reward(args, sample, **kwargs):\n"
        "    mine = 41\n"
        "    if once(): breakpoint()\n"
        "    return float(mine)\n"
        "async def generate(args, sample, sampling_params):\n"
        "    mine = 41\n"
        "    if once(): breakpoint()\n"
        "    from slime.rollout.sglang_rollout import generate\n"
        "    return await generate(args, sample, sampling_params)\n"
        "def post(args, rollout_id, rollout_data):\n"
        "    mine = 41\n"
        "    if once(): breakpoint()\n"
    )
    own = {
        "reward": ("--custom-rm-path", f"{hook}:reward"),
        "generate": ("--custom-generate-function-path", f"{hook}:generate"),
        "loss": ("--rollout-data-postprocess-path", f"{hook}:post"),
        "slime": (),
    }[where]
    program = tmp_path / "program.py"
    patch = (
        "import slime.cluster.phases as phases\n"
        "step = phases.Run.train\n"
        "def stopping(self, rollout_id, batch):\n"
        "    mine = 41\n"
        "    if rollout_id == 0: breakpoint()\n"
        "    return step(self, rollout_id, batch)\n"
        "phases.Run.train = stopping\n"
    )
    program.write_text(
        "import train\nfrom slime.cluster.checks import parse_and_check\n"
        + (patch if where == "slime" else "")
        + "train.train(parse_and_check())\n"
    )
    command = [
        sys.executable,
        str(program),
        "--inline",
        "--run-name",
        "run",
        *map(str, (*flags, *own)),
    ]
    ours, theirs = pty.openpty()
    # as Ray leaves it for child processes
    ray_was_here = {"PYTHONBREAKPOINT": "ray.util.rpdb._driver_set_trace"}
    environment = {**os.environ, **ray_was_here, "PYTHONPATH": str(CHECKOUT), "TERM": "xterm"}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    runner.started.append(process)
    os.close(theirs)
    said = _until(ours, "(Pdb)")
    os.write(ours, b"p mine + 1\n")
    said += _until(ours, "(Pdb)")
    os.write(ours, b"continue\n")
    said += _until(ours, None)
    assert process.wait(60) == 0, said
    assert re.search(r"\b42\b", said) and "ledger: 12 groups" in said, said


def _until(terminal: int, mark: str | None, seconds: float = 240) -> str:
    """What the terminal shows up to ``mark``, or to its end."""
    shown, end = "", time.monotonic() + seconds
    while time.monotonic() < end:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the program has ended
            part = b""
        if not part:
            break
        shown += part.decode(errors="replace")
        if mark is not None and mark in shown:
            return shown
    assert mark is None, f"{mark} did not come: {shown}"
    return shown


def test_a_run_leaves_no_model_in_memory(runner, flags) -> None:
    """A notebook starts one run after the other in its process."""
    from transformers import PreTrainedModel

    def models() -> int:
        gc.collect()
        return sum(isinstance(one, PreTrainedModel) for one in gc.get_objects())

    before = models()
    run = runner.inline(*flags, "--num-rollout", 1)
    assert run.code == 0, run.output
    assert models() <= before
