"""Words, sentences and lines of a response, by regular expressions that are linear in its length.

The published checkers tokenise with nltk's trained models, which must be downloaded. These rules need nothing; they
differ from nltk in rare cases only: unusual abbreviations, words that are joined by punctuation without a space.
"""

from __future__ import annotations

import re
import string

PUNCTUATION = string.punctuation + "“”‘’«»—–…‽¿¡、。！？"
_REMOVED = str.maketrans("", "", PUNCTUATION)
_END = re.compile(r"(?<![.!?…‽。！？])[.!?…‽。！？]++[\"'”’»)\]*_]*+(?=\s|\Z)")
_TOKEN = re.compile(r"\w+(?:['’.\-]\w+)*")
_TITLES_AND_SIGNS = "mr mrs ms dr prof rev hon st sr jr gen col capt lt sgt vs e.g i.e cf fig vol inc ltd corp approx"
_ABBREVIATIONS = frozenset(_TITLES_AND_SIGNS.split())
_LAST_WORD = re.compile(r"[\w.]*\Z")


def word_tokens(text: str) -> list[str]:
    r"""Maximal runs of word characters (``\w+``), as IFEval counts words: ``don't`` is two."""
    return re.findall(r"\w+", text)


def words(text: str) -> list[str]:
    """Pieces between white space without the punctuation around them; pieces of punctuation alone are dropped.

    >>> words("Well -- that's (almost) it!")
    ['Well', "that's", 'almost', 'it']
    """
    return [word for piece in text.split() if (word := piece.strip(PUNCTUATION))]


def tokens(text: str) -> list[str]:
    """Words with inner hyphens, apostrophes and periods: ``U.S.A.``, ``well-known`` and ``I'M`` are one each."""
    return _TOKEN.findall(text)


def without_punctuation(text: str) -> str:
    """``text`` with every punctuation character removed, so that ``1,000`` is ``1000``."""
    return text.translate(_REMOVED)


def sentences(text: str) -> list[str]:
    """Sentences with their closing punctuation; a line break alone ends none, as with nltk.

    A sentence ends with ``.``, ``!``, ``?`` or an ellipsis, closing quotes and brackets included, before white space
    or the end of the text. A single period ends none after a title, a known abbreviation or an initial; after ``etc.``,
    ``a.m.`` and the like it ends one unless a lower-case letter follows. What is left at the end is a sentence, too.
    """
    found, begin = [], 0
    for end in _END.finditer(text):
        if end[0] == "." and _goes_on(text, end.start()):
            continue
        found.append(text[begin : end.end()])
        begin = end.end()
    found.append(text[begin:])
    return [stripped for sentence in found if (stripped := sentence.strip())]


def _goes_on(text: str, period: int) -> bool:
    """Whether the sentence continues after the single period at this position."""
    rest = text[period + 1 : period + 33].lstrip()
    if not rest:
        return False
    before = _LAST_WORD.search(text[max(0, period - 32) : period])
    word = before[0] if before else ""
    initial = len(word) == 1 and word.isupper() and word != "I"
    return initial or word.lower() in _ABBREVIATIONS or (rest[0].islower() and ("." in word or word.lower() == "etc"))


def sentence_end(sentence: str) -> str:
    """The mark that ends a sentence, before closing quotes and brackets: ``.``, ``?`` or ``!``; "" for none of them."""
    last = sentence.rstrip("\"'”’»)]*_")[-1:]
    return last if last in ".?!" else ""


def lines(text: str) -> list[str]:
    """Lines that are not blank, with their indentation."""
    return [line for line in text.split("\n") if line.strip()]


def enclosed(text: str, opening: str, closing: str) -> list[str]:
    """What stands between ``opening`` and the next ``closing`` on the same line, without overlaps; linear in ``text``.

    >>> enclosed("[a] and [[b] [c", "[", "]")
    ['a', '[b']
    """
    found = []
    for line in text.split("\n"):
        begin = line.find(opening)
        while begin >= 0:
            inner = begin + len(opening)
            end = line.find(closing, inner)
            if end < 0:
                break
            found.append(line[inner:end])
            begin = line.find(opening, end + len(closing))
    return found
