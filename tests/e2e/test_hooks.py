"""Every hook of the contract in real runs: who calls it, with what, how often, and that its answer
counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

HOOKS = '''
import copy, json, os
from pathlib import Path
from slime.utils.types import Sample
from slime.rollout.sglang_rollout import generate, generate_rollout

LOG = Path(__file__).with_suffix(".log")

def seen(name, **what):
    with LOG.open("a") as file:
        file.write(json.dumps({"hook": name, "pid": os.getpid(), **what}) + "\\n")

class Source:
    """The contract's methods and nothing more."""
    def __init__(self, args):
        self.args, self.given = args, 0
    def __len__(self):
        return 8
    def get_samples(self, n):
        groups = []
        for _ in range(n):
            groups.append([Sample(prompt=f"Write {self.given % 8}.", label="a", group_index=self.given,
                                  index=self.given * 4 + i) for i in range(self.args.n_samples_per_prompt)])
            self.given += 1
        seen("get_samples", n=n, first=groups[0][0].group_index)
        return groups
    def add_samples(self, groups):
        seen("add_samples", n=len(groups))
    def save(self, rollout_id):
        Path(self.args.save).mkdir(parents=True, exist_ok=True)
        (Path(self.args.save) / f"my_source_{rollout_id}.txt").write_text(str(self.given))
        seen("save", rollout_id=rollout_id, given=self.given)
    def load(self, rollout_id=None):
        self.given = int((Path(self.args.load) / f"my_source_{rollout_id}.txt").read_text())
        seen("load", rollout_id=rollout_id, given=self.given)

def rollout(args, rollout_id, data_source, evaluation=False):
    seen("rollout", rollout_id=rollout_id, evaluation=evaluation, source=type(data_source).__name__)
    return generate_rollout(args, rollout_id, data_source, evaluation)

def evaluate(args, rollout_id, data_source, evaluation=False):
    seen("evaluate", rollout_id=rollout_id, evaluation=evaluation)
    return {"mine": {"rewards": [0.25, 0.75], "truncated": [False, True], "samples": []}}

async def make(args, sample, sampling_params, evaluation=False):
    seen("generate", evaluation=evaluation, index=sample.index, tokens=sampling_params["max_new_tokens"])
    sample = await generate(args, sample, sampling_params)
    if sample.group_index % 4 == 0 and sample.index % 4 == 0:
        twin = copy.deepcopy(sample)
        return [sample, twin]  # fan-out
    return sample

async def scores(args, samples, **kw):  # fan-out results are scored in one call
    many = isinstance(samples, list)
    seen("rm", many=len(samples) if many else 0)
    reward = lambda s: {"score": float(sum(map(ord, s.response)) % 5), "length": len(s.response)}
    return [reward(s) for s in samples] if many else reward(samples)

def sample_hook(args, sample, rollout_id, evaluation):
    seen("sample_hook", rollout_id=rollout_id, evaluation=evaluation)
    sample.metadata["hooked"] = rollout_id

def second_hook(args, sample):
    assert "hooked" in sample.metadata
    seen("second_hook")
    return sample

def keep(args, group):
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput
    leaves = [s for part in group for s in (part if isinstance(part, list) else [part])]
    seen("keep", size=len(leaves), hooked=leaves[0].metadata["hooked"])
    return DynamicFilterOutput(keep=leaves[0].group_index != 1, reason="number_one")

def mark(args, groups):
    seen("mark", groups=len(groups), nested=isinstance(groups[0], list))
    groups[1][0].remove_sample = True

def everything(args, groups, source):
    seen("everything", groups=len(groups), source=type(source).__name__)

def post(args, samples):
    seen("post", samples=len(samples))
    raw = [s.get_reward_value(args) for s in samples]
    return raw, [r - sum(raw) / len(raw) for r in raw]

def log(rollout_id, args, samples, metrics, rollout_time):
    seen("log", rollout_id=rollout_id, samples=len(samples), seconds=rollout_time > 0)
    metrics["mine/rollout"] = 1.5

