"""A run whose engine is killed, and then stopped, in the middle of a weight broadcast; and goes on.

    python benchmarks/kill_engine.py                                  # two GPUs, SGLang, NCCL
    python benchmarks/kill_engine.py --device cpu --shape tiny        # anywhere, embedded engine

Runs ``train.py --use-fault-tolerance`` with its trainer on one GPU and one engine on each other. In
the update after rollout 1 an engine gets SIGKILL at the third bucket, in that after rollout 3
SIGSTOP: all of its processes, from within the trainer, so that its half of the broadcast is under
way. Prints what happened when, checks that every prompt group was trained exactly once, that the
audit of each update passed and that no process is left, and ends with one line of JSON (``"ok":
true``). Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from random_model import SHAPES, write_model

from slime.observability.samples import read_samples, sample_files

CHECKOUT = Path(__file__).resolve().parents[1]
STEPS = 6
MARK = "SLIME_KILL_ENGINE_RUN"
HOOKS = '''
"""Loaded into the trainer and the rollout manager of the run."""
import json
import os
import signal
import time
from pathlib import Path

import psutil

HERE = Path(__file__).parent
BLOWS = {1: signal.SIGKILL, 3: signal.SIGSTOP}  # by rollout


def note(event, **more):
    with open(HERE / "events.jsonl", "a") as file:
        file.write(json.dumps({"time": time.time(), "event": event, **more}) + "\\n")


def strike(url, blow):
    port = url.rsplit(":", 1)[1]
    tree = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            if process.environ().get("MARKNAME") == os.environ["MARKNAME"] and "--port" in line:
                if line[line.index("--port") + 1] == port:
                    tree += [process, *process.children(recursive=True)]
        except (psutil.Error, IndexError):
            continue
    pids = {process.pid for process in tree}
    note(signal.Signals(blow).name, url=url, pids=sorted(pids))
    for pid in pids:
        try:
            os.kill(pid, blow)
        except ProcessLookupError:
            continue


async def reward(args, sample, **kwargs):
    return float(len(sample.response) % 7)


def watch():
    """Note what the transport does."""
    from slime.engines.handle import EngineHandle
    from slime.weights.transports.distributed import BroadcastGroup

    def noted(cls, name, event):
        inner = getattr(cls, name)

        def outer(self, *args, **kwargs):
            start = time.time()
            try:
                return inner(self, *args, **kwargs)
            finally:
                note(event, seconds=time.time() - start)

        setattr(cls, name, outer)

    noted(BroadcastGroup, "__init__", "group made")
    noted(BroadcastGroup, "abort", "communicator aborted")
    for name in ("receive", "push"):
        arm(EngineHandle, name)


armed = []


def arm(cls, name):
    inner, calls = getattr(cls, name), []

    async def outer(self, *args, **kwargs):
        calls.append(self.url)
        if armed and len(calls) >= armed[0][0]:
            strike(self.url, armed.pop()[1])
        return await inner(self, *args, **kwargs)

    outer.calls = calls
    setattr(cls, name, outer)


def in_trainer(args, rollout_id, rollout_data):
    """Called in the trainer in each step, before its update of the weights."""
    from slime.engines.handle import EngineHandle

    if rollout_id == 0:
        watch()
    note("trained", rollout=rollout_id)
    if rollout_id in BLOWS:
        EngineHandle.receive.calls.clear()
        EngineHandle.push.calls.clear()
        armed.append((3, BLOWS[rollout_id]))
'''


def main() -> int:
    options = parse()
    folder = Path(options.output or tempfile.mkdtemp(prefix="kill-engine-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"everything is written below {folder}")
    result: dict[str, Any] = {"ok": False, "device": options.device, "shape": options.shape}
    try:
        model = write_model(options.shape, folder / "model")
        result |= run(options, folder, model)
        result |= judge(folder, result)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(result))
    return 0 if result["ok"] else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=540.0, help="seconds for the whole run")
    parser.add_argument(
        "--sync-minutes", type=int, default=1, help="deadline of one bucket (SIGSTOP waits for it)"
    )
    parser.add_argument(
        "--output", help="folder for model, logs and metrics; default: a temporary one"
    )
    parser.add_argument(
        "--attention-backend", default="triton", help="SGLang's; triton is in every build of it"
    )
    parser.add_argument("flags", nargs="*", help="more flags of train.py, after --")
    return parser.parse_args()


def command(options: argparse.Namespace, folder: Path, model: Path) -> list[str]:
    hooks, prompts = folder / "hooks.py", folder / "prompts.jsonl"
    hooks.write_text(HOOKS.replace("MARKNAME", MARK))
    prompts.write_text(
        "".join(
            json.dumps({"prompt": f"Write {i}.", "label": str(i)}) + "\n" for i in range(8 * STEPS)
        )
    )
    flags: list[object] = [
        "--hf-checkpoint", model, "--prompt-data", prompts, "--apply-chat-template",
        "--custom-rm-path", f"{hooks}:reward", "--rollout-data-postprocess-path", f"{hooks}:in_trainer",
        "--rollout-batch-size", 8, "--n-samples-per-prompt", 4, "--rollout-max-response-len", 32, "--lr", "1e-5",
        "--train-backend", "fsdp", "--actor-num-gpus-per-node", 1, "--rollout-num-gpus", options.engines,
        "--num-rollout", STEPS, "--run-name", "run", "--use-fault-tolerance", "--rollout-health-check-interval", 5,
        "--rollout-health-check-timeout", 20, "--distributed-timeout-minutes", options.sync_minutes,
        "--phase-timeout", 400,
    ]  # fmt: skip
    if options.device == "cuda":
        flags += ["--rollout-backend", "sglang", "--update-weight-buffer-size", 64 * 2**20]
        flags += [
            "--sglang-attention-backend",
            options.attention_backend,
            "--sglang-mem-fraction-static",
            0.3,
        ]
        flags += ["--sglang-disable-cuda-graph", "--no-compile-layers"]
    else:
        flags += ["--rollout-backend", "embedded", "--update-weight-buffer-size", 20000]
    return [sys.executable, str(CHECKOUT / "train.py"), *map(str, flags), *options.flags]


def run(options: argparse.Namespace, folder: Path, model: Path) -> dict[str, Any]:
    """The run to its end; when it is late, all of its processes are ended."""
    mark = uuid.uuid4().hex
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, MARK: mark, "PYTHONPATH": path}
    start = time.time()
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(
            command(options, folder, model),
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
        )
        try:
            code: int | None = process.wait(options.timeout)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGTERM)
            time.sleep(5)
    left = alive(mark)
    until = time.monotonic() + 20
    while left and code is not None and time.monotonic() < until:
        time.sleep(0.5)
        left = alive(mark)
    names = [" ".join(_line(process))[:120] for process in left]
    for process in left:
        process.kill()
    print((folder / "output.txt").read_text(errors="replace")[-6000:])
    return {
        "exit_code": code,
        "seconds": time.time() - start,
        "start": start,
        "left_processes": names,
    }


def alive(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return ["?"]


def judge(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """What happened when, and whether it is what had to happen."""
    events = timeline(folder)
    for event in events:
        more = {key: value for key, value in event.items() if key not in ("time", "event")}
        print(
            f"  {event['time'] - result['start']:8.2f} s  {event['event']:<22} "
            f"{json.dumps(more) if more else ''}"
        )
    out = folder / "outputs" / "run"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rollout/step" in row]
    groups = [
        sorted({row["group_index"] for row in read_samples(file)})
        for file in sample_files(out, "rollout").values()
    ]
    checks = {
        "run ended well": result["exit_code"] == 0,
        "all steps": [row["rollout/step"] for row in steps] == list(range(STEPS)),
        "both blows fell": {"SIGKILL", "SIGSTOP"} <= {event["event"] for event in events},
        "two engines lost": sum(row["rollout/engine_lost_count"] for row in steps) == 2,
        "each group once": sorted(i for step in groups for i in step) == list(range(8 * STEPS)),
        "audits passed": all(row.get("perf/audit_logprob_diff", 1e9) < 1e9 for row in steps),
        "no process left": not result["left_processes"],
    }
    for what, well in checks.items():
        print(f"  {what}: {'yes' if well else 'NO'}")
    return {"ok": all(checks.values()), "checks": checks, "waits": waits(events), "events": events}


def timeline(folder: Path) -> list[dict[str, Any]]:
    """The trainer's notes and the manager's log lines about engines, in order."""
    notes = folder / "events.jsonl"
    events = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    log = folder / "outputs" / "run" / "logs" / "rollout-manager.log"
    pattern = re.compile(
        r"^(\S+ \S+),(\d+) slime\.cluster\.\S+ \w+ (engine \d+ .*?(?:is lost|is up again|serves).*)$"
    )
    for line in log.read_text(errors="replace").splitlines() if log.exists() else []:
        if match := pattern.match(line):
            when = (
                datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(match[2]) / 1000
            )
            events.append({"time": when, "event": "manager", "said": match[3][:200]})
    return sorted(events, key=lambda event: float(event["time"]))


def waits(events: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds from each blow until the loss was noted, and until an engine served again."""
    found: dict[str, dict[str, float]] = {}
    for i, event in enumerate(events):
        if event["event"] not in ("SIGKILL", "SIGSTOP"):
            continue
        after = {}
        for what, words in (
            ("noticed_s", "is lost"),
            ("up_again_s", "is up again"),
            ("serves_s", " serves"),
        ):
            times = [e["time"] for e in events[i:] if words in e.get("said", "")]
            if times:
                after[what] = times[0] - event["time"]
        aborted = [e["time"] for e in events[i:] if e["event"] == "communicator aborted"]
        if aborted:
            after["aborted_s"] = aborted[0] - event["time"]
        found[event["event"]] = after
    return found


if __name__ == "__main__":
    sys.exit(main())
