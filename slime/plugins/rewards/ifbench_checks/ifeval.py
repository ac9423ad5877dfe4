"""Checkers for the 25 instructions of IFEval (Zhou et al. 2023, arXiv 2311.07911, table of
verifiable instructions).

The docstring of a checker is its instruction, with the names of the arguments in braces and details
of the check at the end. Keywords are literal text and match in upper and lower case. The names of
the arguments are those of the data set.
"""

from __future__ import annotations

import importlib
import json
import re

from slime.plugins.rewards.ifbench_checks.registry import (
    Relation,
    checker,
    compare,
    enclosed,
    lines,
    sentences,
    tokens,
    word_tokens,
)

_DETECTOR = "langdetect"


@checker("keywords:existence")
def existence(response: str, *, keywords: list[str]) -> bool:
    """Include the keywords {keywords} in the response. A keyword that is part of a longer word
    counts.
    """
    return all(keyword.lower() in response.lower() for keyword in keywords)


@checker("keywords:frequency")
def frequency(response: str, *, keyword: str, frequency: int, relation: Relation) -> bool:
    """The word {keyword} should appear {relation} {frequency} times. A word that is part of a
    longer one counts.
    """
    return compare(response.lower().count(keyword.lower()), relation, frequency)


@checker("keywords:forbidden_words")
def forbidden_words(response: str, *, forbidden_words: list[str]) -> bool:
    """Do not include the keywords {forbidden_words}. Only whole words count."""
    return not any(
        re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words
    )


@checker("keywords:letter_frequency")
def letter_frequency(
    response: str, *, letter: str, let_frequency: int, let_relation: Relation
) -> bool:
    """The letter {letter} should appear {let_relation} {let_frequency} times. Upper and lower case
    count.
    """
    return compare(response.lower().count(letter.lower()), let_relation, let_frequency)


@checker("language:response_language", needs=_DETECTOR)
def response_language(response: str, *, language: str) -> bool:
    """The entire response should be in {language}, a language code of langdetect. No other language
    is allowed.
    """
    return _language(response) == language


@checker("length_constraints:number_sentences")
def number_sentences(response: str, *, num_sentences: int, relation: Relation) -> bool:
    """The response should contain {relation} {num_sentences} sentences."""
    return compare(len(sentences(response)), relation, num_sentences)


@checker("length_constraints:number_paragraphs")
def number_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """There should be exactly {num_paragraphs} paragraphs, separated with the markdown divider
    ``***``.
    """
    parts = _divided(response, "***")
    return parts is not None and len(parts) == num_paragraphs


@checker("length_constraints:number_words")
def number_words(response: str, *, num_words: int, relation: Relation) -> bool:
    r"""Answer with {relation} {num_words} words. A word is a sequence of ``\w``."""
    return compare(len(word_tokens(response)), relation, num_words)


