"""Reads `questions.json`: questions for chats with a trained model (`WorkloadSpec.questions`)."""

import json
from functools import cache
from pathlib import Path


@cache
def questions() -> tuple[str, ...]:
    return tuple(json.loads(Path(__file__).with_name("questions.json").read_text("utf-8")))


def question(key: int) -> str:
    """Return the question that begins a chat; consecutive keys go through all questions."""
    return questions()[key % len(questions())]
