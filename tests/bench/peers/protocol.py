"""What a contender speaks with the bench: one JSON line in, one out. Standard library only.

A contender runs in a process of its own, with its own threads, memory and packages. It loads its
model, says how it works, and then does one piece of work a line until its input ends. What the
libraries print goes to standard error.
"""

import ctypes
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1  # of prctl(2)


class Work(NamedTuple):
    """Requests of equal lengths, all submitted at once, greedy, without an end token."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    seed: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        # Of all fields, so that no prompt shares a prefix with other work: nothing is cached.
        source = random.Random(repr(self))
        return [
            [source.randrange(vocab_size) for _ in range(self.num_prompt_tokens)]
            for _ in range(self.num_requests)
        ]


class Done(NamedTuple):
    """Output tokens of each request, in the order of the prompts, and what it took."""

    outputs: list[list[int]]
    seconds: float
    details: dict[str, Any] = {}  # noqa: RUF012 - never changed


def pin(cores: list[int]) -> None:
    """Keep this process, and what it starts, on these cores. Call it before importing torch."""
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(len(cores))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def serve(load: Callable[[dict[str, Any]], tuple[Callable[[Work], Done], str]]) -> None:
    """Answer the bench. The one argument of the script is a JSON object: model, dtype, cores, ...

    Args:
        load: takes that object; returns what does a piece of work, and how in words.
    """
    # A stopped process does not see its input end: it must not outlive the bench.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # no print may break the protocol
    settings = json.loads(sys.argv[1])
    pin(settings["cores"])
    run, how = load(settings)
    _tell(answers, {"how": how})
    for line in sys.stdin:
        work = Work(**json.loads(line))
        done = run(work)
        _tell(answers, done._asdict())


def _tell(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
