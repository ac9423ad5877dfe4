"""Check the samples of a generate function against the tokens that the engine sampled, also after a
forced tool turn, after an abort, with a prompt that is too long and with an answer that is cut
off."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime.data.sample import Sample, flatten
from slime.rollout.custom_generate import call_list, call_single, takes_list
from slime.rollout.state import GenerateState, request_params
from slime.types import SamplingParams

from .bench import LAST, Bench, Request, ScriptedEngine
from .guard import Complaint, Hook, check_picklable, guarded, wrong

# common forms of tool calls besides <tool_call>, all of them harmless if they are executed
TOOL_TURNS = (
    "<search>2 + 2</search>",
    "<code>print(2 + 2)</code>",
    "```python\nprint(2 + 2)\n```",
    "<python>print(2 + 2)</python>",
)
_ROOM = 512  # maximum tokens of a response, so that no turn is truncated by accident
_CUT = 3  # maximum tokens of a response that is cut off
_REPEATED = 100  # so often, the answer is cut off in a function with a limit of its own, too
_CLOSE = 1e-4


async def on_group(fn: Hook, state: GenerateState, samples: Sequence[Sample]) -> list[Any]:
    """Call a generate function on the samples of a group, as a rollout does."""
    if takes_list(fn):
        return await call_list(fn, state, list(samples), False)
    params: SamplingParams = {**request_params(state.args), "sampling_seed": 1}
    calls = (call_single(fn, state, one, copy.copy(params), False) for one in samples)
    return await asyncio.gather(*calls)


class _Try:
    """Calls the function on the first prompts with a scripted engine."""

    def __init__(self, bench: Bench, fn: Hook) -> None:
        self.bench = bench
        self.fn = fn
        self.url = f"http://{bench.args.sglang_router_ip}:{bench.args.sglang_router_port}"
        group = flatten(bench.prompts()[0])
        self.samples = group if takes_list(fn) else group[:1]

    def run(
        self,
        answers: list[str],
        abort_at: int | None = None,
        go_on: bool = False,
        most: int = _ROOM,
        refuses: bool = False,
    ) -> tuple[list[list[Sample]], list[list[Sample]], list[Request]]:
        """Return the results of each sample, the results when it was continued after the abort, and
        the requests.

        Args:
            answers: The model's answer for each turn; all samples get the same.
            abort_at: Index of the turn that is aborted; None for no abort.
            go_on: Whether to call the function again with the aborted samples.
            most: Maximum number of tokens of a response.
            refuses: Whether the engine refuses all requests, as if the prompts were longer than its
                context.
        """
        # Every sample asks in each turn, so that each line of the script is there for all of them.
        args = self.bench.args.with_values(rollout_max_response_len=most)
        if refuses:
            args = args.with_values(rollout_max_context_len=1)
        count = len(self.samples)
        script = [text for text in answers for _ in range(count)]
        at = None if abort_at is None else abort_at * count

        async def work() -> tuple[list[Any], list[Any], list[Request]]:
            state: GenerateState
            stop = lambda: setattr(state, "aborted", True)  # noqa: E731
            async with ScriptedEngine(
                self.url, self.bench.tokenizer, script, at, stop, refuses
            ) as engine:
                here = args.with_values(
                    sglang_router_ip="127.0.0.1", sglang_router_port=engine.port
                )
                state = GenerateState(here)
                copies = copy.deepcopy(self.samples)
                first = await self._unless_runaway(on_group(self.fn, state, copies), engine)
                again: list[Any] = []
                if go_on and all(isinstance(part, Sample) for part in first):
                    before = copy.deepcopy(first)
                    engine.abort_at = None
                    state.aborted = False
                    again = await self._unless_runaway(on_group(self.fn, state, first), engine)
                    first = before
                return first, again, engine.requests

        first, again, requests = guarded(self.fn, work, self.bench.limit, loop=True).result
        return [flatten([part]) for part in first], [flatten([part]) for part in again], requests

    async def _unless_runaway(
        self, work: Coroutine[object, object, list[object]], engine: ScriptedEngine
    ) -> list[Any]:
        # A function that ignores aborts would run until its deadline, and say nothing.
        task = asyncio.ensure_future(work)
        runaway = asyncio.ensure_future(engine.runaway.wait())
        try:
            await asyncio.wait({task, runaway}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise wrong(
                    self.fn,
                    "it keeps sending requests after an abort: if the finish_reason of an answer "
                    "is abort, set the status ABORTED and return the sample "
                    "(GenerateState(args).aborted tells that the rollout is over)",
                )
            return list(task.result())
        finally:
            task.cancel()
            runaway.cancel()
            await asyncio.gather(task, runaway, return_exceptions=True)


def check_turns(bench: Bench, fn: Hook) -> str:
    """Test the function with a forced tool turn, with an abort, with a continuation after the
    abort, with an answer that is cut off, and with a prompt that is too long.

    Returns:
        A short description of the result.

    Raises:
        Complaint: The samples do not agree with the sampled tokens.
    """
    tried = _Try(bench, fn)
    # One of the common forms of calls makes most functions run their tool.
    turn = None
    said = "no tool turn with the tested forms of calls"
    for form in [bench.tool_answer] if bench.tool_answer else _tool_turns(tried.samples):
        results, _, requests = tried.run([form])
        check_sampled(bench, fn, flatten(results), requests)
        if not requests:
            return "it does not use /generate, so tool turns and aborts were not tested"
        if len(requests) > len(tried.samples):
            turn = form
            said = f"a tool turn of {len(requests) // len(tried.samples)} answers"
            break
    if bench.tool_answer and turn is None:
        raise wrong(
            fn,
            f"after the answer {bench.tool_answer!r} (--check-tool-answer), it sent no other "
            "request",
        )
    _check_abort(bench, fn, tried, turn)
    _check_cut(bench, fn, tried)
    _check_too_long(bench, fn, tried)
    return f"{said}, an abort, a truncated answer, a prompt that is too long"


def _check_cut(bench: Bench, fn: Hook, tried: _Try) -> None:
    """Test an answer that ends at the length limit."""
    results, _, requests = tried.run([LAST * _REPEATED], most=_CUT)
    leaves = flatten(results)
    check_sampled(bench, fn, leaves, requests)
    if any(request.cut for request in requests) and all(
        sample.status is not Sample.Status.TRUNCATED for sample in leaves
    ):
        bench.notes.append(
            f"a sample whose answer was cut off at the length limit has the status {leaves[-1].status.value}: if "
            'meta_info["finish_reason"]["type"] is "length", set Sample.Status.TRUNCATED (append_response_tokens with '
            "meta_info does this); otherwise rollout/truncated_ratio does not count it"
        )


def _check_too_long(bench: Bench, fn: Hook, tried: _Try) -> None:
    """Test a prompt that the engine refuses because it leaves no room for a response."""
    results, _, _ = tried.run([], refuses=True)
    for sample in flatten(results):
        if sample.effective_response_length:
            raise wrong(
                fn,
                "for a prompt that the engine refused as too long, it returns "
                f"{sample.effective_response_length} tokens to train on: return the sample "
                "without a response and with Sample.Status.TRUNCATED",
            )


def _tool_turns(samples: Sequence[Sample]) -> list[str]:
    """Return the forms of calls, with the name of the data's first tool."""
    tools = next(
        (one.metadata.get("tools") for one in samples if isinstance(one.metadata, dict)), None
    )
    tool = tools[0] if isinstance(tools, list) and tools and isinstance(tools[0], dict) else {}
    function = tool.get("function")
    name = str((function if isinstance(function, dict) else tool).get("name") or "python")
    call = json.dumps({"name": name, "arguments": {"code": "print(2 + 2)"}})
    return [f"<tool_call>\n{call}\n</tool_call>", *TOOL_TURNS]


