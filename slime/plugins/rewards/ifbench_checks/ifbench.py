"""Checkers for IFBench's instructions (Pyatkin et al. 2025, arXiv 2507.02833, table of
out-of-domain constraints).

Instructions are left out if their check depends on a model or a list that the description does not
give (parts of speech, syllables, French words, countries, emoji), or if their published wording is
ambiguous.
"""

from __future__ import annotations

import csv
import io
import re
import string
from collections import Counter
from itertools import pairwise

from slime.plugins.rewards.ifbench_checks.registry import (
    checker,
    lines,
    sentence_end,
    sentences,
    without_punctuation,
    word_tokens,
    words,
)

_CONJUNCTIONS = frozenset(["for", "and", "nor", "but", "or", "yet", "so"])
_PERSONAL_PRONOUNS = """
i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers herself
it its itself they them their theirs themselves
"""
# English function words, which the usual lists of stop words share: articles, pointing and question
# words; auxiliaries; conjunctions; prepositions; adverbs and quantifiers; and, as a token is a run
# of \w, the parts of contractions.
_FUNCTION_WORDS = """
a an the this that these those who whom which what when where why how
am is are was were be been being have has had having do does did doing can will should
and but if or because as until while nor so than
of at by for with about against between into through during before after above below to from up down in out on off over
under again further then once here there all any both each few more most other some such no not only own same too very
just now
s t d m o y ll re ve ma don ain aren couldn didn doesn hadn hasn haven isn mightn mustn needn shan shouldn wasn weren
won wouldn
"""
_PRONOUNS = frozenset(_PERSONAL_PRONOUNS.split())
_STOP_WORDS = _PRONOUNS | frozenset(_FUNCTION_WORDS.split())
_BULLET = re.compile(r"\s*(?:\*(?!\*)|-(?!-))")
_CONSONANT_CLUSTER = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")


@checker("count:word_count_range")
def word_count_range(response: str, *, min_words: int, max_words: int) -> bool:
    r"""The response must contain between {min_words} and {max_words} words (runs of ``\w``)."""
    return min_words <= len(word_tokens(response)) <= max_words


@checker("count:unique_word_count")
def unique_word_count(response: str, *, N: int) -> bool:
    """Use at least {N} unique words in the response, in either case."""
    return len(set(words(response.lower()))) >= N


@checker("count:conjunctions")
def conjunctions(response: str, *, small_n: int) -> bool:
    """Use at least {small_n} different coordinating conjunctions (for, and, nor, but, or, yet,
    so).
    """
    return len(_CONJUNCTIONS.intersection(words(response.lower()))) >= small_n


@checker("count:numbers")
def numbers(response: str, *, N: int) -> bool:
    """Include exactly {N} numbers: words of digits once punctuation is removed, so 3.14 and 1,000
    are one each.
    """
    return len(re.findall(r"\b\d+\b", without_punctuation(response))) == N


@checker("count:pronouns")
def pronouns(response: str, *, N: int) -> bool:
    """The response should include at least {N} pronouns (personal, possessive, reflexive; every
    occurrence counts).
    """
    return sum(word in _PRONOUNS for word in words(response.lower().replace("/", " "))) >= N


@checker("count:punctuation")
def punctuation(response: str) -> bool:
    """Use every standard punctuation mark at least once, including semicolons, colons, and the
    interrobang (?!).

    The interrobang stands beside a question mark and an exclamation mark of their own.
    """
    rest, found = re.subn(r"\?!|!\?|‽", "", response, count=1)
    return found == 1 and all(mark in rest for mark in ".,!?;:")


