"""How many tokens a decode pass would give with drafts from other samples of the same prompt.

    python benchmarks/drafts.py outputs/quickstart --model models/SmolLM2-135M-Instruct

The samples that a run has recorded (``samples/rollout_*.jsonl``) are replayed on paper: each response is
generated again, token by token, and before each pass up to ``--longest`` tokens are proposed: those
that followed the longest match of its last tokens (at least ``--match`` of them) in what is known by
then. Known are the sample's own tokens, the siblings' tokens that exist after as many passes (all
samples of a group start together), and all samples of the prompt of earlier rollouts. A pass gives
the proposed tokens that are those of the recorded response, and one more. With seeds for each token
that is lossless, so a response does not change.

The last line is JSON: tokens a pass by rollout.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MEMORY = 8  # responses of earlier rollouts that are kept for a prompt


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--model", required=True, help="folder with the run's tokenizer")
    parser.add_argument("--longest", type=int, default=8, help="tokens of a draft (default: 8)")
    parser.add_argument("--match", type=int, default=2, help="tokens that must agree (default: 2)")
    return parser.parse_args()


def propose(
    history: Sequence[int], known: Sequence[Sequence[int]], match: int, longest: int
) -> list[int]:
    """The tokens after the longest match of the end of ``history`` in ``known``; the newest wins."""
    best: tuple[int, list[int]] = (match - 1, [])
    for text in reversed(known):
        for end in range(len(text) - 1, 0, -1):
            same = 0
            while same < min(end, len(history)) and text[end - 1 - same] == history[-1 - same]:
                same += 1
            if same > best[0]:
                best = (same, list(text[end : end + longest]))
    return best[1]


def passes_of(
    group: list[list[int]], earlier: Sequence[Sequence[int]], match: int, longest: int
) -> list[int]:
    """How many passes each response of a group takes, if all of them are decoded together."""
    made = [0] * len(group)
    passes = [0] * len(group)
    while any(n < len(response) for n, response in zip(made, group, strict=True)):
        written = [response[:n] for n, response in zip(made, group, strict=True)]
        for i, response in enumerate(group):
            if made[i] == len(response):
                continue
            siblings = [text for j, text in enumerate(written) if j != i]
            # The sample's own tokens too; without the last, which nothing follows yet.
            known = [*earlier, *siblings, written[i][:-1]]
            draft = propose(written[i], known, match, longest)
            accepted = 0
            rest = response[made[i] :]
            while accepted < min(len(draft), len(rest) - 1) and draft[accepted] == rest[accepted]:
                accepted += 1
            made[i] += accepted + 1
            passes[i] += 1
    return passes


def main() -> None:
    options = parse_options()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    earlier: dict[str, list[list[int]]] = defaultdict(list)
    rows: list[dict[str, Any]] = []
    for file in sorted((options.run / "samples").glob("rollout_*.jsonl")):
        groups: dict[int, list[list[int]]] = defaultdict(list)
        prompts: dict[int, str] = {}
        for line in file.read_text().splitlines():
            sample = json.loads(line)
            tokens = tokenizer(sample["response"], add_special_tokens=False)["input_ids"]
            groups[sample["group_index"]].append(tokens or [0])
            prompts[sample["group_index"]] = str(sample["prompt"])
        tokens_made = passes = 0
        for index, group in groups.items():
            kept = earlier[prompts[index]]
            passes += sum(passes_of(group, kept, options.match, options.longest))
            tokens_made += sum(map(len, group))
        for index, group in groups.items():
            earlier[prompts[index]] = [*earlier[prompts[index]], *group][-MEMORY:]
        rows.append({"rollout": file.stem, "tokens": tokens_made, "per_pass": tokens_made / passes})
        print(f"{file.stem}: {tokens_made} tokens, {tokens_made / passes:.2f} a pass", flush=True)
    total = sum(row["tokens"] for row in rows)
    mean = total / sum(row["tokens"] / row["per_pass"] for row in rows)
    print(json.dumps({"benchmark": "drafts", "tokens": total, "per_pass": mean, "rollouts": rows}))


if __name__ == "__main__":
    main()
