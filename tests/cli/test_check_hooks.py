# ruff: noqa: E501  (a table of wrong hooks, one a line)
"""``slime check-hooks``: what it says of hooks that are right and of many that are wrong in their
own ways.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.cli.command import CommandError
from slime.cli.main import build_parser, main
from slime.config.hooks import load_function
from slime.plugins.tools.hooks import check_hooks
from slime.plugins.tools.hooks.bench import Bench
from slime.plugins.tools.hooks.guard import HOOK_THREAD, Watch

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def check(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """Write a file of hooks, check those that the flags name, return exit status and report."""
    from slime.utils.processing_utils import load_tokenizer

    # Cached. On a busy machine, the first hook that needs it would otherwise block its event loop
    # for too long.
    load_tokenizer(str(smollm2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    rows = [{"prompt": f"What is 3 times {n}?", "label": str(3 * n)} for n in range(4, 9)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def run(code: str, *flags: str) -> tuple[int, str]:
        (tmp_path / "hooks.py").write_text(code)
        from slime.config import hooks

        sys.modules.pop("hooks", None)
        hooks.module_of_file.cache_clear()
        lines: list[str] = []
        common = [
            "--hf-checkpoint",
            str(smollm2),
            "--prompt-data",
            "data.jsonl",
            "--train-backend",
            "fsdp",
        ]
        options, rest = build_parser().parse_known_args(["check-hooks", *common, *flags])
        status = check_hooks(rest, lines.append, options.check_timeout, options.check_tool_answer)
        return status, "\n".join(lines)

    return run


GOOD = """
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
async def rm(args, sample, **kw): return float(sample.label in sample.response)
async def group(args, samples, **kw): return [{"score": float(s.label in s.response)} for s in samples]
def keep(args, group): return DynamicFilterOutput(keep=len({s.reward for s in group}) > 1, reason="same")
def hook(args, sample, rollout_id): sample.metadata["seen"] = rollout_id
def buffer(args, rollout_id, buffer, num_samples):
    out, buffer[:] = buffer[:num_samples], buffer[num_samples:]
    return out
def mark(args, groups): groups[0][0].remove_sample = True
def everything(args, groups, source): assert len(groups) == 2 and len(source) == 2
def post(args, samples): r = [s.reward for s in samples]; return r, [x - 0.5 for x in r]
def log(rollout_id, args, samples, metrics, seconds): metrics["mine"] = 1.0
def evals(rollout_id, args, data, metrics): return True
def advantages(args, data):
    data["advantages"] = [m.float() * r for m, r in zip(data["loss_masks"], data["rewards"])]
    data["returns"] = data["advantages"]
def loss(args, batch, logits, mean):
    nll = -logits.log_softmax(-1).gather(1, batch["targets"][:, None])[:, 0]
    return mean(nll), {"nll": mean(nll).detach()}
def tis(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    return pg_loss * 0.5, loss_masks, {"mine": pg_loss}
def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss): return lambda x: x.sum()
def late(args, rollout_id, data): data["advantages"] = [a * 2 for a in data["advantages"]]
def convert(args, samples):
    return {"tokens": [s.tokens for s in samples], "response_lengths": [s.response_length for s in samples],
            "rewards": [s.reward for s in samples], "raw_reward": [s.reward for s in samples],
            "loss_masks": [s.loss_mask for s in samples], "rollout_ids": [s.index for s in samples]}
class Source:
    def __init__(self, args): self.args, self.n = args, 0
    def get_samples(self, count):
        from slime.utils.types import Sample
        return [[Sample(prompt="p", index=i) for i in range(self.args.n_samples_per_prompt)] for _ in range(count)]
    def add_samples(self, groups): pass
    def save(self, rollout_id): pass
    def load(self, rollout_id=None): pass
    def __len__(self): return 7
class Valued:
    __init__, get_samples, add_samples, __len__ = Source.__init__, Source.get_samples, Source.add_samples, Source.__len__
    def state_dict(self): return {"n": self.n}
    def load_state_dict(self, state): self.n = state["n"]
class Model:
    def compute_reward(self, prompts, responses): return [float(len(r)) for r in responses]
