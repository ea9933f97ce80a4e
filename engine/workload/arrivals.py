"""Makes the requests of a workload, with their arrival times, prompts and lengths.

Requests are made lazily, one at a time, from a seed: the same arguments give the same texts at the
same times after the start. `load.py` sends them.
"""

import json
import math
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec

from stepscope.engine.protocol.commands import ChatMessage, Submit
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import KnobValue, StepCosts
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.workload.traces import TraceRow


@cache
def questions() -> tuple[str, ...]:
    """Return what chats with a model that speaks begin with; consecutive keys go through all."""
    return tuple(json.loads(Path(__file__).with_name("questions.json").read_text("utf-8")))


def english() -> str:
    """Return the paragraphs of prose in Python's language reference, which `help()` shows."""
    from pydoc_data.topics import topics  # large, and only a workload needs it

    text = "\n\n".join(topics[name] for name in sorted(topics))
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    return " ".join(filter(_is_prose, paragraphs)) + " "


def _is_prose(paragraph: str) -> bool:
    num_letters = sum(each.isalpha() or each == " " for each in paragraph)
    return len(paragraph) > 60 and num_letters > 0.9 * len(paragraph)


def in_words(costs: StepCosts) -> str:
    """Describe the step times in `costs` in a line, for people who wonder how fast it is."""
    return (
        f"decode of {costs.num_streams} streams {_ms(costs.decode_ms)} a step, "
        f"prefill of {costs.num_prefill_tokens} tokens {_ms(costs.prefill_ms)}"
    )


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value < 10 else f"{value:,.0f} ms"


_SYSTEM_PROMPT = (
    "You are a helpful assistant who knows the Python language well. Answer in plain words, say "
    "what you are not sure of, and show a short example where it helps. The question follows. "
)
_SPARE_CHARS = 1.3  # reserve, because the characters per token vary around their mean
_OFFSET_STEP = 7_919  # a prime, so that the texts of neighbouring keys begin far apart


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to be sent, and when.

    `prompt` is long enough for `num_prompt_tokens` tokens, by a generous estimate; the engine cuts
    the prompt to exactly that many. It is empty until `synthetic` writes it.
    """

    offset_s: float  # since the start of the workload
    name: str
    kind: Literal["chat", "document", "trace"]
    num_prompt_tokens: int
    max_tokens: int
    prompt: str = ""
    key: int = 0  # selects its text
    num_shared_tokens: int = 0  # tokens of the system prompt that all chats share
    is_cut: bool = False  # it was cut, because it was too long for the model
    temperature: float = 0.0
    seed: int | None = None
    is_question: bool = False  # `prompt` is a question for the chat template, and is not cut

    def submit(self) -> Submit:
        """Make the `Submit` command; without EOS, so that outputs have the workload's length."""
        is_question = self.is_question
        return Submit(
            client_id=self.name,
            prompt=None if is_question else self.prompt,
            messages=[ChatMessage(role="user", content=self.prompt)] if is_question else None,
            max_prompt_tokens=None if is_question else self.num_prompt_tokens,
            sampling=SamplingParams(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                seed=self.seed,
                ignore_eos=not is_question,
            ),
            fit_max_tokens=is_question,
            with_text=False,
        )


class PromptWriter:
    """Cuts prompts of a given number of tokens out of English text, without a tokenizer."""

    def __init__(self, chars_per_token: float) -> None:
        self._text = english()
        self._chars_per_token = chars_per_token

    def unique(self, key: int, num_tokens: int) -> str:
        """Return a text whose beginning is different for every key."""
        # The number tells two prompts apart if they get the same passage of the corpus.
        return self._enough(f"({key}) ", key, num_tokens)

    def chat(self, key: int, num_tokens: int, num_shared_tokens: int) -> str:
        """Return the system prompt that all chats share, followed by unique text."""
        num_shared = min(num_shared_tokens, num_tokens - 1)
        repeats = math.ceil(num_shared * self._chars_per_token / len(_SYSTEM_PROMPT))
        shared = (_SYSTEM_PROMPT * repeats)[: self._num_chars(num_shared)]
        return self._enough(f"{shared} ({key}) ", key, num_tokens)

    def blocks(self, hash_ids: tuple[int, ...], num_tokens: int, block_tokens: int) -> str:
        """Return a text with one passage for each block id."""
        num_chars = self._num_chars(block_tokens)
        parts = []
        for hash_id in hash_ids[: math.ceil(num_tokens / block_tokens)]:
            head = f"({hash_id}) "
            parts.append(head + self._passage(hash_id, num_chars - len(head)))
        return self._enough("".join(parts), hash_ids[-1] + 1 if hash_ids else 0, num_tokens)

    def _enough(self, text: str, key: int, num_tokens: int) -> str:
        wanted = self._num_chars(num_tokens * _SPARE_CHARS) + 16
        return text + self._passage(key, max(0, wanted - len(text)))

    def _passage(self, key: int, num_chars: int) -> str:
        """Return text from a word on that `key` selects; after the end, it begins again."""
        size = len(self._text)
        begin = (self._text.find(" ", key * _OFFSET_STEP % size) + 1) % size
        taken = self._text[begin : begin + num_chars]
        while len(taken) < num_chars:
            taken += self._text[: num_chars - len(taken)]
        return taken

    def _num_chars(self, num_tokens: float) -> int:
        return math.ceil(num_tokens * self._chars_per_token)


