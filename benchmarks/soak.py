"""A long run of a tiny model: does anything grow with the number of rollouts?

    python benchmarks/soak.py --output /tmp/soak                            # 1,000 rollouts of train.py
    python benchmarks/soak.py --output /tmp/soak-async --kind fully-async   # of train_async.py with the standing pool
    python benchmarks/soak.py --output /tmp/soak --judge                    # only the verdict, from the samples there

Every ten rollouts, each process of the run is looked at from outside: memory with its share of what
several processes map (PSS), the part of it that no file backs, open descriptors and threads. (What
files back, mostly libraries, also changes with other programs on the machine, so it is not judged.)
Also counted are the files in /dev/shm that belong to the run, the folder of the run (with
``--save-keep-last 2 --log-keep-last 20``), and, from within the trainer, what Ray's object store
holds. Snapshots, evaluations, fault tolerance and a math verifier are on.

The verdict leaves out the first fifty rollouts. The rest is averaged over twelve equal stretches,
and a line is fitted through these means: neighbouring samples depend on each other, so a fit
through all of them would look more certain than it is. A quantity grows if the lower end of the
slope's 95% interval lies above its limit (``LIMITS``). The last line is JSON; the exit status is 1
if the run failed or anything grows.

``--trace`` lists, from within trainer and rollout manager, the lines of code whose allocations grew
(tracemalloc; the run is slower and larger then).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from random_model import write_model

CHECKOUT = Path(__file__).resolve().parents[1]
MARK = "SLIME_SOAK_RUN"
MIB = 2**20
EVERY, WARM_UP, STRETCHES = 10, 50, 12
T_95 = 2.228  # Student's t of 97.5% for STRETCHES - 2 degrees of freedom
LIMITS = {
    "uss_mib": 0.25,
    "heap_mib": 0.25,
    "fds": 0.2,
    "threads": 0.2,
    "files": 0.2,
    "mib": 0.25,
    "objects": 0.2,
}
"""How much may be added per 100 rollouts. A quarter of a MiB is 2.6 KiB per rollout."""
POOL = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
KINDS = {
    "sync": ("train.py", ""),
    "fully-async": ("train_async.py", f"--async-buffer-size 2 --rollout-function-path {POOL}"),
}
FLAGS = """
    --rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 8 --lr 1e-4 --train-backend fsdp
    --rollout-backend embedded --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --use-fault-tolerance
    --save-interval 25 --save-keep-last 2 --log-keep-last 20 --eval-interval 25 --n-samples-per-eval-prompt 1
    --no-skip-zero-advantage-groups --run-name run
