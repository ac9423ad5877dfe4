"""The questions of ``recipes.py``, their right answers, and the smaller student of its distillation.

Nothing here imports slime. What else a run imports is in ``recipe_tasks.py``.
"""

from __future__ import annotations

import json
import random
import re
import threading
from pathlib import Path
from typing import Any

HELD_OUT = 128
SYSTEM = "Answer with a number."
ONLY_NUMBER = "Answer with the number only."
CALCULATOR = "Answer with a number. You can calculate: <calc>1 + 1</calc>"
NUMBERS, GUESSES = 15, 4
"""Of the guessing game: with a guess in the middle each time, four are enough for 15 numbers."""
GAME = [
    {
        "role": "user",
        "content": f"Guess my number from 1 to {NUMBERS}. Answer with the number only.",
    },
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "My number is higher."},
    {"role": "assistant", "content": "12"},
    {"role": "user", "content": f"Right. Guess my new number from 1 to {NUMBERS}."},
]
"""What the model reads first: a game that shows the form of an answer, and not a good guess."""
GYM = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2, "size": 2000}
"""Of reasoning-gym's ``chain_sum``, whose task ``number`` is made from the seed plus ``number``."""
GYM_SEEDS = 1, 100_000, 200_000
"""To train on, held out, and for the fine-tuning before."""
START = "<bos>"
"""Gemma's first token. Slime adds none to a text, and without it this model is lost."""
WARM_UP_ROWS = 512
DROPPED = (3, 4, 5, 7, 14, 26)
"""The six of SmolLM2's 30 layers that cost a short answer the least likelihood, each left out alone."""

Question = tuple[str, int]
Row = dict[str, Any]


def sums(rng: random.Random) -> Question:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return f"What is {a} + {b}?", a + b


def sums_of_three(rng: random.Random) -> Question:
    terms = [rng.randint(1, 9) for _ in range(3)]
    return f"What is {' + '.join(map(str, terms))}?", sum(terms)


def products(rng: random.Random) -> Question:
    a, b = rng.randint(2, 9), rng.randint(2, 19)
    return f"What is {a} times {b}?", a * b


def word_problems(rng: random.Random) -> Question:
    name, thing = rng.choice(("Tom", "Ann", "Sara")), rng.choice(("apples", "books", "coins"))
    kept, moved = rng.randint(5, 20), rng.randint(2, 15)
    if rng.random() < 0.5:
        text = f"{name} has {kept} {thing} and buys {moved} more. How many {thing} does {name} have now?"
        return text, kept + moved
    text = f"{name} has {kept + moved} {thing} and gives away {moved}. How many {thing} are left?"
    return text, kept


def largest(rng: random.Random) -> Question:
    numbers = rng.sample(range(1, 1000), 4)
    return f"Which is the largest of {', '.join(map(str, numbers))}?", max(numbers)


KINDS = (sums, sums_of_three, products, word_problems, largest)


def to_calculate(rng: random.Random) -> tuple[str, str, int]:
    """A question that the model cannot answer in its head, the expression, and its value."""
    if rng.random() < 0.5:
        a, b, c = (rng.randint(12, 98) for _ in range(3))
        sign = rng.choice("+-")
        text = f"{a} * {b} {sign} {c}"
        return f"What is {text}?", text, a * b + (c if sign == "+" else -c)
    boxes, each, more = rng.randint(12, 98), rng.randint(12, 98), rng.randint(12, 98)
    question = (
        f"There are {boxes} boxes of {each} coins, and {more} coins beside them. How many coins?"
    )
    return question, f"{boxes} * {each} + {more}", boxes * each + more


def prompt(text: str, system: str = SYSTEM) -> list[Row]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


def write_data(folder: Path, rows: int = 6000, seed: int = 1) -> tuple[Path, Path]:
    """Rows to train on, and 128 held-out questions, none of which is among them."""
    rng = random.Random(seed)
    made: dict[str, int] = {}
    while len(made) < HELD_OUT + rows // 3:
        text, answer = rng.choice(KINDS)(rng)
        made.setdefault(text, answer)
    return _split(folder, [{"prompt": prompt(q), "label": str(a)} for q, a in made.items()])