def mix(spec: WorkloadSpec, max_model_len: int | None) -> Iterator[Arrival]:
    """Yield `spec.num_requests` chats and documents (or no end of them) with Poisson arrivals."""
    source = random.Random(spec.seed)
    # Texts depend on the seed, too; otherwise a second run would hit the prefixes of the first.
    first_key = source.randrange(1_000_000) * 1_000
    offset_s = 0.0
    for number in count() if spec.num_requests is None else range(spec.num_requests):
        offset_s += source.expovariate(spec.rate)
        is_document = source.random() < spec.document_share
        mean, spread = (spec.document_tokens, 0.2) if is_document else (spec.chat_tokens, 0.5)
        num_prompt_tokens, max_tokens, is_cut = fit(
            _log_normal(source, mean, spread),
            _log_normal(source, spec.output_tokens, 0.5),
            max_model_len,
        )
        kind: Literal["chat", "document"] = "document" if is_document else "chat"
        yield Arrival(
            offset_s=offset_s,
            name=f"{kind}-{number}",
            kind=kind,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            key=first_key + number,
            num_shared_tokens=0 if is_document else spec.chat_tokens // 4,
            is_cut=is_cut,
            temperature=spec.temperature,
            seed=source.getrandbits(62) if spec.temperature else None,
        )


def synthetic(
    spec: WorkloadSpec, writer: PromptWriter, max_model_len: int | None
) -> Iterator[Arrival]:
    """Yield the requests of a synthetic mix, with text."""
    for each in mix(spec, max_model_len):
        is_question = spec.questions and each.kind == "chat"
        if is_question:
            prompt = questions()[each.key % len(questions())]
        elif each.kind == "document":
            prompt = writer.unique(each.key, each.num_prompt_tokens)
        else:
            prompt = writer.chat(each.key, each.num_prompt_tokens, each.num_shared_tokens)
        yield replace(each, prompt=prompt, is_question=is_question)


def from_trace(
    rows: Iterable[TraceRow],
    writer: PromptWriter,
    max_model_len: int | None,
    time_scale: float = 1.0,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yield the requests of a trace, with text.

    Args:
        writer: makes the text; rows with equal `hash_ids` get equal text.
        time_scale: factor on all offsets: 0.1 replays ten times as fast.
    """
    first_key = random.Random(seed).randrange(1_000_000) * 1_000
    for number, row in enumerate(rows):
        num_prompt_tokens, max_tokens, is_cut = fit(
            row.num_prompt_tokens, row.num_output_tokens, max_model_len
        )
        if row.hash_ids is None:
            prompt = writer.unique(first_key + number, num_prompt_tokens)
        else:
            prompt = writer.blocks(row.hash_ids, num_prompt_tokens, row.block_tokens)
        offset_s, name = row.offset_s * time_scale, f"trace-{number}"
        yield Arrival(offset_s, name, "trace", num_prompt_tokens, max_tokens, prompt, is_cut=is_cut)


def fit(
    num_prompt_tokens: int, max_tokens: int, max_model_len: int | None
) -> tuple[int, int, bool]:
    """Return lengths of prompt and output that fit into the model, and whether they were cut."""
    if max_model_len is None or num_prompt_tokens + max_tokens <= max_model_len:
        return num_prompt_tokens, max_tokens, False
    max_tokens = min(max_tokens, max(1, max_model_len // 2))
    return min(num_prompt_tokens, max(1, max_model_len - max_tokens)), max_tokens, True


def describe(spec: WorkloadSpec) -> str:
    """Describe a synthetic mix in a few words, for a status line."""
    share = f", {spec.document_share:.0%} documents of {spec.document_tokens}"
    documents = share if spec.document_share else ""
    # The limit comes first: it decides the load, and narrow lines are cut at their end.
    most = "" if spec.max_concurrency is None else f"at most {spec.max_concurrency} under way, "
    chats = "questions" if spec.questions else f"chats of {spec.chat_tokens} tokens"
    heat = f", at temperature {spec.temperature:g}" if spec.temperature else ""
    outputs = f"outputs of {spec.output_tokens}{heat}"
    return f"{most}{spec.rate:g} requests/s: {chats}{documents}, {outputs}"


def fields_of(spec: WorkloadSpec) -> dict[str, KnobValue]:
    """Return the fields of a mix as telemetry shows them, without those that are None."""
    values = msgspec.structs.asdict(spec)
    return {name: value for name, value in values.items() if value is not None}


def _log_normal(source: random.Random, mean: float, spread: float) -> int:
    return max(1, round(source.lognormvariate(math.log(mean) - spread * spread / 2, spread)))
