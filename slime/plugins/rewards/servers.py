"""Rewards from servers: ``remote_rm`` (POST ``{prompt, response, label}`` to ``--rm-url``; the JSON body of
the answer is the reward), and from a model that an SGLang server (or the embedded engine) serves.

Use the latter with ``--custom-rm-path slime.rollout.rm_hub.sglang_scorer.score --rm-url
http://HOST:PORT/FORM``. The last part of the address selects how the model scores:

* ``/generate``: a judge. The reward is P(yes) / (P(yes) + P(no)) of the next token after
  :data:`JUDGE` (``judge_template`` of ``--custom-config-path`` replaces that text). Every engine
  supports this.
* ``/v1/score``: the same judge, through SGLang's scoring endpoint.
* ``/classify``: a reward model (sequence classification, ``--is-embedding``). The reward is its
  score of the conversation.
* ``/v1/embeddings``: an encoder. The reward is the cosine similarity of response and label, or 0 if
  it is negative.

``--rm-model-path`` is the folder of the served model, from which the tokenizer is loaded (for all
forms except embeddings; default: ``--hf-checkpoint``). With ``--group-rm``, use ``score_group``,
which sends one request for all samples of a group. Each call has the time limit
``--reward-timeout``. Within it, a failed request is retried up to five times.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slime.data.sample import Message, Sample
from slime.engines.http import HttpError, post, request
from slime.observability.files import warn
from slime.rollout.ends import spoken
from slime.rollout.prompts import encode
from slime.rollout.rm_hub.outcome import mark_unscored
from slime.rollout.rm_hub.reward import Reward
from slime.types import Tokenizer

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.config.data import RewardConfig
    from slime.config.trainer import ModelConfig


TRIES = 10
FIRST_PAUSE = 0.5  # seconds, doubled after each failure
LONGEST_PAUSE = 15.0
# if a server has never replied, its address is probably wrong, so do not wait as long
UNKNOWN_SERVER_SECONDS = 300.0
FIRST_REPORT = 10.0  # seconds after which an outage is reported; doubled after each report


async def remote_rm_reward(args: Args, sample: Sample) -> Any:
    """Score one sample; see :func:`ask`."""
    payload: dict[str, object] = {
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
    }
    return await ask(sample, args.rm_url or "", payload, args.reward_timeout, args.phase_timeout)


async def ask(
    sample: Sample, url: str, payload: dict[str, object], limit: float, longest_outage: float
) -> Any:
    """Send a request to a reward server, and wait for the server if it is unavailable.

    Connection errors and the statuses 5xx, 408 and 429 are retried with exponential backoff for
    ``longest_outage`` seconds (``--phase-timeout``). Long waits are logged.

    Returns:
        The JSON body of the reply. None if the sample is the likely cause of the failure; it is
        then marked as unscored. This is the case after :data:`TRIES` attempts without a reply
        within ``limit`` seconds (``--reward-timeout``), or after as many server errors for this
        sample while the server replied to other requests.

    Raises:
        HttpError: The server refused the request.
        RuntimeError: The server was unavailable for too long.
    """
    server = _servers.setdefault(url, _Server(url))
    begun = time.monotonic()
    pause = FIRST_PAUSE
    timeouts = 0
    faults = 0
    while True:
        retry_after = 0.0
        try:
            # Our limit ends first, so that a slow reply is a TimeoutError and not a connection
            # error, which would be retried for much longer.
            async with asyncio.timeout(limit):
                answer = await request("POST", url, payload, timeout=2 * limit)
            server.answered()
            return answer
        except TimeoutError:
            timeouts += 1
            if timeouts >= TRIES:
                mark_unscored(
                    sample, "timeout", f"{url} did not reply within {limit:g} s in {TRIES} attempts"
                )
                return None
        except HttpError as error:
            if not error.retryable:
                raise
            # A server error is blamed on the sample only if the server has replied to another
            # request in the meantime.
            faults += error.is_fault
            if faults >= TRIES and server.last_answer > begun:
                mark_unscored(
                    sample,
                    "error",
                    f"{url} failed {faults} times on this sample; the last error: {error}",
                )
                return None
            unknown = server.last_answer == float("-inf")
            patience = min(longest_outage, UNKNOWN_SERVER_SECONDS) if unknown else longest_outage
            server.failed(error, time.monotonic() - begun, patience)
            retry_after = error.retry_after or 0.0
        await asyncio.sleep(max(pause * random.uniform(0.75, 1.25), retry_after))
        pause = min(2 * pause, LONGEST_PAUSE)


class _Server:
    """State of one server, shared by all requests to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.last_answer = float("-inf")
        self._away_since: float | None = None
        self._next_report = FIRST_REPORT

    def answered(self) -> None:
        self.last_answer = time.monotonic()
        if self._next_report > FIRST_REPORT and self._away_since is not None:
            away = self.last_answer - self._away_since
            warn(f"reward server {self.url} replies again after {away:.0f} s")
        self._away_since = None
        self._next_report = FIRST_REPORT

    def failed(self, error: Exception, waited: float, patience: float) -> None:
        """Log an outage from time to time. Raises ``RuntimeError`` if a request has waited longer
        than ``patience``.
        """
        now = time.monotonic()
        self._away_since = now if self._away_since is None else self._away_since
        if waited > patience:
            raise RuntimeError(
                f"reward server {self.url} has failed for {waited:.0f} s (limit: {patience:g} s; "
                "for a server that has replied before, the limit is --phase-timeout); the last "
                f"error: {error}"
            ) from error
        away = now - self._away_since
        if away >= self._next_report:
            self._next_report *= 2
            warn(
                f"waiting for the reward server {self.url}, which has failed for {away:.0f} s: {error}"
            )


