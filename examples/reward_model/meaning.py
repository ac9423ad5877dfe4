"""A reward model on a real sentence encoder: say what a word means, in few words.

``BriefMeaning`` is for ``--custom-rm-path``, with the encoder's folder as ``--rm-model-path``. As a
script this file writes the questions and reference answers:

    python examples/reward_model/meaning.py FOLDER      # FOLDER/words_train.jsonl, FOLDER/words_eval.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.rollout.rm_hub.encoder import EmbeddingSimilarity

ENOUGH_WORDS = 8  # a longer answer earns less, in proportion
HELD_OUT = 8
WORDS = Path(__file__).with_name("words.txt")  # a word and its meaning a line


class BriefMeaning(EmbeddingSimilarity):
    """How near the answer's meaning is to the reference's (cosine of all-MiniLM's sentence
    vectors), times brevity.

    Lives in one process of its own; is called with a group of answers at a time.
    """

    def compute_reward(
        self, prompts: Sequence[Any], responses: Sequence[str], labels: Sequence[Any]
    ) -> list[float]:
        """In [0, 1]."""
        meanings = super().compute_reward(prompts, responses, labels)
        return [meaning * brevity(text) for meaning, text in zip(meanings, responses, strict=True)]


def brevity(text: str) -> float:
    """1 up to :data:`ENOUGH_WORDS` words, then ENOUGH_WORDS / words; 0 for silence."""
    words = len(text.split())
    return min(1.0, ENOUGH_WORDS / words) if words else 0.0


def rows() -> list[dict[str, Any]]:
    """Question and reference answer of every word, in an order that mixes the kinds of words."""
    pairs = [line.split(": ") for line in WORDS.read_text(encoding="utf-8").splitlines()]
    return [
        {
            "prompt": [{"role": "user", "content": f"What does the word {word} mean?"}],
            "label": meaning,
        }
        for word, meaning in sorted(pairs, key=lambda pair: pair[0][::-1])
    ]


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows()[:-HELD_OUT]), ("eval", rows()[-HELD_OUT:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"words_{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