"""

RIGHT = {
    "rm": (["--custom-rm-path", "hooks.py:rm"], "8 rewards from 0 to 1"),
    "colon": (["--custom-rm-path", "hooks:rm"], "8 rewards from 0 to 1"),
    "group rm": (
        ["--custom-rm-path", "hooks.py:group", "--group-rm", "--reward-key", "score"],
        "8 rewards from 0 to 1",
    ),
    "model": (["--custom-rm-path", "hooks.py:Model"], "8 rewards from"),
    "filter": (
        ["--dynamic-sampling-filter-path", "hooks.py:keep"],
        "mixed: kept, all 0: dropped, all 1: dropped",
    ),
    "sample hook": (["--rollout-sample-hook-path", "hooks.py:hook"], "returned None"),
    "buffer": (["--buffer-filter-path", "hooks.py:buffer"], "chose 2 of 4 groups, 2 remain"),
    "mark": (["--rollout-sample-filter-path", "hooks.py:mark"], "removes 1 of 8 samples"),
    "all": (["--rollout-all-samples-process-path", "hooks.py:everything"], "called with 2 groups"),
    "post": (
        ["--custom-reward-post-process-path", "hooks.py:post"],
        "8 rewards, processed from -0.5 to 0.5",
    ),
    "log": (["--custom-rollout-log-function-path", "hooks.py:log"], "adds to the usual metrics"),
    "evals": (
        ["--custom-eval-rollout-log-function-path", "hooks.py:evals"],
        "replaces the usual metrics",
    ),
    "advantages": (["--custom-advantage-function-path", "hooks.py:advantages"], "of 8 samples"),
    "loss": (
        ["--loss-type", "custom_loss", "--custom-loss-function-path", "hooks.py:loss"],
        "metrics loss, nll",
    ),
    "tis": (["--use-tis", "--custom-tis-function-path", "hooks.py:tis"], "mine"),
    "reducer": (["--custom-pg-loss-reducer-function-path", "hooks.py:reducer"], "with gradient"),
    "late": (["--rollout-data-postprocess-path", "hooks.py:late"], "called with advantages"),
    "convert": (
        ["--custom-convert-samples-to-train-data-path", "hooks.py:convert"],
        "8 samples with",
    ),
    "source": (
        ["--data-source-path", "hooks.py:Source"],
        "groups of 4, has 7 prompts per epoch, saves and loads",
    ),
    "source with a state": (
        ["--data-source-path", "hooks.py:Valued"],
        "has 7 prompts per epoch, saves and loads",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_hooks_that_are_right(check: Callable[..., tuple[int, str]], name: str) -> None:
    flags, said = RIGHT[name]
    status, report = check(GOOD, *flags)
    assert status == 0 and report.startswith("ok    --") and said in report, report
    assert "1 of 1 hooks" in report


RM, FILTER, POST = (
    "--custom-rm-path",
    "--dynamic-sampling-filter-path",
    "--custom-reward-post-process-path",
)
WRONG = {
    "signature": (RM, "async def f(sample): return 1.0", r"slime calls it as fn(args, sample), but it is defined as f(sample): too many positional arguments", 1),
    "raises": (RM,
        "async def f(args, sample, **kw):\n"
        "    x = 1\n"
        "    return x / 0", "it raised ZeroDivisionError: division by zero", 3),
    "none": (RM,
        "async def f(args, sample, **kw):\n"
        "    if sample.label == 'x':\n"
        "        return 1.0", "it returned None: a return statement is missing on some path", 1),
    "text": (RM, "async def f(args, sample, **kw): return 'good'", "it returned 'good' (str), which is not a number", 1),
    "nan": (RM, "async def f(args, sample, **kw): return float('nan')", "a reward must be a finite number", 1),
    "dict without key": (RM, "async def f(args, sample, **kw): return {'acc': 1}", "a dict with the keys acc: select one with --reward-key", 1),
    "hangs": (RM,
        "import threading\n"
        "stop = threading.Event()\n"
        "def f(args, sample):\n"
        "    stop.wait(1000)", "it did not return within 2 s", 4),
    "list for one": (RM, "async def f(args, samples, **kw): return [1.0] * len(samples)", "without --group-rm it is called with one sample", 1),
    "import": (RM,
        "import no_such_module_of_mine\n"
        "async def f(args, sample): return 1.0", "importing it raised ModuleNotFoundError", 1),
    "syntax": (RM,
        "async def f(args, sample)\n"
        "    return 1.0", "importing it raised SyntaxError", 1),
    "absent": (RM, "async def g(args, sample): return 1.0", "has no 'f'; it defines g", None),
    "class": (RM,
        "class f:\n"
        "    def __init__(self, model_path): pass\n"
        "    def compute_reward(self, p, r): return [1.0]", "needs model_path: set --rm-model-path", 1),
    "number": (RM, "f = 3", "it is a int, not a function", None),
    "filter answer": (FILTER,
        "def f(args, group):\n"
        "    return 'yes'", "returned 'yes', not a bool or DynamicFilterOutput", 1),
    "async filter": (FILTER,
        "async def f(args, group):\n"
        "    return True", "it is an async def, but slime calls this hook without await", 1),
    "async object": ("--rollout-sample-filter-path",
        "class F:\n"
        "    async def __call__(self, args, groups): pass\n"
        "f = F()", "it is an async def, but slime calls this hook without await", None),
    "one list": (POST,
        "def f(args, samples):\n"
        "    return [s.reward for s in samples]", "but must be (raw_rewards, rewards)", 1),
    "short": (POST,
        "def f(args, samples):\n"
        "    return [0.0], [0.0]", "it returned 1 raw_rewards for 8 samples", 1),
    "hook answer": ("--rollout-sample-hook-path",
        "def f(args, sample):\n"
        "    return 3", "its result has the type int, but must be None or a Sample", 1),
    "pickle": ("--rollout-sample-hook-path",
        "import threading\n"
        "def f(args, sample):\n"
        "    sample.lock = threading.Lock()", "sample.lock cannot be pickled", None),
    "keys": ("--custom-convert-samples-to-train-data-path",
        "def f(args, samples):\n"
        "    return {'tokens': [s.tokens for s in samples]}", "response_lengths, rewards missing; it returned tokens", 1),
    "advantages": ("--custom-advantage-function-path",
        "def f(args, data):\n"
        "    data['advantages'] = [a[:1] for a in data['log_probs']]\n"
        "    data['returns'] = data['advantages']", "advantages", 1),
    "source": ("--data-source-path",
        "class f:\n"
        "    def __init__(self, args): pass\n"
        "    def get_samples(self, n): return []", "the class has no add_samples, __len__", 1),
    "source without a state": ("--data-source-path",
        "class f:\n"
        "    def __init__(self, args): pass\n"
        "    def __len__(self): return 1\n"
        "    def get_samples(self, n): return []\n"
        "    def add_samples(self, s): pass", "neither state_dict and load_state_dict nor save and load", 1),
    "detached": ("--custom-loss-function-path",
        "def f(args, batch, logits, mean):\n"
        "    return mean(logits.detach().sum(-1)), {}", "the loss has no gradient", 1),
    "signature only": ("--custom-megatron-init-path",
        "def f():\n"
        "    pass", "slime calls it as fn(args), but it is defined as f()", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_hooks_that_are_wrong(check: Callable[..., tuple[int, str]], name: str) -> None:
    option, code, said, line = WRONG[name]
    status, report = check(
        code, option, "hooks.py:f", "--check-timeout", "2" if name == "hangs" else "30"
    )
    first, *rest = report.splitlines()
    assert status == 1 and first == f"FAIL  {option} hooks.py:f", report
    assert said in "\n".join(rest), report
    assert line is None or any(f"hooks.py:{line}" in text for text in rest), report
    assert "0 of 1 hooks" in report
    if name == "hangs":  # its thread would keep pytest from ending
        load_function("hooks.py:stop").set()
        for thread in threading.enumerate():
            if thread.name == HOOK_THREAD:
                thread.join(60)


@pytest.mark.slow
def test_surprises_are_notes(check: Callable[..., tuple[int, str]]) -> None:
    status, report = check("async def f(args, sample, **kw): return 0.0", RM, "hooks.py:f")
    assert status == 0 and "all 8 answers" in report
    status, report = check("def f(args, group): return False", FILTER, "hooks.py:f")
    assert status == 0 and "all tested" in report
    code = (
        "import time\n"
        "async def f(args, sample, **kw):\n"
        "    time.sleep(1.5 * (sample.index == 0))\n"
        "    return float(sample.index)"
    )
    status, report = check(code, RM, "hooks.py:f")
    assert status == 0 and "event loop" in report and "hooks.py:3 in f" in report


def test_several_hooks_and_those_of_evaluation_sets(
    check: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    entry = {"name": "mine", "path": "data.jsonl", "custom_rm_path": "hooks.py:broken"}
    (tmp_path / "eval.yaml").write_text(json.dumps({"eval": {"datasets": [entry]}}))
    code = GOOD + "\nasync def broken(args, sample, **kw): return sample.no_such_thing"
    flags = [
        RM,
        "hooks.py:rm",
        FILTER,
        "hooks.py:keep",
        "--eval-config",
        "eval.yaml",
        "--rollout-batch-size",
        "0",
    ]
    status, report = check(code, *flags)
    assert status == 1 and "2 of 3 hooks" in report
    assert "custom_rm_path hooks.py:broken" in report and "AttributeError" in report
    assert "\n      --rollout-batch-size 0" in report


def test_a_filter_sees_all_entries_of_the_reward(check: Callable[..., tuple[int, str]]) -> None:
    code = (
        "async def rm(args, sample, **kw): return {'score': float(sample.label in "
        "sample.response), 'words': 3}"
    )
    code += "\ndef keep(args, group): return all(s.reward['words'] < 9 for s in group)"
    status, report = check(
        code, RM, "hooks.py:rm", "--reward-key", "score", FILTER, "hooks.py:keep"
    )
    assert status == 0 and "mixed: kept" in report, report


@pytest.mark.parametrize(
    ("name", "flags", "status", "said"),
    [
        ("entry", ("--eval-reward-key", "score"), 0, "8 rewards from 0 to 1"),
        (
            "entry",
            ("--eval-reward-key", "acc"),
            1,
            "its dict has no 'acc' (--eval-reward-key), only score",
        ),
        ("entry", (), 1, "a dict with the keys score: select one with --reward-key"),
        ("rm", ("--group-rm",), 0, "8 rewards from 0 to 1"),
        ("group", ("--group-rm", "--reward-key", "score"), 0, "8 rewards from 0 to 1"),
    ],
)
def test_the_reward_of_an_evaluation_set_is_called_and_read_as_in_an_evaluation(
    check: Callable[..., tuple[int, str]],
    tmp_path: Path,
    name: str,
    flags: tuple[str, ...],
    status: int,
    said: str,
) -> None:
    mine = {"name": "mine", "path": "data.jsonl", "custom_rm_path": f"hooks.py:{name}"}
    (tmp_path / "eval.yaml").write_text(json.dumps({"eval": {"datasets": [mine]}}))
    code = GOOD + (
        "\n"
        "async def entry(args, sample, **kw): return {'score': float(sample.label in "
        "sample.response)}"
    )
    got, report = check(code, "--eval-config", "eval.yaml", "--rm-type", "math", *flags)
    assert got == status and said in report, report


def test_without_hooks_or_tokenizer_it_says_so(check: Callable[..., tuple[int, str]]) -> None:
    with pytest.raises(CommandError, match="nothing to check"):
        check(GOOD)
    with pytest.raises(CommandError, match="tokenizer"):
        check_hooks(["--hf-checkpoint", "no-such-folder", RM, "hooks.py:rm"])


# --- generate functions: with the real embedded engine
# ---------------------------------------------

GENERATE = """
from slime.utils.http_utils import post
from slime.utils.processing_utils import load_tokenizer
async def ask(args, sample, params):
    prompt = load_tokenizer(args.hf_checkpoint)(sample.prompt)["input_ids"]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    out = await post(url, {"input_ids": prompt, "sampling_params": params, "return_logprob": True})
    scored = out["meta_info"]["output_token_logprobs"]
    sample.tokens, sample.response = prompt + [t[1] for t in scored], out["text"]
    sample.response_length, sample.rollout_log_probs = len(scored), [t[0] for t in scored]
    return sample