_servers: dict[str, _Server] = {}


def check_server(args: Args) -> list[str]:
    """Note that nothing listens at ``--rm-url``, where the server may be started after the run."""
    try:
        address = urlsplit(args.rm_url or "")
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=2.0).close()
    except (OSError, ValueError) as error:  # a ValueError: there is no such port or name
        args.notices.append(
            f"--rm-url {args.rm_url}: no server answers there ({error}); rewards will wait for it"
        )
    return []


REMOTE_RM = Reward(remote_rm_reward, reads_reasoning=True, own_answer=None)


JUDGE = (
    "Question:\n{prompt}\n\nReference answer: {label}\n\nAnswer to judge:\n{response}\n\n"
    "Does the answer to judge agree with the reference answer? Reply Yes or No.\nReply:"
)
YES = " Yes"
NO = " No"  # the first tokens of these texts are compared
_RETRIES = 5


@dataclass(frozen=True)
class _Judge:
    """The served model that scores: its address, its folder, and the text that asks it."""

    url: str
    model: str
    template: str


async def score(args: Args, sample: Sample, **kwargs: object) -> float:
    """Score one sample."""
    return (await score_group(args, [sample]))[0]


async def score_group(args: Args, samples: Sequence[Sample], **kwargs: object) -> list[float]:
    """Score samples in one request.

    Raises:
        ValueError: ``--rm-url`` is not set, or it ends in none of the four forms.
        HttpError: The server refused the request, or failed in all attempts.
    """
    # a key of --custom-config-path
    template = vars(args).get("judge_template") or JUDGE
    return await judge_group(samples, template, args, model=args)


async def judge_group(
    samples: Sequence[Sample], template: str, reward: RewardConfig, model: ModelConfig
) -> list[float]:
    """Do what :func:`score_group` does, with this question to the judge."""
    url = reward.rm_url or ""
    form = next((form for form in _FORMS if urlsplit(url).path.rstrip("/").endswith(form)), None)
    if form is None:
        raise ValueError(
            f"--rm-url {url or 'is missing'}: the address must end in one of {', '.join(_FORMS)}"
        )
    return await _FORMS[form](
        _Judge(url, reward.rm_model_path or str(model.hf_checkpoint), template),
        [spoken(sample, model.hf_checkpoint, model.trust_remote_code) for sample in samples],
    )


