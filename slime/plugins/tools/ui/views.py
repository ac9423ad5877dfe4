"""What the page shows of one run, as values for JSON. Every function reads the index or a small
file.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from slime.observability.files import parse_json, regular
from slime.observability.metrics import REWARD_KEYS
from slime.observability.run_state import RunState
from slime.observability.trace_file import trace_of

from ..summary import end_of
from .index import Row, spans_of
from .runs import Run
from .timeline import timeline

MOST_PROMPTS = 500
MOST_OF_PROMPT = 2000
MOST_TEXTS = 200
_HEAD = 160
SHOWN_SETTINGS = (
    "hf_checkpoint", "prompt_data", "advantage_estimator", "rollout_batch_size", "n_samples_per_prompt",
    "global_batch_size", "num_rollout", "rollout_max_response_len", "rollout_temperature", "lr", "kl_loss_coef",
    "train_backend", "rollout_backend", "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus", "seed",
)  # fmt: skip
View = dict[str, object]
_SAMPLE = (
    "position, group_index, sample_index, reward, reward_text, length, status, staleness, "
    "version, source, parts, prompt"
)


def summary(run: Run) -> View:
    """The line of a run in the list of runs."""
    state, status = run.state()
    reward = next(
        (value for key in REWARD_KEYS if (value := run.series.latest(key)) is not None), None
    )
    return {
        "key": run.key,
        "name": run.folder.name,
        "folder": str(run.folder),
        "status": status,
        "phase": state.phase if state else "",
        "since": state.since if state else None,
        "steps": run.series.steps,
        "last_step": run.series.last_step,
        "planned": run.settings.get("num_rollout"),
        "reward": reward,
        "first_time": run.series.first_time,
        "last_time": run.series.last_time,
        "pending": run.index.pending,
        "version": f"{run.series.version}.{run.index.version}",
    }


def overview(run: Run) -> View:
    state, _ = run.state()
    counted = run.index.rows("select count(*) as samples, coalesce(sum(bad), 0) as bad from files")
    total = run.index.rows("select count(*) as samples from samples")[0]["samples"]
    return {
        **summary(run),
        "error": state.error if state else "",
        "waiting": _waiting(state) if state else None,
        "host": state.host if state else "",
        "pid": state.pid if state else None,
        "names": run.series.names,
        "settings": {
            name: run.settings[name]
            for name in SHOWN_SETTINGS
            if run.settings.get(name) is not None
        },
        "samples": total,
        "unreadable": run.series.unreadable + int(counted[0]["bad"] or 0),
        "evaluations": _evaluation_names(run),
        "recorded": recorded(run, int(total or 0)),
        "served": _served(run),
    }


def _served(run: Run) -> object:
    """The models that ``slime serve`` trains in this run."""
    file = run.folder / "served.json"
    return parse_json(regular(file).read_bytes()) if file.exists() else []


def _waiting(state: RunState) -> View | None:
    """What the driver waits for, and what the processes that it waits for said last; None if it
    waits for nothing.
    """
    if not state.waiting:
        return None
    said = [{"name": name, **progress} for name, progress in state.said.items()]
    return {
        "what": state.waiting,
        "since": state.waiting_since,
        "deadline": state.deadline,
        "said": said,
    }


def recorded(run: Run, samples: int) -> list[View]:
    """What the run wrote, and the flag that lets a run write what is missing."""
    dumped = any(run.settings.get(f"save_debug_{side}_data") for side in ("train", "rollout"))
    always = "written by every run"
    rows = (
        ("texts of samples", samples > 0, "--log-samples all"),
        ("traces", any(run.files.traces.glob("rollout_*")), always),
        ("tokens", dumped, "--dump-details FOLDER (or --save-debug-train-data)"),
        ("evaluations", bool(_evaluation_names(run)), "--eval-prompt-data, --eval-interval"),
        ("ledger", bool(run.ledger.rows or run.ledger.cut), always),
        ("state", (run.folder / "state.json").is_file(), always),
    )
    return [{"what": what, "there": there, "how": how} for what, there, how in rows]


def doctor(run: Run) -> View:
    """The findings of ``slime doctor``."""
    from dataclasses import asdict

    from ..doctor import diagnose
    from ..doctor.facts import NoRun, read_facts

    try:
        return {"findings": [asdict(finding) for finding in diagnose(read_facts(run.folder))]}
    except NoRun as error:
        return {"findings": [], "problem": str(error)}


# --- steps and samples ---


def steps(run: Run) -> View:
    """The steps of which there are samples, with the number of samples and the mean reward of
    each.
    """
    query = (
        "select step, count(*) as n, avg(reward) as reward from samples where kind = 'rollout' "
        "group by step"
    )
    rows = run.index.rows(query)
    return {
        "steps": [row["step"] for row in rows],
        "samples": [row["n"] for row in rows],
        "last": run.series.last_step,
    }


def step(run: Run, number: int) -> View:
    """The groups of a step, with those that the ledger has and that were not trained, and the
    metrics of the step.
    """
    run.index.ensure("rollout", number)
    query = f"select {_SAMPLE} from samples where kind = 'rollout' and step = ? order by position"
    # Samples without a group stand alone.
    groups: dict[object, list[Row]] = {}
    for row in run.index.rows(query, (number,)):
        key = row["group_index"] if row["group_index"] is not None else f"alone {row['position']}"
        groups.setdefault(key, []).append(row)
    prompts = _prompts(
        run, "select distinct prompt from samples where kind = 'rollout' and step = ?", (number,)
    )
    shown = [_group(run, key, rows, prompts) for key, rows in groups.items()]
    # Groups that were dropped have no samples, and the ledger says why.
    others = [group for group in run.ledger.of_rollout.get(number, ()) if group not in groups]
    shown += [_group(run, key, [], prompts) for key in dict.fromkeys(others)]
    return {
        "step": number,
        "groups": shown,
        "metrics": run.series.at(number),
        "last": run.series.last_step,
    }


def _prompts(run: Run, query: str, values: tuple[object, ...]) -> dict[object, Row]:
    rows = run.index.rows(f"select key, head, label from prompts where key in ({query})", values)
    return {row["key"]: row for row in rows}


def _texts(prompt: Row | None) -> View:
    """The beginnings of a prompt and of its label."""
    return (
        {"head": prompt["head"], "label": prompt["label"]} if prompt else {"head": "", "label": ""}
    )


def _mean(rows: Iterable[Row], name: str) -> float | None:
    values = [float(value) for row in rows if (value := row[name]) is not None]
    return statistics.fmean(values) if values else None


def _mean_parts(rows: Iterable[Row]) -> dict[str, float]:
    """Return the mean of each of several rewards over the samples that have it, by name."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in json.loads(str(row["parts"] or "{}")).items():
            values.setdefault(name, []).append(value)
    return {name: statistics.fmean(found) for name, found in sorted(values.items())}