async def good(args, sample, sampling_params):
    return await ask(args, sample, sampling_params)
async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        sample.response = "text alone"
    return samples
async def mask(args, sample, sampling_params):
    await ask(args, sample, sampling_params)
    sample.loss_mask = [1, 1]
    return sample
async def tool_turn(args, sample, sampling_params):
    from slime.rollout.sglang_rollout import generate
    sample = await generate(args, sample, {**sampling_params, "max_new_tokens": 4})
    sample.append_response_tokens(args, tokens=[1, 2, 3], trainable=False)
    return sample
async def replaced(args, sample, sampling_params):
    sample = await tool_turn(args, sample, sampling_params)
    sample.loss_mask = None
    return sample
async def nothing(args, sample, sampling_params):
    await ask(args, sample, sampling_params)
async def response_only(args, sample, sampling_params):
    await ask(args, sample, sampling_params)
    sample.tokens = sample.tokens[-sample.response_length:]
    return sample
async def blocks(args, sample, sampling_params):
    import time
    time.sleep(1.5 * (sample.index == 0))
    return await ask(args, sample, sampling_params)
async def signature(args, sample): return sample
async def floats(args, sample, sampling_params):
    await ask(args, sample, sampling_params)
    sample.tokens = [float(t) for t in sample.tokens]
    return sample
