"""A model that searches before it answers: the generate function and the rewards of this example.

A turn ends with ``</search>`` or ``</answer>``. What was searched comes back between
``<information>`` and ``</information>``, which is not trained on. After Jin et al. 2025,
"Search-R1", arXiv:2503.09516.

Settings (``--custom-config-path search.yaml``): ``search_corpus``, ``search_retriever`` (bm25,
dense), ``search_encoder``, ``search_top_k``.
"""

from __future__ import annotations

import asyncio
import functools
import re
import sys
from pathlib import Path
from typing import Any

from slime.rollout.multi_turn import TURNS, Conversation
from slime.rollout.rm_hub.f1 import f1_score, normalize_answer
from slime.utils.types import Sample

sys.path.insert(0, str(Path(__file__).parent))
from retriever import Retriever, make_retriever, read_corpus  # a file beside this one

SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
SECONDS = 60.0  # of one search


@functools.cache
def index(corpus: str, kind: str, encoder: str) -> tuple[list[str], Retriever]:
    """Documents and retriever, made once."""
    documents = read_corpus(corpus)
    return documents, make_retriever(kind, documents, encoder)


def look_up(args: Any, query: str) -> str:
    """The best documents, without their titles."""
    documents, retriever = index(args.search_corpus, args.search_retriever, args.search_encoder)
    found = retriever.search(query, args.search_top_k)
    return "\n".join(documents[i].partition("\n")[2] for i in found) or "nothing found"


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Searches, one a turn, and an answer."""
    talk = Conversation(args, sample, sampling_params, evaluation)
    while (said := await talk.turn(stop=["</search>", "</answer>"])) is not None:
        query = SEARCH.search(said)
        if query is None:
            break
        found = await talk.tools([asyncio.to_thread(look_up, args, query[1])], timeout=SECONDS)
        if not talk.reply([{"role": "user", "content": f"<information>{found[0]}</information>"}]):
            break
    return sample


def answer_of(sample: Sample) -> str | None:
    """What the model's last turn answers; an ``<answer>`` in a document counts for nothing."""
    turns = sample.metadata.get(TURNS) or [{"text": sample.response}]
    found = ANSWER.findall(turns[-1]["text"])
    return found[-1].strip() if found else None


async def exact_match(args: Any, sample: Sample, **_: Any) -> float:
    """1 when the answer is the label but for case, punctuation and articles (``--custom-rm-path
    FILE:exact_match``).
    """
    answer = answer_of(sample)
    return float(
        answer is not None and normalize_answer(answer) == normalize_answer(str(sample.label))
    )


async def f1(args: Any, sample: Sample, **_: Any) -> float:
    """Token F1 of answer and label (``--custom-rm-path FILE:f1``)."""
    answer = answer_of(sample)
    return f1_score(answer, str(sample.label)).f1 if answer is not None else 0.0