"""
ROLES = (  # the first that is found in the command line of a process
    (r"ray::(\w+)", None),
    (r"slime\.engines\.embedded\.server", "engine server"),
    (r"slime\.engines\.guard", "router guard"),
    (r"^ *$", "router"),  # its title is empty
    (r"gcs_server", "ray gcs"),
    (r"raylet/raylet", "ray raylet"),
    (r"dashboard/agent", "ray agent"),
    (r"runtime_env/agent", "ray runtime agent"),
    (r"dashboard/dashboard", "ray dashboard"),
    (r"log_monitor", "ray log monitor"),
    (r"monitor\.py", "ray monitor"),
    (r"torch_shm_manager", "torch shm manager"),
    (r"resource_tracker", "resource tracker"),
    (r"restarts/supervisor\.py", "supervisor"),
    (r"train(_async)?\.py", "driver"),
)
HOOKS = '''
"""Loaded into the trainer and the rollout manager of the run."""
import copy
import functools
import gc
import json
import os
import tracemalloc
from pathlib import Path

HERE = Path(__file__).parent
first = {}


async def reward(args, sample, **kwargs):
    from slime.plugins.rewards.math import math_reward

    trace("manager", sample.group_index // args.rollout_batch_size)
    answer = copy.copy(sample)  # with something for the verifier to compare: the model writes noise
    answer.response = "\\\\boxed{\\\\frac{%d}{2}}" % (2 * (len(sample.response) % 3))
    verified = await math_reward(args, answer)
    return float(len(sample.response) % 7) + float(verified or 0)


def in_trainer(args, rollout_id, rollout_data):
    trace("trainer", rollout_id)
    if rollout_id % 10:
        return
    with open(HERE / "store.jsonl", "a") as file:
        store = object_store()
        row = {"rollout": rollout_id, "bytes": store.object_store_bytes_used, "objects": store.num_local_objects}
        file.write(json.dumps(row) + "\\n")


@functools.cache
def raylet():
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.worker import global_worker
    from ray.core.generated import node_manager_pb2_grpc

    node = global_worker.node
    return node_manager_pb2_grpc.NodeManagerServiceStub(
        init_grpc_channel(f"{node.node_ip_address}:{node.node_manager_port}")
    )


def object_store():
    from ray.core.generated import node_manager_pb2

    return raylet().GetNodeStats(node_manager_pb2.GetNodeStatsRequest(), timeout=30.0).store_stats


def trace(who, rollout_id):
    """With PYTHONTRACEMALLOC: what grew between rollout 50 and the newest hundred."""
    if not tracemalloc.is_tracing() or (who, rollout_id) in first or rollout_id < 50 or rollout_id % 50:
        return
    gc.collect()
    now = tracemalloc.take_snapshot().filter_traces((tracemalloc.Filter(False, tracemalloc.__file__),))
    first.setdefault(who, now)
    first[who, rollout_id] = True
    grown = now.compare_to(first[who], "traceback")[:25]
    with open(HERE / f"grown-{who}.txt", "w") as file:
        print("rollout", rollout_id, "traced MiB", tracemalloc.get_traced_memory()[0] / 2**20, file=file)
        for line in grown:
            print(f"{line.size_diff / 1024:10.1f} KiB {line.count_diff:8d} blocks", *line.traceback.format()[-8:],
                  sep="\\n", file=file)
'''


def main() -> int:
    options = parse()
    folder = options.output.resolve()
    facts: dict[str, Any] = {"kind": options.kind, "rollouts": options.rollouts}
    if not options.judge:
        folder.mkdir(parents=True)
        facts |= run(options, folder)
    result = {**facts, **judge(folder, facts)}
    print(json.dumps(result))
    return 0 if result["flat"] and result.get("exit_code", 0) == 0 else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=sorted(KINDS), default="sync")
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--output", type=Path, required=True, help="folder that does not exist yet")
    parser.add_argument(
        "--judge", action="store_true", help="only judge what an earlier call has sampled"
    )
    parser.add_argument("--trace", action="store_true", help="list the allocations that grew")
    parser.add_argument("--timeout", type=float, default=2300.0, help="seconds for the whole run")
    parser.add_argument("flags", nargs="*", help="more flags of the run, after --")
    return parser.parse_args()


# --- the run
# -------------------------------------------------------------------------------------------


def command(options: argparse.Namespace, folder: Path) -> list[str]:
    script, more = KINDS[options.kind]
    hooks, prompts, held_out = (
        folder / "hooks.py",
        folder / "prompts.jsonl",
        folder / "held_out.jsonl",
    )
    hooks.write_text(HOOKS)
    rows = [json.dumps({"prompt": f"Write {i}.", "label": str(i % 3)}) + "\n" for i in range(256)]
    prompts.write_text("".join(rows))
    held_out.write_text("".join(rows[:4]))
    paths: list[object] = [
        "--hf-checkpoint", write_model("tiny", folder / "model"), "--prompt-data", prompts, "--apply-chat-template",
        "--custom-rm-path", f"{hooks}:reward", "--rollout-data-postprocess-path", f"{hooks}:in_trainer",
        "--eval-prompt-data", "held_out", held_out, "--num-rollout", options.rollouts,
    ]  # fmt: skip
    given = [*FLAGS.split(), *more.split(), *options.flags]
    return [sys.executable, str(CHECKOUT / script), *map(str, paths), *given]


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The run to its end, looked at every :data:`EVERY` rollouts; ended when it is late."""
    mark = uuid.uuid4().hex
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, MARK: mark, "PYTHONPATH": path}
    if options.trace:
        environment["PYTHONTRACEMALLOC"] = "8"
    start, last = time.time(), -1
    with (
        open(folder / "output.txt", "wb") as output,
        open(folder / "samples.jsonl", "w") as samples,
    ):
        process = subprocess.Popen(
            command(options, folder), cwd=folder, env=environment, stdout=output, stderr=output
        )
        while process.poll() is None and time.time() - start < options.timeout:
            time.sleep(0.25)
            done = steps_done(folder)
            if done // EVERY != last // EVERY:
                last = done
                row = {"rollout": done, "time": time.time() - start, **look(mark, folder)}
                samples.write(json.dumps(row) + "\n")
                samples.flush()
        late = process.poll() is None
        if late:
            process.terminate()
        try:
            code: int | None = process.wait(120)
        except subprocess.TimeoutExpired:  # its processes are killed below
            code = None
    left = alive(mark)
    names = [role(line) for _, line in left]
    for remaining, _ in left:
        remaining.kill()
    print((folder / "output.txt").read_text(errors="replace")[-2000:])
    return {
        "exit_code": code,
        "late": late,
        "seconds": round(time.time() - start),
        "left_processes": names,
    }