def _check_abort(bench: Bench, fn: Hook, tried: _Try, turn: str | None) -> None:
    """Test an abort of the last answer, which is the first one or the one after a tool turn."""
    # The last answer is aborted, since a continuation needs most care there.
    answers, at = ([], 0) if turn is None else ([turn], 1)
    results, again, requests = tried.run(answers, at, go_on=bench.resumes)
    if not any(request.aborted for request in requests):
        return  # the function sent fewer requests than before, so nothing was aborted
    for samples in results:
        for sample in samples:
            check_picklable(sample)
        check_sampled(bench, fn, samples, requests)
        if all(sample.status is not Sample.Status.ABORTED for sample in samples):
            text = (
                f"a sample whose last answer was aborted has the status {samples[-1].status.value}: if "
                'meta_info["finish_reason"]["type"] is "abort", set Sample.Status.ABORTED '
                "(append_response_tokens with meta_info does this)"
            )
            if bench.resumes:
                raise wrong(fn, text)
            bench.notes.append(
                f"{text}. These flags discard aborted samples, so the training is not affected"
            )
    for sample in flatten(again):
        if sample.status not in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
            raise wrong(
                fn,
                f"called again with an aborted sample, it returns the status {sample.status.value}",
            )
        check_sampled(bench, fn, [sample], requests)


def check_sampled(
    bench: Bench, fn: Hook, samples: Sequence[Sample], requests: Sequence[Request]
) -> None:
    """Compare samples with the requests to the engine and its answers.

    Raises:
        Complaint: A sample trains tokens that no engine sampled, or has log-probs of other tokens.
    """
    for sample in samples:
        _check_sample(bench, fn, sample, requests)