async def wrong_address(args, sample, sampling_params):
    return await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generates", {}, max_retries=0)
async def turns(args, sample, sampling_params, mask=True, look=True, scores=True, status=True):
    # a conversation by hand, without Sample.append_response_tokens
    tokenizer = load_tokenizer(args.hf_checkpoint)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = tokenizer(sample.prompt)["input_ids"]
    response, trained, log_probs = [], [], []
    for turn in range(3):
        out = await post(url, {"input_ids": prompt + response, "sampling_params": sampling_params, "return_logprob": True})
        scored = out["meta_info"]["output_token_logprobs"]
        response += [t[1] for t in scored]
        trained += [1] * len(scored)
        log_probs += [t[0] for t in scored]
        reason = out["meta_info"]["finish_reason"]["type"]
        if look and reason == "abort":
            break
        if "<search>" in out["text"] or (not look and reason == "abort"):
            result = tokenizer("<result>4</result>")["input_ids"]
            response += result
            trained += [int(not mask)] * len(result)
            log_probs += [0.0 if mask else -1.0] * len(result)
        else:
            break
    sample.tokens, sample.response_length, sample.response = prompt + response, len(response), ""
    sample.loss_mask, sample.rollout_log_probs = trained, log_probs if scores else log_probs[::-1]
    if status:
        sample.status = {"abort": sample.Status.ABORTED, "length": sample.Status.TRUNCATED}.get(reason, sample.Status.COMPLETED)
    return sample
