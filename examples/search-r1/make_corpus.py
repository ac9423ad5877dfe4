"""A small encyclopaedia of invented people and towns, and questions about it of one and of two
hops.

    python examples/search-r1/make_corpus.py OUT_DIR [--seed 1] [--retriever bm25|dense] [--encoder FOLDER]

The documents are like those of HotpotQA (a title and a paragraph; a question may need two of them)
but invented here, so no model knows them by heart. Writes ``corpus.jsonl``, ``train.jsonl``,
``eval.jsonl``, ``search.yaml`` (settings of the retriever, for ``--custom-config-path``) and
``transcripts.jsonl``: conversations of which one half searches and the other guesses. Supervised
fine-tuning teaches both; which of them pays is for RL to find out.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from random import Random
from typing import Any

# ruff: noqa: SIM905  # words are easier to read than a column of strings
SYSTEM = "Search with <search>words</search>. Give the answer in <answer></answer>."
FIRST = (
    "Anna Bruno Clara David Elena Felix Grace Henry Irene Jonas Karin Lucas Maria Nina Oscar Paula"
).split()
LAST = (
    "Adler Berg Costa Dahl Evans Falk Grant Holm Ivers Jensen Keller Lund Moreau Novak Olsen Porter"
).split()
TOWNS = (
    "Alton Barrow Colby Denton Easton Fulton Granby Hilton Kelso Linton Milford Newton Olney "
    "Preston"
).split()
COUNTRIES = "Chile Egypt France Greece India Japan Kenya Mexico Norway Peru Poland Spain".split()
WORK = "painter singer doctor teacher writer pilot lawyer chemist".split()


def world(draw: Random) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """People (name, work, town, country) and documents (title, text)."""
    country = {town: draw.choice(COUNTRIES) for town in TOWNS}
    names = [" ".join(pair) for pair in itertools.product(FIRST, LAST)]
    draw.shuffle(names)
    people = [
        {"name": name, "work": draw.choice(WORK), "town": draw.choice(TOWNS)} for name in names
    ]
    for person in people:
        person["country"] = country[person["town"]]
    documents = [
        {"title": p["name"], "text": f"{p['name']} is a {p['work']} from {p['town']}."}
        for p in people
    ]
    documents += [
        {"title": town, "text": f"{town} is a town in {where}."} for town, where in country.items()
    ]
    return people, documents


def question(person: dict[str, str], hops: int) -> dict[str, Any]:
    """A row; with two hops the answer stands in the document of the town."""
    text = (
        f"Which town is {person['name']} from?"
        if hops == 1
        else f"Which country is {person['name']} from?"
    )
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return {
        "prompt": prompt,
        "label": person["town" if hops == 1 else "country"],
        "metadata": {"hops": hops},
    }


def transcript(draw: Random, person: dict[str, str], hops: int, searches: int) -> dict[str, Any]:
    """A conversation with this many searches; one with fewer than the question needs ends with a
    guess.
    """
    row = question(person, hops)
    found = [
        (person["name"], f"{person['name']} is a {person['work']} from {person['town']}."),
        (person["town"], f"{person['town']} is a town in {person['country']}."),
    ]
    messages = list(row["prompt"])
    for query, text in found[:searches]:
        messages.append({"role": "assistant", "content": f"<search>{query}</search>"})
        messages.append({"role": "user", "content": f"<information>{text}</information>"})
    answer = row["label"] if searches >= hops else draw.choice(TOWNS if hops == 1 else COUNTRIES)
    messages.append({"role": "assistant", "content": f"<answer>{answer}</answer>"})
    return {"messages": messages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--retriever", choices=("bm25", "dense"), default="bm25")
    parser.add_argument("--encoder", default="", help="folder of the dense retriever's model")
    args = parser.parse_args()
    draw = Random(args.seed)
    people, documents = world(draw)
    hops = [1 + i % 2 for i in range(len(people))]
    pairs = list(zip(people, hops, strict=True))
    taught = [
        transcript(draw, p, h, h if i % 4 < 2 else draw.randrange(h))
        for i, (p, h) in enumerate(pairs[16:144])
    ]
    files = {
        "corpus": documents,
        "eval": [question(*pair) for pair in pairs[:16]],
        "transcripts": taught,
        "train": [question(*pair) for pair in pairs[144:]],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (args.out / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    settings = {"search_corpus": str(args.out.resolve() / "corpus.jsonl"), "search_retriever": args.retriever,
                "search_encoder": args.encoder, "search_top_k": 1}  # fmt: skip
    (args.out / "search.yaml").write_text(
        "".join(f"{k}: {json.dumps(v)}\n" for k, v in settings.items())
    )
    print(args.out)


if __name__ == "__main__":
    main()