_read = {"position": 0, "steps": 0}


def steps_done(folder: Path) -> int:
    """The number of steps in ``metrics.jsonl``, of which only the new part is read."""
    file = folder / "outputs" / "run" / "metrics.jsonl"
    if file.exists():
        with open(file, "rb") as metrics:
            metrics.seek(_read["position"])
            new = metrics.read()
        whole = new[: new.rfind(b"\n") + 1]
        _read["position"] += len(whole)
        _read["steps"] += whole.count(b'"rollout/step"')
    return _read["steps"]


def alive(mark: str) -> list[tuple[psutil.Process, str]]:
    """The processes of the run with their command lines, the oldest first."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process, " ".join(process.cmdline())))
        except psutil.Error:
            continue
    return sorted(found, key=lambda pair: pair[0].create_time())


def role(line: str) -> str:
    for pattern, name in ROLES:
        if match := re.search(pattern, line):
            return name or match[1]
    return line[-60:]


def look(mark: str, folder: Path) -> dict[str, Any]:
    """What each process, /dev/shm and the folder of the run hold now."""
    processes: dict[str, dict[str, float]] = {}
    pids = set()
    for process, line in alive(mark):
        try:
            facts = {
                **memory(process.pid),
                "fds": process.num_fds(),
                "threads": process.num_threads(),
            }
        except (psutil.Error, OSError):  # it has just ended
            continue
        pids.add(process.pid)
        name = role(line)
        number = sum(other.split("#")[0] == name for other in processes)
        processes[f"{name}#{number}" if number else name] = facts
    return {
        "processes": processes,
        "shared": shared_memory(pids),
        "disk": {part: size(path) for part, path in parts(folder / "outputs" / "run")},
    }


def memory(pid: int) -> dict[str, float]:
    """MiB of a process with its share of what several map, and the part of it that no file backs
    (heap and stacks).
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return {"pss_mib": kib["Pss"] / 1024, "heap_mib": kib["Pss_Anon"] / 1024}