async def turns_in_text(args, sample, sampling_params, mask=True, own=False):
    # the form of search-r1: each request has the whole text so far, and the tokens are those of the engine or made anew
    tokenizer = load_tokenizer(args.hf_checkpoint)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    response, ids, trained = "", [], []
    for turn in range(3):
        payload = {"text": sample.prompt + response, "sampling_params": sampling_params, "return_logprob": not own}
        out = await post(url, payload)
        reason = out["meta_info"]["finish_reason"]["type"]
        said = out["text"].split("</search>")[0] + "</search>" * ("</search>" in out["text"])
        new = tokenizer(said)["input_ids"] if own else [t[1] for t in out["meta_info"]["output_token_logprobs"]]
        response, ids, trained = response + said, ids + new, trained + [1] * len(new)
        if "<search>" not in out["text"]:
            break
        result = " \\n\\n<result>4</result>\\n\\n"
        new = tokenizer(result)["input_ids"]
        response, ids, trained = response + result, ids + new, trained + [int(not mask)] * len(new)
    sample.tokens, sample.response, sample.response_length = tokenizer(sample.prompt)["input_ids"] + ids, response, len(ids)
    sample.loss_mask = trained
    sample.status = {"abort": sample.Status.ABORTED, "length": sample.Status.TRUNCATED}.get(reason, sample.Status.COMPLETED)
    return sample
async def turns_in_own_text(args, sample, sampling_params):
    return await turns_in_text(args, sample, sampling_params, own=True)
async def trains_results_in_text(args, sample, sampling_params):
    return await turns_in_text(args, sample, sampling_params, mask=False)
async def trains_results_in_own_text(args, sample, sampling_params):
    return await turns_in_text(args, sample, sampling_params, mask=False, own=True)
async def trains_results(args, sample, sampling_params):
    return await turns(args, sample, sampling_params, mask=False)
async def turns_scores(args, sample, sampling_params):
    return await turns(args, sample, sampling_params, scores=False)