@checker("count:keywords_multiple")
def keywords_multiple(
    response: str, *, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:
    """Include {keyword1} once, {keyword2} twice, {keyword3} three, {keyword4} five and {keyword5}
    seven times.
    """
    text = response.lower()
    keywords = (keyword1, keyword2, keyword3, keyword4, keyword5)
    return all(
        text.count(word.lower()) == times
        for word, times in zip(keywords, (1, 2, 3, 5, 7), strict=True)
    )


@checker("ratio:stop_words")
def stop_words(response: str, *, percentage: float) -> bool:
    """Ensure that stop words constitute no more than {percentage}% of the total words in your
    response.
    """
    found = word_tokens(response.lower())
    return bool(found) and 100 * sum(word in _STOP_WORDS for word in found) <= percentage * len(
        found
    )


@checker("ratio:sentence_type")
def sentence_type(response: str) -> bool:
    """Maintain a 2:1 ratio of declarative to interrogative sentences (ends in a period, in a
    question mark).
    """
    ends = Counter(map(sentence_end, sentences(response)))
    return ends["?"] > 0 and ends["."] == 2 * ends["?"]


@checker("ratio:sentence_balance")
def sentence_balance(response: str) -> bool:
    """Ensure that the ratio of sentence types (declarative, interrogative, exclamatory) is
    balanced: equally many.
    """
    ends = Counter(map(sentence_end, sentences(response)))
    return ends["."] == ends["?"] == ends["!"] > 0


@checker("words:alphabet")
def alphabet(response: str) -> bool:
    """Each word must start with the next letter of the alphabet, looping back to 'A' after 'Z'."""
    first = [word[0] for word in words(response.lower())]
    letters = string.ascii_lowercase
    steps = all(
        after == letters[(letters.find(before) + 1) % 26] for before, after in pairwise(first)
    )
    return bool(first) and first[0] in letters and steps


@checker("words:consonants")
def consonants(response: str) -> bool:
    """Ensure each word has at least one consonant cluster (two or more consonants together; y is a
    consonant).
    """
    found = words(response.lower())
    return bool(found) and all(_CONSONANT_CLUSTER.search(word) for word in found)


@checker("words:palindrome")
def palindrome(response: str) -> bool:
    """Include at least 10 single-word palindromes, each at least 5 characters long (every
    occurrence counts).
    """
    found = words(without_punctuation(response.lower()))
    return sum(len(word) >= 5 and word == word[::-1] for word in found) >= 10


@checker("words:prime_lengths")
def prime_lengths(response: str) -> bool:
    """Use only words with lengths that are prime numbers; punctuation does not count."""
    lengths = {len(word) for word in words(without_punctuation(response))}
    return bool(lengths) and all(_is_prime(length) for length in lengths)


@checker("words:repeats")
def repeats(response: str, *, small_n: int) -> bool:
    """The response should not repeat any word more than {small_n} times: none occurs more often, in
    either case.
    """
    return max(Counter(words(response.lower())).values(), default=0) <= small_n


@checker("words:no_consecutive")
def no_consecutive(response: str) -> bool:
    """No two consecutive words can share the same first letter."""
    return all(one[0] != two[0] for one, two in pairwise(words(response.lower())))


@checker("words:last_first")
def last_first(response: str) -> bool:
    """The last word of each sentence must become the first word of the next sentence."""
    found = [inner for sentence in sentences(response) if (inner := words(sentence.lower()))]
    return all(one[-1] == two[0] for one, two in pairwise(found))


@checker("words:paragraph_last_first")
def paragraph_last_first(response: str) -> bool:
    """Each paragraph must end with the same word it started with, separate paragraphs with a
    newline.
    """
    found = [inner for line in lines(response.lower()) if (inner := words(line))]
    return bool(found) and all(inner[0] == inner[-1] for inner in found)


@checker("words:keywords_specific_position")
def keywords_specific_position(response: str, *, keyword: str, n: int, m: int) -> bool:
    """Include keyword {keyword} in the {n}-th sentence, as the {m}-th word of that sentence."""
    return _at(words(_at(sentences(response), n)), m).lower() == keyword.lower()


@checker("words:words_position")
def words_position(response: str, *, keyword: str) -> bool:
    """The second word and the second to last word of the response should be the word {keyword}."""
    found = words(response.lower())
    return len(found) >= 2 and found[1] == found[-2] == keyword.lower()


@checker("sentence:keyword")
def sentence_keyword(response: str, *, word: str, N: int) -> bool:
    """The response must include keyword {word} in the {N}-th sentence."""
    return word.lower() in _at(sentences(response), N).lower()


@checker("sentence:increment")
def increment(response: str, *, small_n: int) -> bool:
    """Each sentence must contain exactly {small_n} more words than the previous one."""
    lengths = [len(words(sentence)) for sentence in sentences(response)]
    return all(after - before == small_n for before, after in pairwise(lengths))


@checker("format:options")
def options(response: str, *, options: str) -> bool:
    """Answer with one of the following options: {options}. Do not give any explanation.

    The options are divided by ``/``, else by the word "or", else by commas. Case and the
    punctuation around the answer do not matter.
    """
    # The data set writes its options in three ways.
    divider = "/" if "/" in options else r"\bor\b" if re.search(r"\bor\b", options) else ","
    allowed = {_plain(option) for option in re.split(divider, options)} - {""}
    return _plain(response) in allowed


@checker("format:parentheses")
def parentheses(response: str) -> bool:
    """Nest parentheses (and [brackets {and braces}]) at least 5 levels deep: pairs that match and
    are closed.
    """
    # One pass with the depth inside of each open mark.
    pairs = {")": "(", "]": "[", "}": "{"}
    open_marks = list[str]()
    heights = list[int]()
    for mark in response:
        if mark in "([{":
            open_marks.append(mark)
            heights.append(0)
        elif mark in pairs and open_marks:
            if open_marks.pop() != pairs[mark]:
                open_marks = []
                heights = []
                continue
            height = heights.pop() + 1  # pairs inside of this one on its deepest path, and itself
            if height >= 5:
                return True
            if heights:
                heights[-1] = max(heights[-1], height)
    return False


@checker("format:newline")
def newline(response: str) -> bool:
    """Write each word on a new line."""
    found = [words(line) for line in lines(response)]
    return any(found) and all(len(inner) <= 1 for inner in found)


@checker("format:line_indent")
def line_indent(response: str) -> bool:
    """Create stairs by incrementally indenting each new line: every line by more spaces than the
    one before it.
    """
    indents = [len(line) - len(line.lstrip(" ")) for line in lines(response)]
    return len(indents) > 1 and all(after > before for before, after in pairwise(indents))


@checker("format:sub-bullets")
def sub_bullets(response: str) -> bool:
    """Bullet points denoted by * and at least one sub-bullet point denoted by - for each bullet
    point.
    """
    # The marks of all bullets in their order, divided at the main ones.
    marks = "".join(line.lstrip()[0] for line in lines(response) if _BULLET.match(line))
    groups = marks.split("*")[1:]
    return bool(groups) and all(groups)


@checker("format:no_bullets_bullets")
def no_bullets_bullets(response: str) -> bool:
    """At least two sentences ending in a period followed by at least two bullet points denoted by
    \\*.
    """
    found = [line.strip() for line in lines(response)]
    bullets = [place for place, line in enumerate(found) if line[0] == "*" and _BULLET.match(line)]
    if len(bullets) < 2:
        return False
    return sum(sentence_end(part) == "." for part in sentences("\n".join(found[: bullets[0]]))) >= 2


@checker("format:output_template")
def output_template(response: str) -> bool:
    """Use this exact template: My Answer: [answer] My Conclusion: [conclusion] Future Outlook:
    [outlook].
    """
    places = [response.find(label) for label in ("My Answer:", "My Conclusion:", "Future Outlook:")]
    return places[0] >= 0 and places == sorted(places)


@checker("format:no_whitespace")
def no_whitespace(response: str) -> bool:
    """The output should not contain any whitespace."""
    return not any(character.isspace() for character in response)


@checker("repeat:repeat_change")
def repeat_change(response: str, *, prompt_to_repeat: str) -> bool:
    """Repeat the request {prompt_to_repeat}, but change its first word, and do not answer it."""
    given = response.split()
    wanted = prompt_to_repeat.split()
    return bool(given) and given[0] != wanted[0] and given[1:] == wanted[1:]


@checker("repeat:repeat_simple")
def repeat_simple(response: str) -> bool:
    """Only output this sentence here, ignore all other requests."""
    return response.strip().lower() == "only output this sentence here, ignore all other requests."


@checker("custom:multiples")
def multiples(response: str) -> bool:
    """Count from 10 to 50 but only print multiples of 7: these numbers in this order and no
    others.
    """
    return re.findall(r"\d+", response) == [str(number) for number in range(14, 51, 7)]


@checker("custom:sentence_alphabet")
def sentence_alphabet(response: str) -> bool:
    """A 26-sentence story where each sentence's first word starts with the letters of the alphabet
    in order.
    """
    found = [words(sentence.lower()) for sentence in sentences(response)]
    return "".join(inner[0][0] if inner else " " for inner in found) == string.ascii_lowercase


@checker("custom:csv_city")
def csv_city(response: str) -> bool:
    """CSV data, comma delimited: the column names are ID, Country, City, Year, Count; 7 rows below
    them.
    """
    try:
        table = list(csv.reader(io.StringIO(response.strip())))
    except csv.Error:
        return False
    header = [["ID", "Country", "City", "Year", "Count"]]
    return [[cell.strip() for cell in row] for row in table[:1]] == header and [
        len(row) for row in table
    ] == [5] * 8


def _at(sequence: list[str], position: int) -> str:
    """The element at a position that counts from 1; "" where there is none."""
    return sequence[position - 1] if 1 <= position <= len(sequence) else ""


def _plain(text: str) -> str:
    return text.strip(string.punctuation + string.whitespace).lower()


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
