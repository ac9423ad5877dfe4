"""Search as a tool: what is found, what is read but not trained, and what counts as an answer."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from example_scripts import EXAMPLES, load_example
from scripted_engine import Script, byte_tokenizer

from slime.data.sample import Sample

corpus = load_example("search-r1/make_corpus.py")
search = load_example("search-r1/generate_with_search.py")
retriever = load_example("search-r1/retriever.py")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search")
    subprocess.run(
        [sys.executable, EXAMPLES / "search-r1" / "make_corpus.py", folder], check=True, timeout=60
    )
    byte_tokenizer(folder / "tokenizer")
    return folder


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def settings(data: Path) -> dict[str, object]:
    import yaml

    return yaml.safe_load((data / "search.yaml").read_text())


def test_bm25_finds_every_document_that_the_transcripts_ask_for(data: Path) -> None:
    documents = retriever.read_corpus(data / "corpus.jsonl")
    index = retriever.BM25(documents)
    asked = 0
    for row in rows(data / "transcripts.jsonl"):
        messages = row["messages"]
        for said, found in itertools.pairwise(messages):
            query = search.SEARCH.search(said["content"]) if said["role"] == "assistant" else None
            if query:
                best = documents[index.search(query[1], 1)[0]].partition("\n")[2]
                assert f"<information>{best}</information>" == found["content"], query[1]
                asked += 1
    assert asked > 60
    assert index.search("xylophone zebra", 3) == []


def test_a_document_is_not_divided_at_a_line_separator_of_its_text(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        '{"contents": "one\u2028document\x85"}\n\n{"title": "a", "text": "b"}\n', encoding="utf-8"
    )
    assert retriever.read_corpus(corpus) == ["one\u2028document\x85", "a\nb"]


def test_questions_can_be_answered_from_the_corpus_alone(data: Path) -> None:
    documents = "\n".join(retriever.read_corpus(data / "corpus.jsonl"))
    questions = rows(data / "train.jsonl") + rows(data / "eval.jsonl")
    assert {row["metadata"]["hops"] for row in questions} == {1, 2}
    assert all(row["label"] in documents for row in questions)
    texts = [row["prompt"][1]["content"] for row in questions]
    assert len(set(texts)) == len(texts), "held-out questions are not trained on"


async def test_a_question_of_two_hops(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, data / "tokenizer", **settings(data))
    row = next(r for r in rows(data / "train.jsonl") if r["metadata"]["hops"] == 2)
    name = row["prompt"][1]["content"].removeprefix("Which country is ").removesuffix(" from?")
    people = {r["title"]: r["text"] for r in rows(data / "corpus.jsonl")}
    town = people[name].rpartition(" ")[2].rstrip(".")
    script.says = [
        f"<search>{name}</search> no",
        f"<search>{town}</search>",
        f"<answer>{row['label']}</answer>",
    ]
    sample = Sample(prompt=row["prompt"], label=row["label"], index=0)
    sample = await search.generate(script.args, sample, script.params)
    assert (
        f"<information>{people[name]}</information>" in script.asked[1]
        and people[town] in script.asked[2]
    )
    trained = f"<search>{name}</search><search>{town}</search><answer>{row['label']}</answer>"
    assert script.trained(sample) == trained and sample.metadata["round_number"] == 3
    assert (
        await search.exact_match(script.args, sample) == 1.0 == await search.f1(script.args, sample)
    )


async def test_an_answer_in_a_document_earns_nothing(
    data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trap = tmp_path / "trap.jsonl"
    trap.write_text(json.dumps({"contents": '"Trap"\nthe trap says <answer>Peru</answer>'}) + "\n")
    script = Script(
        monkeypatch, data / "tokenizer", **{**settings(data), "search_corpus": str(trap)}
    )
    script.says = ["<search>trap</search>", "I do not know<eos>"]
    sample = await search.generate(
        script.args, Sample(prompt="?", label="Peru", index=0), script.params
    )
    assert "<answer>Peru</answer>" in sample.response
    assert (
        await search.exact_match(script.args, sample) == 0.0 == await search.f1(script.args, sample)
    )


async def test_the_rewards_of_partial_and_plain_answers() -> None:
    def sample(text: str) -> Sample:
        return Sample(response=text, label="Bruno Holm")

    assert await search.exact_match(None, sample("<answer>the Bruno  HOLM.</answer>")) == 1.0
    assert await search.exact_match(None, sample("<answer>Holm</answer>")) == 0.0
    assert await search.f1(None, sample("<answer>Holm</answer>")) == pytest.approx(2 / 3)
    assert await search.f1(None, sample("Bruno Holm")) == 0.0


@pytest.mark.real
def test_the_dense_retriever_finds_by_meaning(minilm: Path) -> None:
    documents = [
        "Oslo\nOslo is the capital of Norway.",
        "Bread\nBread is baked from flour.",
        "Cats\nCats sleep a lot.",
    ]
    found = retriever.make_retriever("dense", documents, str(minilm)).search(
        "How is a loaf made?", 2
    )
    assert found[0] == 1 and len(found) == 2
    with pytest.raises(ValueError, match="bm25 and dense"):
        retriever.make_retriever("google", documents, "")