async def no_status(args, sample, sampling_params):
    return await turns(args, sample, sampling_params, status=False)
async def ignores_abort(args, sample, sampling_params):
    from slime.rollout.sglang_rollout import GenerateState
    while True:
        await turns(args, sample, sampling_params, look=False)
        if sample.status != sample.Status.ABORTED:
            return sample
async def raises(args, sample, sampling_params):
    out = await turns(args, sample, sampling_params)
    assert out.status != sample.Status.ABORTED, "no abort was foreseen"
    return out
async def doubles(args, sample, sampling_params):
    aborted = sample.status == sample.Status.ABORTED or sample.response_length
    before = list(sample.rollout_log_probs or [])
    sample = await turns(args, sample, sampling_params)
    if aborted:
        sample.rollout_log_probs = before + sample.rollout_log_probs
    return sample
async def made_up(args, sample, sampling_params):
    from slime.utils.http_utils import HttpError
    try:
        return await turns(args, sample, sampling_params)
    except HttpError:
        sample.tokens, sample.response_length, sample.response = [1, 2, 3], 1, "x"
        return sample
async def looks_first(args, sample, sampling_params):
    if args.rollout_max_context_len == 1:
        sample.tokens, sample.status = load_tokenizer(args.hf_checkpoint)(sample.prompt)["input_ids"], sample.Status.TRUNCATED
        return sample
    return await turns(args, sample, sampling_params)
async def careless(args, sample, sampling_params):
    from aiohttp import ClientSession
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    async with ClientSession() as session:
        body = {"text": sample.prompt, "sampling_params": sampling_params}
        sample.response = (await (await session.post(url, json=body)).json())["text"]
    return sample
async def mask_lost(args, sample, sampling_params):
    from slime.rollout.sglang_rollout import generate
    sample = await generate(args, sample, dict(sampling_params))
    if "<search>" in sample.response:
        sample.append_response_tokens(args, tokens=[1, 2, 3], trainable=False)
        sample.loss_mask = None
    return sample
async def asks_search(args, sample, sampling_params):
    return await turns(args, sample, sampling_params)
async def own_limit(args, sample, sampling_params):
    return await turns(args, sample, {"max_new_tokens": 8})
async def own_limit_no_status(args, sample, sampling_params):
    return await turns(args, sample, {"max_new_tokens": 8}, status=False)
async def own_end(args, sample, sampling_params):
    return await turns(args, sample, {"stop": ["answer"]}, status=False)
async def siblings(args, samples, evaluation=False):
    import asyncio
    return list(await asyncio.gather(*(looks_first(args, sample, {"max_new_tokens": args.rollout_max_response_len}) for sample in samples)))
async def fans_out(args, sample, sampling_params, scores=True):
    import copy
    return [await turns(args, copy.deepcopy(sample), sampling_params, scores=scores) for _ in range(2)]
async def fans_out_scores(args, sample, sampling_params):
    return await fans_out(args, sample, sampling_params, scores=False)
def generate_rollout(args, rollout_id, data_source, evaluation=False):
    from slime.rollout.sglang_rollout import generate_rollout as default
    return default(args, rollout_id, data_source, evaluation)
def flat(args, rollout_id, data_source, evaluation=False):
    return data_source.get_samples(1)[0]
