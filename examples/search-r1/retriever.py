"""Two retrievers over one corpus: BM25 (bm25s) and dense vectors (a sentence encoder such as
all-MiniLM-L6-v2).

A corpus is JSONL with ``title`` and ``text``, or with ``contents`` (the title in its first line),
as Search-R1 has it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Retriever(Protocol):
    def search(self, query: str, k: int) -> list[int]:
        """Numbers of the best ``k`` documents, the best first."""


def read_corpus(path: str | Path) -> list[str]:
    """One text per document: its title, then what it says."""
    # Not splitlines(): it also splits at separators such as U+2028, which a text can contain.
    rows = (
        json.loads(line)
        for line in Path(path).read_text(encoding="utf-8").split("\n")
        if line.strip()
    )
    return [
        row["contents"] if "contents" in row else f"{row['title']}\n{row['text']}" for row in rows
    ]


class BM25:
    """Okapi BM25, Lucene's variant. Source: Robertson and Zaragoza 2009; library: Lù 2024,
    arXiv:2407.03618.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        import bm25s

        self._tokenize = lambda texts: bm25s.tokenize(texts, stopwords="en", show_progress=False)
        self._index: Any = bm25s.BM25()
        self._index.index(self._tokenize(list(documents)), show_progress=False)
        self._size = len(documents)

    def search(self, query: str, k: int) -> list[int]:
        found, scores = self._index.retrieve(
            self._tokenize([query]), k=min(k, self._size), show_progress=False
        )
        return [int(i) for i, score in zip(found[0], scores[0], strict=True) if score > 0]


class Dense:
    """Cosine of mean-pooled embeddings. Source: Reimers and Gurevych 2019, arXiv:1908.10084."""

    def __init__(self, documents: Sequence[str], encoder: str) -> None:
        from slime.rollout.rm_hub.encoder import EmbeddingSimilarity

        self._encoder = EmbeddingSimilarity(encoder)
        self._vectors = self._encoder.embed(documents)  # [documents, hidden], unit length

    def search(self, query: str, k: int) -> list[int]:
        scores = self._vectors @ self._encoder.embed([query])[0]
        return [int(i) for i in scores.topk(min(k, len(scores))).indices]


def make_retriever(kind: str, documents: Sequence[str], encoder: str) -> Retriever:
    """``bm25`` or ``dense``."""
    if kind not in ("bm25", "dense"):
        raise ValueError(f"search_retriever is {kind!r}; there are bm25 and dense")
    return BM25(documents) if kind == "bm25" else Dense(documents, encoder)