async def _generate(judge: _Judge, samples: Sequence[Sample]) -> list[float]:
    texts, ids = _judge_tokens(judge, samples)
    body = {
        "input_ids": texts,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [list(ids)] * len(samples),
    }
    answers = await post(judge.url, body, max_retries=_RETRIES, form=list)
    rewards = []
    for answer in answers:
        found = {
            int(item[1]): float(item[0])
            for item in answer["meta_info"]["output_token_ids_logprobs"][0]
        }
        rewards.append(_share(found[ids[0]], found[ids[1]]))
    return rewards


async def _v1_score(judge: _Judge, samples: Sequence[Sample]) -> list[float]:
    texts, ids = _judge_tokens(judge, samples)
    body = {
        "query": [],
        "items": texts,
        "label_token_ids": list(ids),
        "apply_softmax": True,
        "model": judge.model,
    }
    answer = await post(judge.url, body, max_retries=_RETRIES, form=dict)
    return [float(row[0]) for row in answer["scores"]]


async def _classify(judge: _Judge, samples: Sequence[Sample]) -> list[float]:
    tokenizer = _tokenizer(judge)
    ids = [encode(tokenizer, _conversation(tokenizer, sample)) for sample in samples]
    answers = await post(judge.url, {"input_ids": ids}, max_retries=_RETRIES)
    return [
        float(answer["embedding"][0])
        for answer in (answers if isinstance(answers, list) else [answers])
    ]


async def _embeddings(judge: _Judge, samples: Sequence[Sample]) -> list[float]:
    body = {
        "model": "default",
        "input": [text or " " for one in samples for text in (one.response, str(one.label))],
    }
    answer = await post(judge.url, body, max_retries=_RETRIES, form=dict)
    vectors = [item["embedding"] for item in sorted(answer["data"], key=lambda item: item["index"])]
    return [max(_cosine(a, b), 0.0) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]


_FORMS = {
    "/generate": _generate,
    "/v1/score": _v1_score,
    "/classify": _classify,
    "/v1/embeddings": _embeddings,
}


def _tokenizer(judge: _Judge) -> Tokenizer:
    from slime.data.tokenizers import load_tokenizer

    return load_tokenizer(judge.model)


def _judge_tokens(
    judge: _Judge, samples: Sequence[Sample]
) -> tuple[list[list[int]], tuple[int, int]]:
    """Return what the judge is asked for each sample, and Yes and No, as token ids."""
    tokenizer = _tokenizer(judge)
    yes, no = (encode(tokenizer, word)[0] for word in (YES, NO))
    if yes == no:
        raise ValueError(
            f"the judge's tokenizer encodes {YES!r} and {NO!r} with the same first token"
        )
    texts = [encode(tokenizer, judge_text(judge.template, sample)) for sample in samples]
    return texts, (yes, no)


def judge_text(template: str, sample: Sample) -> str:
    """Return the template with the prompt, the label and the response of the sample in place of
    their names.
    """
    fields = {
        "prompt": _last_words(sample.prompt),
        "label": str(sample.label),
        "response": sample.response,
    }
    # Not str.format, since templates may contain braces, and in one pass, since prompts and
    # responses may, too.
    return re.sub("{(prompt|label|response)}", lambda found: fields[found[1]], template)


def _conversation(tokenizer: Tokenizer, sample: Sample) -> str:
    """Render the conversation as the reward model was trained on it: with its chat template, if it
    has one.
    """
    if isinstance(sample.prompt, str) or not tokenizer.chat_template:
        return _last_words(sample.prompt) + sample.response
    messages = [*sample.prompt, {"role": "assistant", "content": sample.response}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def _last_words(prompt: str | list[Message]) -> str:
    return (
        prompt
        if isinstance(prompt, str)
        else "\n".join(str(message.get("content", "")) for message in prompt)
    )


def _share(yes: float, no: float) -> float:
    """Return P(yes) / (P(yes) + P(no)) from the two log-probs."""
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))


def _cosine(left: Sequence[float], right: Sequence[float]) -> float:
    norm = math.sqrt(math.fsum(x * x for x in left) * math.fsum(x * x for x in right))
    return math.fsum(x * y for x, y in zip(left, right, strict=True)) / norm if norm else 0.0