def shared_memory(pids: set[int]) -> dict[str, float]:
    """Files of the run in /dev/shm: those that its processes have mapped or open, or whose names
    have their ids.
    """
    used = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
            used |= set(re.findall(r"/dev/shm/[^\n]*", maps))
            for handle in os.scandir(f"/proc/{pid}/fd"):
                target = os.readlink(handle.path)
                if target.startswith("/dev/shm/"):
                    used.add(target)
        except OSError:
            continue
    count = total = 0
    for entry in os.scandir("/dev/shm"):
        ours = entry.path in used or pids & {
            int(number) for number in re.findall(r"\d+", entry.name)
        }
        try:
            count, total = count + bool(ours), total + entry.stat().st_blocks * 512 * bool(ours)
        except OSError:
            continue
    deleted = sum(path.endswith("(deleted)") for path in used)
    return {"files": count, "deleted_files": deleted, "mib": total / MIB}


def parts(folder: Path) -> Iterator[tuple[str, Path]]:
    """The entries of the run's folder, each with its name."""
    if folder.exists():
        for path in sorted(folder.iterdir()):
            yield path.name, path


def size(path: Path) -> float:
    """MiB of a file or of a folder's files."""
    files = path.rglob("*") if path.is_dir() else [path]
    total = 0
    for file in files:
        try:
            total += file.lstat().st_size
        except OSError:  # removed while it was listed
            continue
    return total / MIB


# --- the verdict
# ---------------------------------------------------------------------------------------


def judge(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Which quantities grow, which do not, and by how much per 100 rollouts."""
    rows = []
    for where, points in sorted(series(folder).items()):
        late = [(x, y) for x, y in points if x >= WARM_UP]
        if len(late) < 2 * STRETCHES:
            continue
        growth, margin = slope(late)
        unit = where.rsplit(" ", 1)[1]
        limit = LIMITS.get(unit, math.inf)
        rows.append(
            {
                "what": where,
                "first": round(late[0][1], 2),
                "last": round(late[-1][1], 2),
                "most": round(max(y for _, y in late), 2),
                "per_100": round(growth, 3),
                "margin": round(margin, 3),
                "grows": growth - margin > limit,
            }
        )
    print_table(rows)
    grown = [str(row["what"]) for row in rows if row["grows"]]
    print(f"grows: {', '.join(grown) or 'nothing'}")
    return {"flat": bool(rows) and not grown, "grows": grown, "quantities": rows}


def series(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Each sampled quantity, named "<where> <unit>", as its values over the rollouts."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in (folder / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        x = row["rollout"]
        for name, facts in row["processes"].items():
            for unit, value in facts.items():
                found[f"{name} {unit}"].append((x, value))
        for unit, value in row["shared"].items():
            found[f"/dev/shm {unit}"].append((x, value))
        for part, value in row["disk"].items():
            found[f"disk {part} disk_mib"].append((x, value))
    store = folder / "store.jsonl"
    for line in store.read_text().splitlines() if store.exists() else []:
        row = json.loads(line)
        found["object store mib"].append((row["rollout"], row["bytes"] / MIB))
        found["object store objects"].append((row["rollout"], row["objects"]))
    return found


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Growth per 100 rollouts and half of its 95% interval, of the means of :data:`STRETCHES` equal
    stretches.
    """
    size = len(points) / STRETCHES
    stretches = [points[round(i * size) : round((i + 1) * size)] for i in range(STRETCHES)]
    xs = [statistics.fmean(x for x, _ in stretch) for stretch in stretches]
    ys = [statistics.fmean(y for _, y in stretch) for stretch in stretches]
    fit = statistics.linear_regression(xs, ys)
    spread = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
    rest = sum((y - fit.slope * x - fit.intercept) ** 2 for x, y in zip(xs, ys, strict=True))
    return 100 * fit.slope, 100 * T_95 * math.sqrt(rest / (STRETCHES - 2) / spread)


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'':<36}{'first':>10}{'last':>10}{'most':>10}{'per 100 rollouts':>22}")
    for row in rows:
        growth = f"{row['per_100']:+.3f} ± {row['margin']:.3f}"
        mark = "  GROWS" if row["grows"] else ""
        print(
            f"{row['what']:<36}{row['first']:>10}{row['last']:>10}{row['most']:>10}{growth:>22}{mark}"
        )


if __name__ == "__main__":
    sys.exit(main())