def _sampled_tokens(
    bench: Bench, sample: Sample, requests: Sequence[Request]
) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]]:
    """Return, for each token of the response, whether an engine sampled it, the log-prob that the
    engine told, and that of the sample (0 where there is none).
    """
    length = sample.response_length
    tokens = list(sample.tokens)
    sampled = np.zeros(len(tokens), bool)
    scores = np.zeros(len(tokens))
    given = np.zeros(len(tokens))
    if sample.rollout_log_probs is not None:
        given[-length:] = sample.rollout_log_probs
    # A request belongs to the sample if its prompt is a prefix of the sample's tokens. The tokens
    # after the prompt were sampled as far as they agree with the engine's answer. The samples of a
    # group or a fan-out have the same prompt and the same scripted answer: of such requests, the
    # one with the nearest log-probs is this sample's.
    nearest: dict[int, tuple[int, float, list[float]]] = {}
    for request in requests:
        begin = len(request.prompt)
        if tokens[:begin] != request.prompt:
            continue
        pairs = zip(tokens[begin:], request.ids, strict=False)
        count = next(
            (i for i, (mine, its) in enumerate(pairs) if mine != its),
            min(len(tokens) - begin, len(request.ids)),
        )
        theirs = request.log_probs[:count]
        far = float(np.abs(given[begin : begin + count] - theirs).sum())
        nearest[begin] = max(nearest.get(begin, (0, 0.0, [])), (count, -far, theirs))
    for begin, (count, _, theirs) in nearest.items():
        sampled[begin : begin + count] = True
        scores[begin : begin + count] = theirs
    # Of a function that sends texts, the text decides.
    sampled = sampled[-length:]
    scores = scores[-length:]
    given = given[-length:]
    in_text = _answered_in_text(
        bench, tokens[-length:], [request for request in requests if request.of_text]
    )
    # of tokens that were made anew from a text, none are known
    scores[~sampled & in_text] = given[~sampled & in_text]
    sampled |= in_text
    return sampled, scores, given


def _check_sample(bench: Bench, fn: Hook, sample: Sample, requests: Sequence[Request]) -> None:
    # Without a response, nothing is trained.
    length = sample.response_length
    if not length:
        return
    tokens = list(sample.tokens)
    sampled, scores, given = _sampled_tokens(bench, sample, requests)
    if not sampled.any():
        if any(request.ids for request in requests):
            bench.notes.append(
                "its tokens are not those that the engine sampled, so its mask cannot be checked"
            )
        return
    # What is trained must have been sampled, with the log-probs of the engine.
    mask = sample.array("loss_mask")
    trained = np.ones(length, bool) if mask is None else mask != 0
    foreign = np.flatnonzero(trained & ~sampled)
    if len(foreign):
        ids = [tokens[len(tokens) - length + place] for place in foreign[:8]]
        raise Complaint(
            f"{len(foreign)} tokens that no engine sampled would be trained, the first at "
            f"{foreign[0]} of {length} in the response ({bench.tokenizer.decode(ids)!r}): tokens "
            "of tools and templates need loss_mask 0",
            wrong(fn, "").place,
        )
    if sample.rollout_log_probs is None:
        return
    off = np.flatnonzero(trained & (np.abs(given - scores) > _CLOSE))
    if len(off):
        raise wrong(
            fn,
            f"rollout_log_probs of {len(off)} trained tokens differ from those of the engine, the "
            f"first at {off[0]} of {length} in the response: {given[off[0]]:.3f} instead of "
            f"{scores[off[0]]:.3f}",
        )


def _answered_in_text(bench: Bench, response: list[int], requests: Sequence[Request]) -> np.ndarray:
    """Return for each token of a response whether it belongs to the text of an answer.

    A function that sends texts may tokenize texts again: its tokens, and those of its next prompt,
    can then differ from those that were sampled, although it trains only what the model said. It
    may also shorten an answer.
    """
    # Where each token ends in the text of the response.
    ends = np.array(
        [len(bench.tokenizer.decode(response[: place + 1])) for place in range(len(response))]
    )
    starts = np.concatenate([[0], ends[:-1]])
    whole = bench.tokenizer.decode(response)
    belongs = np.zeros(len(response), bool)
    # The longest beginning of each answer that the response has; half of it may be cut off.
    for answer in {bench.tokenizer.decode(request.ids) for request in requests}:
        sizes = range(len(answer), len(answer) // 2, -1)
        size = next((size for size in sizes if answer[:size] in whole), None)
        for found in re.finditer(re.escape(answer[:size]), whole) if size else ():
            belongs |= (starts < found.end()) & (ends > found.start())
    return belongs