def _group(run: Run, key: object, rows: list[Row], prompts: Mapping[object, Row]) -> View:
    """A group of prompts: statistics, what the ledger says of it, and its samples."""
    rewards = [float(row["reward"]) for row in rows if row["reward"] is not None]
    lengths = [int(row["length"]) for row in rows if row["length"] is not None]
    ages = [int(row["staleness"]) for row in rows if row["staleness"] is not None]
    entry = run.ledger.rows.get(key, {}) if isinstance(key, int) else {}
    prompt = rows[0]["prompt"] if rows else None
    return {
        "group": key,
        "prompt": prompt,
        **_texts(prompts.get(prompt)),
        "n": len(rows) or entry.get("samples", 0),
        "reward": _mean(rows, "reward"),
        "source": rows[0]["source"] if rows else None,
        "rewards": _mean_parts(rows),
        "reward_std": statistics.pstdev(rewards) if rewards else None,
        "length": _mean(rows, "length"),
        "longest": max(lengths, default=None),
        "staleness": max(ages, default=None),
        "statuses": dict(Counter(str(row["status"]) for row in rows)),
        "state": entry.get("state"),
        "reason": entry.get("reason"),
        "returns": entry.get("returns", 0),
        "asked": entry.get("asked"),
        "versions": entry.get("versions", []),
        "samples": [[row[name] for name in _SHOWN] for row in rows],
    }


_SHOWN = ("position", "sample_index", "reward", "length", "status", "staleness", "version")


