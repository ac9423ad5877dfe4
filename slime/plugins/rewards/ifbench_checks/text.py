"""Split a response into words, sentences and lines, with regular expressions that take linear time.

The published checkers use nltk's trained models, which must be downloaded. The rules here need no download. They differ
from nltk only in rare cases: unusual abbreviations, and words that are joined by punctuation without a space.
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
    r"""Return the runs of word characters (``\w+``). IFEval counts words this way; ``don't`` is two."""
    return re.findall(r"\w+", text)


def words(text: str) -> list[str]:
    """Split at white space and remove the punctuation around each word. Pieces of only punctuation are dropped.

    >>> words("Well -- that's (almost) it!")
    ['Well', "that's", 'almost', 'it']
    """
    return [word for piece in text.split() if (word := piece.strip(PUNCTUATION))]


def tokens(text: str) -> list[str]:
    """Return the words, including inner hyphens, apostrophes and periods: ``U.S.A``, ``well-known`` and ``I'M``."""
    return _TOKEN.findall(text)


def without_punctuation(text: str) -> str:
    """Remove all punctuation characters: ``1,000`` becomes ``1000``."""
    return text.translate(_REMOVED)


def sentences(text: str) -> list[str]:
    """Split a text into sentences, with their closing punctuation. As in nltk, a line break alone ends no sentence.

    A sentence ends with ``.``, ``!``, ``?`` or an ellipsis (and closing quotes and brackets) before white space or the
    end of the text. A single period after a title, a known abbreviation or an initial does not end a sentence. After
    ``etc.``, ``a.m.`` and the like, it ends one unless a lower-case letter follows. The rest of the text after the last
    such end is a sentence, too.
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
    """Return the mark before closing quotes and brackets that ends a sentence: ``.``, ``?`` or ``!``, else ""."""
    last = sentence.rstrip("\"'”’»)]*_")[-1:]
    return last if last in ".?!" else ""


def lines(text: str) -> list[str]:
    """Return the lines that are not blank, with their indentation."""
    return [line for line in text.split("\n") if line.strip()]


def enclosed(text: str, opening: str, closing: str) -> list[str]:
    """Return the texts between ``opening`` and the next ``closing`` on the same line, without overlaps, in linear time.

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
