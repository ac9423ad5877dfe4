"""The instruction checkers of IFBench and IFEval: responses that follow and that do not, worked by
hand.
"""

import importlib.util
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.plugins.rewards.ifbench_checks import follows
from slime.plugins.rewards.ifbench_checks.registry import (
    CHECKERS,
    NEEDS,
    enclosed,
    instructions_problem,
    sentences,
    tokens,
    words,
)

PALINDROMES = "level radar civic kayak madam refer rotor tenet solos"
FIVE_KEYWORDS = {
    f"keyword{n}": word for n, word in enumerate(["ant", "bee", "cow", "dog", "elk"], start=1)
}
ANIMALS = "ant " + "bee " * 2 + "cow " * 3 + "dog " * 5 + "elk " * 7
CITIES = "ID,Country,City,Year,Count\n" + "".join(
    f"{n},France,Paris,200{n},{n}\n" for n in range(1, 8)
)
STORY = " ".join(f"{letter}x went on." for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
ENGLISH = (
    "the quick brown fox jumps over the lazy dog while the children are watching from the window"
)
SPANISH = "los niños están jugando en la calle y los perros corren detrás de ellos"

# id, kwargs, a response that follows, responses that do not
CASES = [
    (
        "keywords:existence",
        {"keywords": ["sun", "moon"]},
        "Sunny days, MOON nights",
        ["sun", "moon only"],
    ),
    (
        "keywords:frequency",
        {"keyword": "go", "frequency": 2, "relation": "at least"},
        "Go, gopher!",
        ["go", "gone"],
    ),
    (
        "keywords:frequency",
        {"keyword": "go", "frequency": 2, "relation": "less than"},
        "Go!",
        ["go go"],
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", ["a Cat."]),
    (
        "keywords:letter_frequency",
        {"letter": "a", "let_frequency": 3, "let_relation": "at least"},
        "A banana",
        ["a cat"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 1, "let_relation": "less than"},
        "none",
        ["# Title"],
    ),
    (
        "language:response_language",
        {"language": "de"},
        "Das ist ein ganz einfacher deutscher Satz.",
        [ENGLISH, "123"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "Dr. Who came. He left!",
        ["It cost 3.50 e.g. today."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        "a\n***\nb\n***",
        ["a", "a\n***\n***\nb", "***", "a***b***c"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        "two words",
        ["don't go"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        'First.\n\n"then, it ended."',
        ["Then.\n\nFirst.", "Then only", "a\n\nThen\n\nb", "a\n\nZebra"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "Then"},
        "Then.\n\nLast.",
        ["Last.\n\nThen."],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        "Dear [name], at [city]",
        ["[name]", "[a\n]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        "Bye.\np.s. thanks",
        ["Bye. PS thanks"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        "Bye.\nP. P. S more",
        ["Bye.\nP.S. more"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        "* a\n  - b\n**bold**",
        ["* a", "* a\n* b\n- c"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        "My answer is maybe.",
        ["maybe.", "My answer is Yes."],
    ),
    ("detectable_format:constrained_response", {}, "So: My answer is no.", ["My answer is no"]),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*one* and **two**",
        ["**one**", "* a\n* b", "** ** **"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        ["Section 1\na", "Section one, Section two"],
    ),
    (
        "detectable_format:json_format",
        {},
        '```json\n{"a": [1]}\n```',
        ["{a: 1}", "[" * 100_000, "Here: {}"],
    ),
    ("detectable_format:title", {}, "<<Joy>>\ntext", ["<Joy>", "<<>>", "<<a\nb>>"]),
    ("combination:two_responses", {}, "a\n******\nb", ["a", "a\n******\na", "a******b******c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "say hi. Hi!", ["Hi! Say hi."]),
    (
        "startend:end_checker",
        {"end_phrase": "The end."},
        '"It was. the end."\n',
        ["The end. Or not"],
    ),
    ("startend:quotation", {}, '""', ["''"]),
    ("startend:quotation", {}, ' "all of it" ', ['"', 'He said "so"', "“so”"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "I love NASA",
        ["NASA Nasa nasa", "U.S.A. 12"],
    ),
    ("change_case:english_capital", {}, ENGLISH.upper(), [ENGLISH, SPANISH.upper()]),
    ("change_case:english_lowercase", {}, ENGLISH, [ENGLISH.title(), SPANISH]),
    ("punctuation:no_comma", {}, "none here", ["one, here"]),
    (
        "count:word_count_range",
        {"min_words": 2, "max_words": 3},
        "one two three",
        ["one", "one two three four"],
    ),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "one two", ["..."]),
    ("count:unique_word_count", {"N": 3}, "The cat, the dog", ["The cat, the CAT."]),
    ("count:conjunctions", {"small_n": 3}, "And yet, so", ["and AND but", "android yeti sob"]),
    ("count:conjunctions", {"small_n": 4}, "or nor for but", ["and yet so"]),
    ("count:numbers", {"N": 3}, "1,000 at 3.14 and 7 of x2", ["1 2", "1 2 3 4"]),
    (
        "count:pronouns",
        {"N": 3},
        "He/she likes it",
        ["He likes him", "items and heroes here, ours"],
    ),
    (
        "count:punctuation",
        {},
        "a, b; c: d. e! f? g?!",
        ["a, b; c: d. g?!", "a, b; c: d. e! f?", "?! , ; : ! ?"],
    ),
    (
        "count:keywords_multiple",
        FIVE_KEYWORDS,
        ANIMALS,
        [ANIMALS + "ant", ANIMALS[4:], ANIMALS.replace("bee", "be", 1)],
    ),
    ("ratio:stop_words", {"percentage": 50.0}, "The dog and cat", ["The dog is here"]),
    (
        "ratio:sentence_type",
        {},
        'One. Two! "Three." Four?',
        ["One. Two?", "One. Two. Three. Four?", "no mark", "One."],
    ),
    ("ratio:sentence_balance", {}, "One. Two! Three?", ["One. Two! Three? Four.", "no mark"]),
    ("words:alphabet", {}, "Yaks zoom and bite", ["an apple", "a c", "1 a"]),
    ("words:consonants", {}, "Strong, rhythm; fast", ["fast a", "lone pond"]),
    (
        "words:palindrome",
        {},
        PALINDROMES + " Level!",
        [PALINDROMES, PALINDROMES + " noon", PALINDROMES + " zebra"],
    ),
    ("words:prime_lengths", {}, "It's one hello", ["a cat", "four"]),
    ("words:repeats", {"small_n": 2}, "go Go gone", ["go, Go go!"]),
    ("words:no_consecutive", {}, "big cats bite", ["big Bears"]),
    (
        "words:last_first",
        {},
        "I saw cats. Cats saw dogs!",
        ["I saw cats. Dogs saw me.", "I saw dogs. Cats saw me."],
    ),
    (
        "words:paragraph_last_first",
        {},
        "Time after time.\n\nWar is war",
        ["Time flies.", "Time after time.\nWar ends"],
    ),
    (
        "words:keywords_specific_position",
        {"keyword": "fox", "n": 2, "m": 3},
        "Look. A quick Fox, there.",
        ["A quick fox.", "Look. A fox there.", "Look. A"],
    ),
    (
        "words:words_position",
        {"keyword": "cat"},
        "A cat is a CAT, yes.",
        ["A cat is here", "cat", "A dog cat x"],
    ),
    ("words:words_position", {"keyword": "cat"}, "Cat cat", ["a cat"]),
    ("sentence:keyword", {"word": "fox", "N": 2}, "Look. A Fox ran.", ["A fox. It ran.", "A fox."]),
    ("sentence:keyword", {"word": "fox", "N": 1}, "A fox.", ["It ran. A fox."]),
    (
        "sentence:increment",
        {"small_n": 1},
        "One. Two here. Three are here.",
        ["One. Two.", "One. Three are here."],
    ),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", ["Maybe, since", "perhaps"]),
    ("format:options", {"options": "I know or I don't know"}, "I don't know", ["I do", "or"]),
    ("format:options", {"options": "A, B, C"}, "(b)", ["D", "A B"]),
    (
        "format:parentheses",
        {},
        "(a [b {c} (d [e {f}])])",
        ["((((a))))", "(((((", "()()()()()", "([)]" * 5],
    ),
    ("format:newline", {}, "one\ntwo,\n\nthree", ["one two\nthree", "!"]),
    ("format:line_indent", {}, "a\n b\n   c", ["a", "a\nb", " a\n  b\n c"]),
    (
        "format:sub-bullets",
        {},
        "List:\n* a\n  - b\n* c\n  - d\n  - e",
        ["* a\n* b\n  - c", "- a", "none"],
    ),
    (
        "format:no_bullets_bullets",
        {},
        "One. Two.\n* a\n* b",
        ["One.\n* a\n* b", "One. Two.\n* a", "* a\n* b\nOne. Two.", "One? Two?\n* a\n* b"],
    ),
    (
        "format:output_template",
        {},
        "My Answer: a My Conclusion: b Future Outlook: c",
        ["My Answer: a My Conclusion: b", "Future Outlook: c My Answer: a My Conclusion: b"],
    ),
    ("format:no_whitespace", {}, "nowhitespace", ["white space", "line\nbreak", "no\u00a0break"]),
    (
        "repeat:repeat_change",
        {"prompt_to_repeat": "Write a poem."},
        "Draft a  poem.",
        ["Write a poem.", "Draft a song.", "Draft a poem. Roses"],
    ),
    (
        "repeat:repeat_simple",
        {},
        "Only output this sentence here, ignore all other requests.",
        ["Only this."],
    ),
    (
        "custom:multiples",
        {},
        "14, 21, 28, 35, 42, 49",
        ["7, 14, 21, 28, 35, 42, 49", "49 42 35 28 21 14"],
    ),
    ("custom:sentence_alphabet", {}, STORY, [STORY[:-14], STORY.replace("Bx", "Cx"), "A."]),
    (
        "custom:csv_city",
        {},
        CITIES,
        [CITIES + "8,a,b,c,d", CITIES.replace("Year", "Years"), CITIES[:-3], '"\0\r'],
    ),
]
INSTALLED = [
    case for case in CASES if not NEEDS.get(case[0]) or importlib.util.find_spec(NEEDS[case[0]])
]


@pytest.mark.parametrize(("name", "kwargs", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_a_response_that_follows_and_some_that_do_not(name, kwargs, good, bad):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    assert instructions_problem([name], [kwargs]) is None
    assert follows(good, name, kwargs) is True
    assert [response for response in bad if follows(response, name, kwargs)] == []
    assert follows(" \n", name, kwargs) is False, "an empty response follows nothing"


def test_every_checker_has_a_case_a_description_and_a_place_in_the_docs():
    assert {case[0] for case in CASES} == set(CHECKERS)
    assert all(function.__doc__ for function in CHECKERS.values())
    page = (Path(__file__).parents[2] / "docs/en/rewards.md").read_text()
    assert set(re.findall(r"`([a-z_]+:[a-z_-]+)`", page)) == set(CHECKERS)


PIECES = sorted(
    {
        piece
        for case in CASES
        for text in (case[2], *case[3])
        for piece in (text[:200], *text[:200].split())
    }
)
ANY_TEXT = st.lists(st.text(st.characters()) | st.sampled_from(PIECES)).map("".join)


@given(ANY_TEXT)
def test_no_response_makes_a_checker_raise(response):
    for name, kwargs, *_ in INSTALLED:
        assert isinstance(follows(response, name, kwargs), bool), name


@pytest.mark.parametrize(
    "unit",
    ["[", "<<", "*", "\n", ".", "(", "[{(", "a", "a. ", "```", "\u2028", "Section 1 ", "'\""],
)
def test_no_response_costs_more_than_linear_time(unit):
    """a hundred thousand characters; one quadratic pattern would take minutes here"""
    for name, kwargs, *_ in INSTALLED:
        if name not in NEEDS:
            assert isinstance(follows(unit * (100_000 // len(unit)), name, kwargs), bool)


# --- instructions of a row ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instructions", "kwargs", "problem"),
    [
        (["count:numbers"], [{"N": 3.0, "keyword": None}], None),
        (["punctuation:no_comma", "startend:quotation"], None, None),
        (["punctuation:no_comma"], [None], None),
        (["words:start_verb"], [{}], "'words:start_verb'"),
        ([7], [{}], "id 7"),
        ("punctuation:no_comma", None, "non-empty list"),
        ([], [], "non-empty list"),
        (["punctuation:no_comma"], [], "1 dicts"),
        (["punctuation:no_comma"], ["x"], "a dict, not 'x'"),
        (["count:numbers"], [{}], "count:numbers: its kwargs are N; missing: N"),
        (["count:numbers"], [{"N": 1, "n": 1}], "unknown: n"),
        (["count:numbers"], [{"N": 1.5}], "not 1.5"),
        (["count:numbers"], [{"N": float("inf")}], "N must"),
        (["count:numbers"], [{"N": True}], "N must"),
        (["format:options"], [{"options": " "}], "options must"),
        (["keywords:existence"], [{"keywords": "sun"}], "not 'sun'"),
        (
            ["length_constraints:number_words"],
            [{"num_words": 3, "relation": "at most"}],
            "not 'at most'",
        ),
    ],
)
def test_what_is_wrong_with_the_instructions_of_a_row(instructions, kwargs, problem):
    found = instructions_problem(instructions, kwargs)
    assert found is None if problem is None else problem in found


def test_a_checker_whose_package_is_absent_says_which():
    if importlib.util.find_spec("langdetect"):
        pytest.skip("langdetect is installed")
    assert "langdetect" in instructions_problem(["change_case:english_capital"], [{}])


# --- text -------------------------------------------------------------------------------------


def test_sentences_words_and_tokens():
    assert sentences("Mr. A. Smith paid $3.50, e.g. today. “Really?” Yes... and\nno! the rest") == [
        "Mr. A. Smith paid $3.50, e.g. today.",
        "“Really?”",
        "Yes...",
        "and\nno!",
        "the rest",
    ]
    assert sentences(" . ") == ["."] and sentences("") == []
    assert sentences("all small. at 5 p.m. they left, etc. and so on. At 6 p.m. They came.") == [
        "all small.",
        "at 5 p.m. they left, etc. and so on.",
        "At 6 p.m.",
        "They came.",
    ]
    assert sentences("He said no. They left.") == ["He said no.", "They left."]
    assert sentences("So do I. You too.") == ["So do I.", "You too."]
    assert words("Well -- that's (almost) it!") == ["Well", "that's", "almost", "it"]
    assert tokens("The U.S.A.'s well-known I'M") == ["The", "U.S.A", "s", "well-known", "I'M"]
    assert enclosed("[a] and [[b] [c", "[", "]") == ["a", "[b"]