def log_eval(rollout_id, args, data, metrics):
    seen("log_eval", rollout_id=rollout_id, sets=sorted(data))
    metrics["mine/eval"] = 2.5
    return True

def advantages(args, data):
    seen("advantages", has=sorted(k for k in ("kl", "rewards", "loss_masks") if k in data))
    data["advantages"] = [m.float() * r for m, r in zip(data["loss_masks"], data["rewards"])]
    data["returns"] = data["advantages"]

def late(args, rollout_id, data):
    seen("late", rollout_id=rollout_id, advantages=len(data["advantages"]), samples=len(data["tokens"]),
         removed=sum(int(m.sum()) == 0 for m in data["loss_masks"]))

def tis(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    seen("tis", tokens=int(pg_loss.numel()), same=[len(x) for x in train_log_probs] == list(response_lengths))
    return pg_loss, loss_masks, {"my_tis": pg_loss.detach() * 0 + 3.0}

def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    seen("reducer", samples=len(loss_masks), per_token=calculate_per_token_loss)
    return lambda x: x.sum()

def loss(args, batch, logits, sum_of_sample_mean):
    seen("loss", rows=logits.shape[0], targets=len(batch["targets"]))
    nll = -logits.log_softmax(-1).gather(1, batch["targets"][:, None])[:, 0]
    return sum_of_sample_mean(nll), {"my_nll": sum_of_sample_mean(nll).detach()}

def convert(args, samples):
    seen("convert", samples=len(samples))
    raw = [s.get_reward_value(args) for s in samples]
    ids = {key: i for i, key in enumerate(dict.fromkeys((s.rollout_id, s.index) for s in samples))}
    return {"tokens": [s.tokens for s in samples], "response_lengths": [s.response_length for s in samples],
            "rewards": raw, "raw_reward": raw, "loss_masks": [[1] * s.response_length for s in samples],
            "rollout_ids": [ids[s.rollout_id, s.index] for s in samples]}
'''


class Calls:
    """What the hooks wrote down."""

    def __init__(self, log: Path) -> None:
        self.rows = [json.loads(line) for line in log.read_text().splitlines()]

    def of(self, name: str, **what: Any) -> list[dict[str, Any]]:
        return [
            row
            for row in self.rows
            if row["hook"] == name and all(row[k] == v for k, v in what.items())
        ]


def wrong(expected: dict[str, bool]) -> list[str]:
    return [name for name, fine in expected.items() if not fine]


def test_every_hook_is_called_as_documented(runner, flags, prompts, tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HOOKS)

    def hook(flag: str, name: str) -> list[object]:
        return [flag, f"{file}:{name}"]

    common = [
        *flags, "--save", tmp_path / "saved", "--save-interval", 1, "--reward-key", "score", "--rollout-batch-size", 4,
        *hook("--data-source-path", "Source"), *hook("--custom-rm-path", "scores"),
        *hook("--rollout-function-path", "rollout"), *hook("--custom-generate-function-path", "make"),
    ]  # fmt: skip
    first = runner.inline(
        *common, "--num-rollout", 2, "--eval-interval", 2, "--eval-prompt-data", "letters", prompts,
        *hook("--eval-function-path", "evaluate"), *hook("--rollout-sample-hook-path", "sample_hook"),
        *hook("--rollout-sample-hook-path", "second_hook"), *hook("--dynamic-sampling-filter-path", "keep"),
        *hook("--rollout-sample-filter-path", "mark"), *hook("--rollout-all-samples-process-path", "everything"),
        *hook("--custom-reward-post-process-path", "post"), *hook("--custom-rollout-log-function-path", "log"),
        *hook("--custom-eval-rollout-log-function-path", "log_eval"), *hook("--rollout-data-postprocess-path", "late"),
        *hook("--custom-advantage-function-path", "advantages"),
        *hook("--custom-tis-function-path", "tis"), "--use-tis",
        *hook("--custom-pg-loss-reducer-function-path", "reducer"),
    )  # fmt: skip
    assert first.code == 0, first.output
    calls = Calls(file.with_suffix(".log"))
    steps, evals = first.metrics(), first.metrics("eval/step")
    assert wrong({
        "data source": calls.of("get_samples")[0]["n"] == 4 and [c["rollout_id"] for c in calls.of("save")] == [0, 1],
        "rollout": [c["rollout_id"] for c in calls.of("rollout", evaluation=False, source="Source")] == [0, 1],
        "evaluate": [c["rollout_id"] for c in calls.of("evaluate", evaluation=True)] == [0, 2],
        "generate": len(calls.of("generate", evaluation=False, tokens=8)) >= 4 * 9,
        "sample hook": len(calls.of("sample_hook", rollout_id=0)) > 16 and not calls.of("sample_hook", evaluation=True),
        "second sample hook": len(calls.of("second_hook")) == len(calls.of("sample_hook")),
        "single reward": len(calls.of("rm", many=0)) >= 30,
        "batched reward of a fan-out": len(calls.of("rm", many=2)) >= 2,
        "filter": any(c["size"] == 5 for c in calls.of("keep")) and {c["hooked"] for c in calls.of("keep")} == {0, 1},
        "filter's reason": steps[0]["rollout/dynamic_filter/drop_number_one"] == 1.0,
        "sample filter": calls.of("mark") != [] and all(c["groups"] == 4 and c["nested"] for c in calls.of("mark")),
        "all samples": calls.of("everything")[0]["groups"] >= 5 and calls.of("everything")[0]["source"] == "Source",
        "reward post process": [c["samples"] >= 16 for c in calls.of("post")] == [True, True],
        "log": [row.get("mine/rollout") for row in steps] == [1.5, 1.5],
        "log's arguments": calls.of("log", rollout_id=1, seconds=True) != [],
        "eval log": [row.get("mine/eval") for row in evals] == [2.5, 2.5],
        "eval log's arguments": calls.of("log_eval", sets=["mine"]) != [],
        "eval log replaces": "eval/mine" not in evals[0],
        "advantages": {tuple(c["has"]) for c in calls.of("advantages")} == {("kl", "loss_masks", "rewards")},
        "data post process": [c["rollout_id"] for c in calls.of("late")] == [0, 1],
        "removed samples are masked": all(c["removed"] >= 1 for c in calls.of("late")),
        "tis": calls.of("tis", same=True) != [] and steps[0]["train/my_tis"] > 0,
        "loss reducer": calls.of("reducer", per_token=False) != [],
    }) == []  # fmt: skip
    # The trainer's hooks run in its process, the others in the rollout manager's.
    assert {c["pid"] for c in calls.of("late")} == {c["pid"] for c in calls.of("tis")}
    saved = json.loads((first.folder / "eval" / "eval_000002.json").read_text())
    assert saved["datasets"]["mine"]["rewards"] == [[0.25], [0.75]]

    second = runner.inline(
        *common, "--num-rollout", 3, "--load", tmp_path / "saved", "--loss-type", "custom_loss",
        *hook("--custom-loss-function-path", "loss"), *hook("--custom-convert-samples-to-train-data-path", "convert"),
        name="second",
    )  # fmt: skip
    assert second.code == 0, second.output
    given = calls.of("save")[-1]["given"]
    calls = Calls(file.with_suffix(".log"))
    assert wrong({
        "load": [(c["rollout_id"], c["given"]) for c in calls.of("load")] == [(1, given)],
        "goes on": calls.of("get_samples", first=given) != [],
        "convert": len(calls.of("convert")) == 1 and calls.of("convert")[0]["samples"] >= 16,
        "loss": calls.of("loss") != [] and all(c["rows"] == c["targets"] for c in calls.of("loss")),
        "loss metric": second.metrics()[-1]["train/my_nll"] > 0,
    }) == []  # fmt: skip
    assert runner.wait_gone() == []