@checker("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(
    response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """There should be {num_paragraphs} paragraphs with two line breaks between them. Paragraph
    {nth_paragraph} must start with the word {first_word}."""
    # The word without its quotation marks and what follows it.
    paragraphs = [part for part in response.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    first = paragraphs[nth_paragraph - 1].split()[0].lstrip("'\"“‘")
    return re.split(r"[.,?!'\"’”]", first, maxsplit=1)[0].lower() == first_word.lower()


@checker("detectable_content:number_placeholders")
def number_placeholders(response: str, *, num_placeholders: int) -> bool:
    """The response must contain at least {num_placeholders} placeholders in square brackets, such
    as [address].
    """
    return len(enclosed(response, "[", "]")) >= num_placeholders


@checker("detectable_content:postscript")
def postscript(response: str, *, postscript_marker: str) -> bool:
    """At the end of the response, explicitly add a postscript starting with {postscript_marker}."""
    letters = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = letters.get(postscript_marker, re.escape(postscript_marker.lower()))
    return re.search(pattern, response.lower()) is not None


@checker("detectable_format:number_bullet_lists")
def number_bullet_lists(response: str, *, num_bullets: int) -> bool:
    """The answer must contain exactly {num_bullets} markdown bullet points, ``* text`` or ``-
    text``.
    """
    bullets = [line for line in map(str.strip, lines(response)) if re.match(r"\*[^*]|-", line)]
    return len(bullets) == num_bullets


@checker("detectable_format:constrained_response")
def constrained_response(response: str) -> bool:
    """Answer with one of: My answer is yes. My answer is no. My answer is maybe."""
    return any(f"My answer is {choice}." in response for choice in ("yes", "no", "maybe"))


@checker("detectable_format:number_highlighted_sections")
def number_highlighted_sections(response: str, *, num_highlights: int) -> bool:
    """Highlight at least {num_highlights} sections with markdown, as ``*text*`` or ``**text**``."""
    found = re.findall(r"\*([^\n*]*)\*", response) + re.findall(r"\*\*([^\n*]*)\*\*", response)
    return sum(bool(inner.strip()) for inner in found) >= num_highlights


@checker("detectable_format:multiple_sections")
def multiple_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    """The response must have at least {num_sections} sections. Each begins with {section_spliter}
    and its number.
    """
    marker = re.escape(section_spliter.strip())
    return len(re.findall(rf"{marker}\s?\d+", response)) >= num_sections


@checker("detectable_format:json_format")
def json_format(response: str) -> bool:
    """The entire output should be wrapped in JSON format. A markdown code fence around it is
    allowed.
    """
    text = response.strip()
    if text.startswith("```"):
        text = re.sub(r"\A```(?:json)?", "", text, flags=re.IGNORECASE)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


@checker("detectable_format:title")
def title(response: str) -> bool:
    """The answer must contain a title, wrapped in double angular brackets, such as <<poem of
    joy>>.
    """
    return any(inner.strip("<> \t\r") for inner in enclosed(response, "<<", ">>"))


@checker("combination:two_responses")
def two_responses(response: str) -> bool:
    """Give two different responses, separated by six asterisks: ``******``."""
    parts = _divided(response, "******")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


@checker("combination:repeat_prompt")
def repeat_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    """First repeat the request {prompt_to_repeat} word for word without change, then answer."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


@checker("startend:end_checker")
def end_checker(response: str, *, end_phrase: str) -> bool:
    """Finish the response with this exact phrase {end_phrase}. Only quotation marks may follow, and
    no other words.
    """
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@checker("startend:quotation")
def quotation(response: str) -> bool:
    """Wrap the entire response with double quotation marks."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@checker("change_case:capital_word_frequency")
def capital_word_frequency(
    response: str, *, capital_frequency: int, capital_relation: Relation
) -> bool:
    """Words with all capital letters should appear {capital_relation} {capital_frequency} times."""
    return compare(
        sum(word.isupper() for word in tokens(response)), capital_relation, capital_frequency
    )


@checker("change_case:english_capital", needs=_DETECTOR)
def english_capital(response: str) -> bool:
    """The entire response should be in English, and in all capital letters."""
    return response.isupper() and _language(response) == "en"


@checker("change_case:english_lowercase", needs=_DETECTOR)
def english_lowercase(response: str) -> bool:
    """The entire response should be in English, and in all lowercase letters. No capital letters
    are allowed.
    """
    return response.islower() and _language(response) == "en"


@checker("punctuation:no_comma")
def no_comma(response: str) -> bool:
    """In the entire response, refrain from the use of any commas."""
    return "," not in response


def _divided(response: str, divider: str) -> list[str] | None:
    """Return the stripped parts between dividers. An empty part at either end is dropped; None if
    another is empty.
    """
    parts = [part.strip() for part in response.split(divider)]
    parts = parts[0 if parts[0] else 1 :]
    parts = parts[: len(parts) if parts and parts[-1] else -1]
    return parts if all(parts) else None


def _language(text: str) -> str | None:
    """Return the language code that langdetect finds for a text, or None if the text has no
    letters.

    langdetect samples at random, so it is seeded: a text always gets the same result.
    """
    detector = importlib.import_module(_DETECTOR)
    detector.DetectorFactory.seed = 0
    try:
        return str(detector.detect(text))
    except detector.LangDetectException:
        return None
