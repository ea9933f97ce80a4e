"""`Corpus`: English text for prompts.

The text is the documentation of Python's standard library, which every machine with Python has: it
needs no download and is always the same. A corpus is read-only, so threads may share it.

Reads `questions.json`: questions for chats with a trained model (`WorkloadSpec.questions`).
"""

import importlib
import inspect
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


_DOCUMENTED_MODULES = (
    "argparse", "asyncio", "collections", "concurrent.futures", "contextlib", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "heapq", "inspect", "io", "json",
    "logging", "os", "pathlib", "random", "re", "selectors", "shutil", "socket", "sqlite3",
    "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading",
    "unittest", "urllib.request", "zipfile",
)  # fmt: skip


class Corpus:
    """English text without end: passages may begin anywhere; after the end comes the beginning.

    Args:
        text: paragraphs separated by empty lines; only those that are prose are used.
    """

    def __init__(self, text: str) -> None:
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
        self._text = " ".join(filter(_is_prose, paragraphs)) + " "
        if self._text == " ":
            raise ValueError("a corpus needs at least one paragraph of prose")

    @classmethod
    def english(cls) -> "Corpus":
        """Make a corpus from Python's language reference, which `help()` shows.

        From docstrings if the reference is not installed.
        """
        try:
            topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        except ImportError:
            return cls.docstrings()
        return cls("\n\n".join(topics[name] for name in sorted(topics)))

    @classmethod
    def docstrings(cls) -> "Corpus":
        """Make a corpus from the docstrings of modules in the standard library."""
        found: dict[str, None] = {}  # an ordered set
        for name in _DOCUMENTED_MODULES:
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue  # some distributions do not install the whole library
            members = [value for _, value in sorted(vars(module).items())]
            for thing in [module, *members]:
                if isinstance(thing, str | int | tuple | list | dict):
                    continue  # constants have the docstring of their type
                if text := inspect.getdoc(thing):
                    found[text] = None
        return cls("\n\n".join(found))

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
    """Whether a paragraph is prose, not code, grammar or a drawn table."""
    num_letters = sum(each.isalpha() or each == " " for each in paragraph)
    return len(paragraph) > 60 and num_letters > 0.9 * len(paragraph)