def step_timeline(run: Run, number: int) -> View:
    # A trace may be damaged, removed, or not written yet.
    drawn = timeline(run.folder, number)
    if drawn is None:
        if (path := trace_of(run.folder, number)).exists():
            return {"missing": f"{path} cannot be drawn: it is damaged, or has no spans."}
        kept = run.settings.get("log_keep_last")
        why = f" --log-keep-last {kept} keeps only the newest." if kept else ""
        return {"missing": f"There is no trace of step {number}.{why}"}
    return drawn


def sample(run: Run, kind: str, number: int, position: int) -> View | None:
    """A sample with its texts; None if there is none."""
    record = run.index.sample(kind, number, position)
    where = "kind = ? and step = ? and position = ?"
    rows = run.index.rows(f"select {_SAMPLE} from samples where {where}", (kind, number, position))
    if record is None or not rows:
        return None
    group = rows[0]["group_index"]
    query = (
        "select position from samples where kind = ? and step = ? and group_index is ? order by "
        "position"
    )
    siblings = run.index.rows(query, (kind, number, group)) if group is not None else []
    return {
        "kind": kind,
        "step": number,
        "position": position,
        "record": record,
        "row": rows[0],
        "spans": spans_of(record),
        "siblings": [row["position"] for row in siblings],
        "ledger": run.ledger.rows.get(group)
        if isinstance(group, int) and kind == "rollout"
        else None,
    }


# --- prompts ---


def prompts(run: Run) -> View:
    """The prompts of the training steps that came most often, with their first and last mean
    rewards.
    """
    query = """
        with seen as (select prompt, step, count(*) as n, avg(reward) as reward, avg(length) as length
                      from samples where kind = 'rollout' group by prompt, step),
             ends as (select prompt, min(step) as first, max(step) as last, sum(n) as n, count(*) as steps
                      from seen group by prompt order by n desc, prompt limit ?)
        select ends.prompt as key, head, label, ends.n as n, steps, first, last, a.reward as before, b.reward as after,
               a.length as length_before, b.length as length_after
        from ends join prompts on prompts.key = ends.prompt
             join seen a on a.prompt = ends.prompt and a.step = first
             join seen b on b.prompt = ends.prompt and b.step = last
        order by ends.n desc, ends.prompt"""
    rows = run.index.rows(query, (MOST_PROMPTS,))
    total = run.index.rows(
        "select count(distinct prompt) as n from samples where kind = 'rollout'"
    )[0]["n"]
    return {"prompts": rows, "total": total, "pending": run.index.pending}


def prompt(run: Run, key: str) -> View | None:
    """All samples of a prompt over the run; None if there is no such prompt."""
    known = run.index.rows("select key, head, label from prompts where key = ?", (key,))
    if not known:
        return None
    query = (
        f"select kind, step, {_SAMPLE} from samples where prompt = ? order by kind desc, step, "
        "position limit ?"
    )
    rows = run.index.rows(query, (key, MOST_OF_PROMPT))
    _add_responses(run, rows[:MOST_TEXTS])
    total = run.index.rows("select count(*) as n from samples where prompt = ?", (key,))[0]["n"]
    return {**known[0], "samples": rows, "total": total, "pending": run.index.pending}


def _add_responses(run: Run, rows: list[Row]) -> None:
    """Add the beginning of each response as ``response``."""
    for row in rows:
        record = run.index.sample(
            str(row["kind"]), int(row["step"] or 0), int(row["position"] or 0)
        )
        text = record.get("response") if record is not None else None
        row["response"] = " ".join(text[:_HEAD].split()) if isinstance(text, str) else None


# --- evaluations ---


def _evaluation_names(run: Run) -> list[str]:
    rows = run.index.rows("select distinct kind from files where kind like 'eval-%' order by kind")
    return [str(row["kind"]).removeprefix("eval-") for row in rows]


def evaluations(run: Run) -> View:
    """The figures of every evaluation by data set."""
    sets: dict[str, list[View]] = {}
    for path in sorted((run.folder / "eval").glob("eval_*.json")):
        for name, part in _evaluation(path).items():
            figures = part.get("metrics") if isinstance(part, Mapping) else None
            sets.setdefault(name, []).append({"step": _number_in(path), "figures": figures or {}})
    files = run.index.rows(
        "select kind, step from files where kind like 'eval-%' order by kind, step"
    )
    texts: dict[str, list[object]] = {}
    for row in files:
        texts.setdefault(str(row["kind"]).removeprefix("eval-"), []).append(row["step"])
    return {"sets": sets, "texts": texts}


