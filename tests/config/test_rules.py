"""Every row of the rules: it is told with the flags that it names, and not without one of them."""

from __future__ import annotations

from typing import Any

import pytest
from make_args import CPU_MACHINE, make_args

from slime.config.args import Args
from slime.config.machine import Machine
from slime.config.rules import Rule, Run, all_rules, holding, look_up, set_defaults

FACTS = all_rules().facts
IDLE = all_rules().idle
ROWS = [*all_rules().refused, *all_rules().notices, *IDLE]
ALL = [
    pytest.param(rule, one, other, id=f"{one} / {other or rule.needs or rule.unless}")
    for rule in ROWS
    for one in rule.when.split(" or ")
    for other in rule.excludes.split(" or ")
]
SIGNS = (">=", "<=", "==", "!=", ">", "<")


def parts(*conditions: str) -> list[str]:
    return [
        part
        for text in conditions
        if text
        for one in text.split(" or ")
        for part in one.split(" and ")
    ]


class Setup:
    """Arguments on which each part of a condition can be made to hold, and not to hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.args = make_args()
        self.run = Run(self.args, False, CPU_MACHINE)
        self.patch = monkeypatch
        for name in FACTS:
            self.put(name, False)

    def put(self, part: str, holds: bool) -> None:
        if part in FACTS:
            self.patch.setitem(FACTS, part, lambda run: holds)
            return
        option, _, wanted = part.partition(" ")
        _, known = look_up(option, vars(self.args))
        flag, values, sets = known.flag, known.values(vars(self.args)), known.sets
        self.args.explicit |= {flag.name}
        if flag.is_bool:
            values[flag.name] = sets is holds
        elif sign := next((sign for sign in SIGNS if wanted.startswith(sign)), ""):
            values[flag.name] = self.compared(sign, wanted.removeprefix(sign), holds)
        elif wanted:
            values[flag.name] = wanted if holds else None
        else:
            other = {str: "x", dict: {"A": "x"}}.get(flag.value_type) or flag.value_type(3)
            values[flag.name] = ([other] if flag.takes_list else other) if holds else flag.default

    def compared(self, sign: str, wanted: str, holds: bool) -> Any:
        if sign == "!=":
            return "other" if holds else wanted
        number = 4.0
        if wanted.startswith("--"):
            _, (flag, _, _) = look_up(wanted, vars(self.args))
            setattr(self.args, flag.name, number)
        else:
            number = float(wanted)
        above, below, same = number + 1, number - 1, number
        right, wrong = {
            ">": (above, same), ">=": (same, below), "<": (below, same), "<=": (same, above), "==": (same, above)
        }[sign]  # fmt: skip
        return right if holds else wrong


def named(text: str) -> set[str]:
    return {part.partition(" ")[0] if part.startswith("--") else part for part in parts(text)}


@pytest.mark.parametrize(("rule", "one", "other"), ALL)
def test_a_row_is_told_with_its_flags_and_not_without(
    rule: Rule, one: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(monkeypatch)
    for part in parts(rule.when, rule.excludes, rule.needs, rule.unless):
        setup.put(part, False)
    chosen = parts(one, other)
    assert rule.sentences(setup.run) == []
    for part in chosen:
        setup.put(part, True)
    told = [
        told
        for told in rule.sentences(setup.run)
        if all(name in told for name in named(one) | named(other))
    ]
    assert told and all(name in told[0] for name in named(rule.needs)), rule
    assert rule.because in told[0] and "\n" not in told[0]
    for part in chosen:
        setup.put(part, False)
        assert told[0] not in rule.sentences(setup.run), part
        setup.put(part, True)
    for instead in (*rule.needs.split(" or "), *rule.unless.split(" or ")):
        if not instead or set(parts(instead)) & set(chosen):
            continue
        for part in parts(instead):
            setup.put(part, True)
        assert rule.sentences(setup.run) == [], instead
        for part in parts(instead):
            setup.put(part, False)


def test_each_row_gives_a_reason_and_each_name_exists() -> None:
    for rule in ROWS:
        assert rule.because or rule in IDLE, rule
        assert not (rule.needs and rule.excludes), "a row says either"
        for part in parts(rule.when, rule.excludes, rule.needs, rule.unless):
            assert part in FACTS or look_up(part.partition(" ")[0], vars(Args())), part


def test_a_zero_that_is_derived_is_off_and_a_typed_one_is_a_value() -> None:
    run = Run(make_args(max_weight_staleness=0, eval_temperature=0.0), False, CPU_MACHINE)
    assert holding("--lora-rank or --eval-temperature", run) == []
    assert holding("--max-weight-staleness", run) == [["--max-weight-staleness 0"]]
    assert holding("--eval-temperature", run, typed=True) == [["--eval-temperature 0.0"]]


def test_secrets_are_not_told() -> None:
    run = Run(make_args(wandb_key="s3cret"), False, CPU_MACHINE)
    assert holding("--wandb-key", run) == [["--wandb-key ***"]]


GPU = Machine(gpus=1, cores=8, in_cluster=False)
CLUSTER = Machine(gpus=0, cores=8, in_cluster=True)


@pytest.mark.parametrize(
    ("fact", "yes", "no"),
    [
        (
            "packs of a multiple of 16 tokens",
            {"data_pad_size_multiplier": 48},
            {"data_pad_size_multiplier": 8},
        ),
        ("several training ranks", {"actor_num_nodes": 2}, {}),
        ("a snapshot in --load", {"load": "no/model"}, {}),
        ("a weight decay that changes", {"megatron": {"end_weight_decay": 0.2}}, {"megatron": {}}),
        ("a GPU", {"machine": GPU}, {}),
        ("a GPU", {"machine": CLUSTER}, {}),
        ("a GPU of this machine", {"machine": GPU}, {"machine": CLUSTER}),
        (
            "SGLang on a CPU",
            {"rollout_backend": "sglang"},
            {"rollout_backend": "sglang", "machine": GPU},
        ),
        (
            "SGLang on a CPU",
            {"rollout_backend": "sglang", "sglang": {"device": "cpu"}, "machine": GPU},
            {},
        ),
        ("a rate that the user chose", {"lr": 1e-6}, {}),
        ("Dr. GRPO", {"advantage_estimator": "dr_grpo"}, {"advantage_estimator": "grpo"}),
        ("a critic", {"advantage_estimator": "ppo"}, {}),
        ("an estimator that compares the samples of a group", {}, {"advantage_estimator": "ppo"}),
    ],
)
def test_facts(fact: str, yes: dict[str, Any], no: dict[str, Any]) -> None:
    for flags, holds in ((yes, True), (no, False)):
        run = Run(make_args(**flags), False, flags.get("machine", CPU_MACHINE))
        assert bool(FACTS[fact](run)) is holds


@pytest.mark.parametrize("rule", all_rules().defaults, ids=str)
def test_a_switch_follows_from_its_row(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch)
    name = look_up(rule.sets, vars(setup.args))[1].flag.name
    for holds in (False, True):
        for part in parts(rule.when, rule.unless):
            setup.put(part, False)
        for part in parts(rule.when.split(" or ")[0]):
            setup.put(part, holds)
        setup.args.explicit -= {name}
        setattr(setup.args, name, None)
        set_defaults(setup.run)
        assert getattr(setup.args, name) is holds
    setup.args.explicit |= {name}
    setattr(setup.args, name, False)
    set_defaults(setup.run)
    assert getattr(setup.args, name) is False, "the user has chosen"
