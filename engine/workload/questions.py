"""The questions that are chats of a workload whose model speaks: `questions.json`, in any order."""

import json
from functools import cache
from pathlib import Path


@cache
def questions() -> tuple[str, ...]:
    return tuple(json.loads(Path(__file__).with_name("questions.json").read_text("utf-8")))


def question(key: int) -> str:
    """The question of a chat; keys one after another ask all of them."""
    return questions()[key % len(questions())]