def write_answers(folder: Path) -> Path:
    """The rows of :func:`write_data` to train on, each with its right answer."""
    train, _ = write_data(folder)
    talks = [{"messages": [*row["prompt"], assistant(row["label"])]} for row in _read(train)]
    return _write(folder / "answers.jsonl", talks)


def write_few_shot(folder: Path) -> tuple[Path, Path]:
    """The same questions as texts for a base model: a solved example of each kind, none of which is
    held out, and the question."""
    rng = random.Random(4)
    shots = "".join(f"Q: {q}\nA: {a}\n\n" for q, a in (kind(rng) for kind in KINDS))
    made = []
    for path in write_data(folder):
        rows = _read(path)
        texts = (f"{START}{shots}Q: {row['prompt'][-1]['content']}\nA:" for row in rows)
        lines = [row | {"prompt": text} for row, text in zip(rows, texts, strict=True)]
        made.append(_write(path.with_name(f"{path.stem}_few_shot.jsonl"), lines))
    return made[0], made[1]


def write_gsm8k(folder: Path, source: Path) -> tuple[Path, Path]:
    """GSM8K (``train.jsonl`` and ``test.jsonl`` of ``source``) as texts for a base model: four
    solved examples, and the question. The held-out rows are of its test set."""
    train, test = _read(source / "train.jsonl"), _read(source / "test.jsonl")

    def asked(row: Row) -> str:
        return f"Question: {row['question']}\nAnswer:"

    short = sorted(train, key=lambda row: len(row["answer"]))[200:204]
    shots = START + "".join(f"{asked(row)} {_solution(row)}\n\n" for row in short)

    def rows(all_rows: list[Row]) -> list[Row]:
        kept = [row for row in all_rows if row not in short]
        return [{"prompt": shots + asked(row), "label": _result(row)} for row in kept]

    return (
        _write(folder / "train.jsonl", rows(train)),
        _write(folder / "held_out.jsonl", rows(test)[:HELD_OUT]),
    )


def write_questions(folder: Path, source: Path) -> tuple[Path, Path]:
    """GSM8K's questions for a chat model. The held-out rows are of its test set."""

    def rows(name: str) -> list[Row]:
        asked = _read(source / name)
        return [{"prompt": prompt(row["question"]), "label": _result(row)} for row in asked]

    return (
        _write(folder / "train.jsonl", rows("train.jsonl")),
        _write(folder / "held_out.jsonl", rows("test.jsonl")[:HELD_OUT]),
    )


def write_solutions(folder: Path, source: Path) -> Path:
    """The training questions of GSM8K with its solutions."""
    rows = _read(source / "train.jsonl")
    talks = [[*prompt(row["question"]), assistant(_solution(row))] for row in rows]
    return _write(folder / "solutions.jsonl", [{"messages": messages} for messages in talks])


def _solution(row: Row) -> str:
    """A solution of GSM8K in one line, without its marks for a calculator."""
    steps, result = re.sub(r"<<.*?>>", "", row["answer"]).split("\n#### ")
    return f"{' '.join(steps.split())} The answer is {result}."


def _result(row: Row) -> str:
    return row["answer"].split("####")[1].strip().replace(",", "")


def write_calculations(folder: Path, rows: int = 2000, seed: int = 2) -> tuple[Path, Path]:
    rng = random.Random(seed)
    made = {question: str(value) for question, _, value in (to_calculate(rng) for _ in range(rows))}
    return _split(folder, [{"prompt": prompt(q, CALCULATOR), "label": a} for q, a in made.items()])


