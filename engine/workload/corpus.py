"""`Corpus`: English text for prompts.

The text is Python's language reference, which every machine with Python has: it needs no download
and is always the same. A corpus is read-only, so threads may share it.
"""

import json
import re
from functools import cache
from pathlib import Path


@cache
def questions() -> tuple[str, ...]:
    return tuple(json.loads(Path(__file__).with_name("questions.json").read_text("utf-8")))


def question(key: int) -> str:
    """Return the question that begins a chat; consecutive keys go through all questions."""
    return questions()[key % len(questions())]


class Corpus:
    """English text without end, from paragraphs of prose; passages may begin anywhere."""

    def __init__(self, text: str) -> None:
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
        self._text = " ".join(filter(_is_prose, paragraphs)) + " "
        if self._text == " ":
            raise ValueError("a corpus needs at least one paragraph of prose")

    @classmethod
    def english(cls) -> "Corpus":
        """Make a corpus from Python's language reference, which `help()` shows."""
        from pydoc_data.topics import topics  # large, and only a workload needs it

        return cls("\n\n".join(topics[name] for name in sorted(topics)))

    def __len__(self) -> int:
        return len(self._text)

    def passage(self, start: int, num_chars: int) -> str:
        """Return `num_chars` characters from the first word from `start` on (modulo the length)."""
        size = len(self._text)
        begin = (self._text.find(" ", start % size) + 1) % size
        taken = self._text[begin : begin + num_chars]
        while len(taken) < num_chars:
            taken += self._text[: num_chars - len(taken)]
        return taken


def _is_prose(paragraph: str) -> bool:
    num_letters = sum(each.isalpha() or each == " " for each in paragraph)
    return len(paragraph) > 60 and num_letters > 0.9 * len(paragraph)
