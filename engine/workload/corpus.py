"""`Corpus`: the English text that prompts are cut from.

It is the standard library's own documentation, which is there wherever Python is: no download, no
text shipped, nothing random. A corpus is read-only and shared freely between threads.
"""

import importlib
import inspect
import re

_DOCUMENTED_MODULES = (
    "argparse", "asyncio", "collections", "concurrent.futures", "contextlib", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "heapq", "inspect", "io", "json",
    "logging", "os", "pathlib", "random", "re", "selectors", "shutil", "socket", "sqlite3",
    "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading",
    "unittest", "urllib.request", "zipfile",
)  # fmt: skip


class Corpus:
    """English text that is read as a ring: a passage may begin anywhere and never runs out.

    Args:
        text: paragraphs with empty lines between them, of which those that are prose are taken.
    """

    def __init__(self, text: str) -> None:
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
        self._text = " ".join(filter(_is_prose, paragraphs)) + " "
        if self._text == " ":
            raise ValueError("a corpus needs at least one paragraph of prose")

    @classmethod
    def english(cls) -> "Corpus":
        """The language reference that `help()` shows, or the docstrings where it is left out."""
        try:
            topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        except ImportError:
            return cls.docstrings()
        return cls("\n\n".join(topics[name] for name in sorted(topics)))

    @classmethod
    def docstrings(cls) -> "Corpus":
        """What the modules of the standard library say of themselves."""
        found: dict[str, None] = {}  # in order, each text once
        for name in _DOCUMENTED_MODULES:
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue  # some distributions split the library
            members = [value for _, value in sorted(vars(module).items())]
            for thing in [module, *members]:
                if isinstance(thing, str | int | tuple | list | dict):
                    continue  # a constant shows the docstring of its type
                if text := inspect.getdoc(thing):
                    found[text] = None
        return cls("\n\n".join(found))

    def __len__(self) -> int:
        return len(self._text)

    def passage(self, start: int, num_chars: int) -> str:
        """`num_chars` characters from the first word at or after `start` (modulo the length)."""
        size = len(self._text)
        begin = (self._text.find(" ", start % size) + 1) % size
        taken = self._text[begin : begin + num_chars]
        while len(taken) < num_chars:
            taken += self._text[: num_chars - len(taken)]
        return taken


def _is_prose(paragraph: str) -> bool:
    """Sentences, as against code, grammar and drawn tables."""
    num_letters = sum(each.isalpha() or each == " " for each in paragraph)
    return len(paragraph) > 60 and num_letters > 0.9 * len(paragraph)