def write_calls(folder: Path, seed: int = 3) -> Path:
    """Conversations of which one half calculates and the other guesses a number of the right
    length, which is hardly ever right. Their questions are others than those of the task."""
    rng = random.Random(seed)
    train, held_out = write_calculations(folder)
    taken = train.read_text(encoding="utf-8") + held_out.read_text(encoding="utf-8")
    talks: list[Row] = []
    while len(talks) < WARM_UP_ROWS:
        question, expression, value = to_calculate(rng)
        if json.dumps(question) in taken:
            continue
        messages = prompt(question, CALCULATOR)
        if len(talks) % 2:
            messages += [assistant(f"<calc>{expression}</calc>")]
            messages += [{"role": "user", "content": f"= {value}"}]
        else:
            digits = len(str(value))
            value = rng.randint(10 ** (digits - 1), 10**digits - 1)
        talks.append({"messages": [*messages, assistant(str(value))]})
    return _write(folder / "calls.jsonl", talks)


def write_games(folder: Path, environment: str) -> Path:
    """Held-out games, by their numbers; those below are to train on."""
    metadata = ({"environment": environment, "environment_task": 1000 + i} for i in range(HELD_OUT))
    rows = [{"prompt": GAME, "label": "", "metadata": entry} for entry in metadata]
    return _write(folder / "held_out.jsonl", rows)


def gym_environment(seed: int) -> str:
    """The flag's value for the tasks of reasoning-gym with this seed."""
    options = "&".join(f"{name}={value}" for name, value in GYM.items())
    return f"reasoning_gym:chain_sum?{options}&seed={seed}&system={ONLY_NUMBER.replace(' ', '%20')}"


def write_gym(folder: Path) -> Path:
    """Held-out tasks of reasoning-gym, none of which is among those to train on."""
    asked = {task["question"] for task in _gym_tasks(GYM_SEEDS[0])}
    rows = [
        {
            "prompt": prompt(task["question"], ONLY_NUMBER),
            "label": task["answer"],
            "metadata": {"environment": gym_environment(GYM_SEEDS[1]), "environment_task": number},
        }
        for number, task in enumerate(_gym_tasks(GYM_SEEDS[1]))
        if task["question"] not in asked
    ]
    return _write(folder / "held_out.jsonl", rows[:HELD_OUT])


def write_gym_answers(folder: Path) -> Path:
    """Other tasks of reasoning-gym, none of which is held out, with their right answers."""
    held_out = {row["prompt"][-1]["content"] for row in _read(write_gym(folder))}
    talks = [
        [*prompt(task["question"], ONLY_NUMBER), assistant(task["answer"])]
        for task in _gym_tasks(GYM_SEEDS[2])
        if task["question"] not in held_out
    ]
    rows = [{"messages": messages} for messages in talks[:WARM_UP_ROWS]]
    return _write(folder / "answers.jsonl", rows)


def _gym_tasks(seed: int) -> list[Row]:
    import reasoning_gym

    return list(reasoning_gym.create_dataset("chain_sum", seed=seed, **GYM))


def drop_layers(model: Path, folder: Path) -> Path:
    """A smaller model: ``model`` without :data:`DROPPED`. Its outputs are of little use until it is
    trained."""
    import shutil

    import torch
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    layers = [layer for number, layer in enumerate(whole.model.layers) if number not in DROPPED]
    whole.model.layers = torch.nn.ModuleList(layers)
    whole.config.num_hidden_layers = len(layers)
    kinds = getattr(whole.config, "layer_types", None)
    if kinds:
        whole.config.layer_types = kinds[: len(layers)]
    whole.save_pretrained(folder)
    for path in model.iterdir():
        if path.name.startswith(("tokenizer", "chat_template", "special_tokens")):
            shutil.copy2(path, folder / path.name)
    return folder


def _split(folder: Path, rows: list[Row]) -> tuple[Path, Path]:
    return (
        _write(folder / "train.jsonl", rows[HELD_OUT:]),
        _write(folder / "held_out.jsonl", rows[:HELD_OUT]),
    )


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, rows: list[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Runs that start at once write the same rows: none may see a part of them.
    part = path.with_suffix(f".{threading.get_ident()}")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return part.replace(path)