"""


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[tuple[str, int]]:
    from slime.config.parser import check_args

    args, _ = check_args(["--hf-checkpoint", str(smollm2), "--train-backend", "fsdp"])
    with Bench(args, 30.0) as bench:
        bench.start_engine()
        yield bench.args.sglang_router_ip, bench.args.sglang_router_port


@pytest.mark.real
@pytest.mark.parametrize(
    ("option", "name", "status", "said"),
    [
        ("--custom-generate-function-path", "good", 0, ": 4 samples, "),
        (
            "--custom-generate-function-path",
            "custom_generate",
            0,
            "note  without rollout_log_probs, the trainer needs another forward pass",
        ),
        (
            "--custom-generate-function-path",
            "mask",
            1,
            "has 2 entries in loss_mask, but response_length is",
        ),
        ("--custom-generate-function-path", "tool_turn", 0, ": 4 samples, 7 to 7 tokens"),
        (
            "--custom-generate-function-path",
            "replaced",
            1,
            "3 tokens that no engine sampled would be trained",
        ),
        (
            "--custom-generate-function-path",
            "nothing",
            1,
            "returned NoneType, not a Sample or a list of them",
        ),
        (
            "--custom-generate-function-path",
            "response_only",
            1,
            "it must be prompt tokens + response tokens",
        ),
        ("--custom-generate-function-path", "blocks", 1, "it blocks the event loop for"),
        (
            "--custom-generate-function-path",
            "signature",
            1,
            "slime calls it as fn(args, sample, sampling_params)",
        ),
        ("--custom-generate-function-path", "floats", 1, "which is not a token id"),
        ("--custom-generate-function-path", "wrong_address", 1, "answered 404"),
        ("--rollout-function-path", "generate_rollout", 0, ": 2 groups in"),
        ("--rollout-function-path", "flat", 1, "return a list of samples for each prompt"),
    ],
)
def test_generation(
    check, engine, monkeypatch, option: str, name: str, status: int, said: str
) -> None:
    def shared(bench: Bench) -> None:
        bench.args.sglang_router_ip, bench.args.sglang_router_port = engine
        bench.args.rollout_backend = "embedded"

    monkeypatch.setattr(Bench, "start_engine", shared)
    flags = ["--rm-type", "random"] if "rollout" in option else []
    got, report = check(GENERATE, option, f"hooks.py:{name}", *flags)
    assert got == status and said in report, report


PARTIAL = ("--partial-rollout",)


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "flags", "status", "said"),
    [
        (
            "turns",
            PARTIAL,
            0,
            "; a tool turn of 2 answers, an abort, a truncated answer, a prompt that is too long",
        ),
        ("looks_first", (), 0, "a prompt that is too long"),
        (
            "made_up",
            (),
            1,
            "for a prompt that the engine refused as too long, it returns 1 tokens to train on",
        ),
        ("careless", (), 1, "it raised KeyError: 'text'"),
        ("mask_lost", (), 1, "3 tokens that no engine sampled would be trained"),
        (
            "no_status",
            (),
            0,
            "whose answer was cut off at the length limit has the status completed",
        ),
        ("good", (), 0, "; no tool turn with the tested forms of calls, an abort"),
        ("trains_results", (), 1, "tokens that no engine sampled would be trained"),
        ("turns_in_text", (), 0, "; a tool turn of 2 answers, an abort"),
        ("turns_in_own_text", (), 0, "; a tool turn of 2 answers, an abort"),
        ("trains_results_in_text", (), 1, "tokens that no engine sampled would be trained"),
        ("trains_results_in_own_text", (), 1, "tokens that no engine sampled would be trained"),
        ("turns_scores", (), 1, "differ from those of the engine"),
        (
            "own_limit_no_status",
            (),
            0,
            "whose answer was cut off at the length limit has the status completed",
        ),
        ("siblings", (), 0, ": 4 samples, "),
        ("fans_out", (), 0, ": 8 samples from 4 calls"),
        ("fans_out_scores", (), 1, "differ from those of the engine"),
        (
            "no_status",
            PARTIAL,
            1,
            "a sample whose last answer was aborted has the status completed",
        ),
        ("no_status", (), 0, "These flags discard aborted samples"),
        ("ignores_abort", (), 1, "it keeps sending requests after an abort"),
        ("raises", (), 1, "no abort was foreseen"),
        ("doubles", PARTIAL, 1, "entries in rollout_log_probs, but response_length is"),
        ("turns", ("--check-tool-answer", "I <search>for</search>"), 0, "a tool turn of 2 answers"),
        (
            "turns",
            ("--check-tool-answer", "<tool>x</tool>"),
            1,
            "(--check-tool-answer), it sent no other request",
        ),
    ],
)
def test_tool_turns_and_aborts_are_forced(
    check, engine, monkeypatch, name: str, flags: tuple[str, ...], status: int, said: str
) -> None:
    def shared(bench: Bench) -> None:
        bench.args.sglang_router_ip, bench.args.sglang_router_port = engine
        bench.args.rollout_backend = "embedded"

    monkeypatch.setattr(Bench, "start_engine", shared)
    got, report = check(GENERATE, "--custom-generate-function-path", f"hooks.py:{name}", *flags)
    assert got == status and said in report, report


@pytest.mark.real
@pytest.mark.parametrize(
    ("option", "flags", "said"),
    [
        (
            "--rollout-function-path",
            (
                "--dynamic-sampling-filter-path",
                "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
            ),
            ": 2 groups in",
        ),
        (
            "--eval-function-path",
            ("--eval-prompt-data", "large", "large.jsonl"),
            ": data sets large in",
        ),
        ("--eval-function-path", ("--eval-config", "eval.yaml"), ": data sets mine in"),
    ],
)
def test_a_rollout_function_is_tested_with_few_prompts_and_without_a_filter(
    check, engine, monkeypatch, tmp_path: Path, option: str, flags: tuple[str, ...], said: str
) -> None:
    """The tiny model solves nothing, and an evaluation set may have thousands of rows."""

    def shared(bench: Bench) -> None:
        bench.args.sglang_router_ip, bench.args.sglang_router_port = engine
        bench.args.rollout_backend = "embedded"

    monkeypatch.setattr(Bench, "start_engine", shared)
    (tmp_path / "large.jsonl").write_text(
        '{"prompt": "What is 3 times 4?", "label": "12"}\n' * 2000
    )
    mine = {
        "name": "mine",
        "path": "large.jsonl",
        "rm_type": "math",
        "max_response_len": 400,
        "temperature": 0.5,
    }
    (tmp_path / "eval.yaml").write_text(json.dumps({"eval": {"datasets": [mine]}}))
    flags = (
        option,
        "hooks.py:generate_rollout",
        "--rm-type",
        "math",
        "--check-timeout",
        "20",
        *flags,
    )
    status, report = check(GENERATE, *flags)
    assert status == 0 and said in report, report


@pytest.mark.real
@pytest.mark.parametrize("name", ["own_limit", "own_end"])
def test_an_answer_within_the_limits_of_the_function_is_not_called_cut_off(
    check, engine, monkeypatch, name: str
) -> None:
    def shared(bench: Bench) -> None:
        bench.args.sglang_router_ip, bench.args.sglang_router_port = engine
        bench.args.rollout_backend = "embedded"

    monkeypatch.setattr(Bench, "start_engine", shared)
    status, report = check(GENERATE, "--custom-generate-function-path", f"hooks.py:{name}")
    assert status == 0 and "cut off at the length limit" not in report, report


@pytest.mark.real
def test_the_command_itself(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text(
        GENERATE + "\nasync def rm(args, sample, **kw): return 1.0\n"
    )
    flags = [
        "--hf-checkpoint",
        str(smollm2),
        "--custom-rm-path",
        "hooks:rm",
        "--apply-chat-template",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "slime.cli.main", "check-hooks", *flags], cwd=tmp_path, capture_output=True, text=True,
        timeout=180, check=False, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok    --custom-rm-path hooks:rm" in done.stdout and "artificial prompt" in done.stdout


@pytest.mark.real
def test_the_command_ends_though_a_function_never_returns(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("import time\ndef rm(args, sample):\n    time.sleep(1000)\n")
    flags = [
        "--hf-checkpoint",
        str(smollm2),
        "--custom-rm-path",
        "hooks.py:rm",
        "--check-timeout=2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "slime.cli.main", "check-hooks", *flags], cwd=tmp_path, capture_output=True, text=True,
        timeout=180, check=False, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert done.returncode == 1 and "within 2 s" in done.stdout, done.stdout + done.stderr


def test_its_help_and_wrong_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["check-hooks", "--help"])
    assert stopped.value.code == 0 and "takes the flags of train.py" not in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["summary", "x", "--no-such-flag"])
    assert stopped.value.code == 2
    for words in (
        ["--check-timeout"],
        ["--check-timeout=nan"],
        ["--check-timeout", "0"],
        ["--check-timeout", "soon"],
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["check-hooks", *words])
        assert stopped.value.code == 2 and "--check-timeout" in capsys.readouterr().err


def test_a_busy_machine_is_no_blocked_event_loop() -> None:
    """Where both threads wait for a processor, a look comes late; where the function blocks, many
    looks find one beat.
    """
    watch = Watch(__file__)
    for _ in range(20):
        watch.beat = time.monotonic() - 5.0
        watch.look()
    assert watch.longest == 0.0
    for _ in range(20):
        watch.look()
    assert watch.longest >= 5.0