def _evaluation(path: Path) -> Mapping[str, object]:
    try:
        sets = parse_json(regular(path).read_text(encoding="utf-8"))["datasets"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return sets if isinstance(sets, dict) else {}


def _number_in(path: Path) -> int | None:
    digits = path.stem.rpartition("_")[2]
    return int(digits) if digits.isdigit() else None


def comparison(run: Run, name: str, before: int, after: int) -> View:
    """The prompts of two evaluations of a data set side by side, with the rewards of each."""
    kind = f"eval-{name}"
    sides: list[dict[object, list[Row]]] = []
    for number in (before, after):
        run.index.ensure(kind, number)
        query = f"select {_SAMPLE} from samples where kind = ? and step = ? order by position"
        by_prompt: dict[object, list[Row]] = {}
        for row in run.index.rows(query, (kind, number)):
            by_prompt.setdefault(row["prompt"], []).append(row)
        sides.append(by_prompt)
    query = "select distinct prompt from samples where kind = ? and step in (?, ?)"
    known = _prompts(run, query, (kind, before, after))
    rows = [
        {
            "prompt": key,
            **_texts(known.get(key)),
            "before": _side(sides[0].get(key, [])),
            "after": _side(sides[1].get(key, [])),
        }
        for key in dict.fromkeys([*sides[0], *sides[1]])
    ]
    return {"name": name, "steps": [before, after], "rows": rows}


def _side(rows: list[Row]) -> View:
    return {
        "reward": _mean(rows, "reward"),
        "samples": [[row["position"], row["reward"], row["length"], row["status"]] for row in rows],
    }


# --- ledger and engines ---


def ledger(run: Run) -> View:
    """What became of each group of prompts, by step; and whether the ledger is consistent."""
    if not run.files.ledger.is_file():
        return {
            "missing": "This run has no ledger yet: a row is written when a rollout is trained."
        }
    report = run.ledger.report()
    # By step and state for the chart, and the reasons of all steps together.
    by_step: dict[int, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    for row in list(run.ledger.rows.values()):
        rollout = row.get("rollout")
        if isinstance(rollout, int):
            by_step.setdefault(rollout, Counter())[str(row.get("state"))] += 1
        if row.get("reason"):
            reasons[f"{row.get('state')}: {row['reason']}"] += 1
    cut = report.cut or {}
    return {
        "counts": dict(report.counts),
        "steps": [[number, dict(counts)] for number, counts in sorted(by_step.items())],
        "reasons": dict(reasons.most_common(50)),
        "versions": dict(report.versions.most_common(50)),
        "problems": report.problems if report.cut is not None else report.problems[:-1],
        "snapshot": cut.get("cut"),
        "open": cut.get("open", []),
        "ahead": cut.get("ahead", []),
        "beyond": report.beyond,
        "rolled_back": report.rolled_back,
    }


_LOG_BYTES = 40_000
_LOG_LINES = 60
ENGINE_METRICS = (
    "perf/tokens_per_gpu_per_sec", "rollout/prefix_cache_hit_rate", "perf/longest_sample_tokens_per_sec",
    "perf/rollout_time", "rollout/staleness/mean", "rollout/http_retry_count", "rollout/engine_lost_count",
    "rollout/engine_restart_count", "rollout/router_restart_count", "perf/trainer_restart_count",
    "rollout/aborted_group_count", "perf/update_weights_time", "perf/audit_logprob_diff",
    "train/train_rollout_logprob_abs_diff",
)  # fmt: skip


def engines(run: Run) -> View:
    """The metrics that tell the load and the health of the engines, and the end of each log of the
    run.
    """
    # Only the end of each log: its beginning is the start of the run.
    names = set(run.series.names)
    logs = []
    for path in sorted(run.files.logs.glob("*.log")):
        text, size = end_of(path, _LOG_BYTES)
        logs.append({"name": path.name, "bytes": size, "lines": text.splitlines()[-_LOG_LINES:]})
    totals = {
        name: run.series.total(name)
        for name in ENGINE_METRICS
        if name in names and name.endswith("_count")
    }
    loads = run.loads.values(run.series.first_time or 0.0)
    shown = [name for name in ENGINE_METRICS if name in names]
    return {"metrics": shown, "totals": totals, "loads": loads, "logs": logs}
