"""Where n-gram speculation pays: text that copies against chat, one request at once and many.

    python tests/bench/bench_speculative.py [--texts copy] [--batches 1 8]

One engine; speculation is off, on with the default lookup, and on with a shorter one, in turns of
one run. The model is SmolLM2 where it has been fetched, else the demo model: its random weights
soon repeat themselves, so its figures say nothing of real text. A `copy` asks for a passage word
for word, greedy; a `chat` is a question at temperature 0.7, with a seed.

Requests of a batch begin together and end by themselves or after 96 tokens. Their prompts are in
the prefix cache, so the figures are of decoding.
"""

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import platformdirs

from stepscope.engine.bench.throughput import describe_machine
from stepscope.engine.loop.inbox import Call
from stepscope.engine.loop.outlet import TelemetrySink
from stepscope.engine.models.cache import smollm2
from stepscope.engine.process.serve import OpenEngine, open_engine
from stepscope.engine.protocol.commands import ChatMessage, Submit
from stepscope.engine.protocol.replies import AnyReply, Output
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import KnobValue, Telemetry
from stepscope.engine.telemetry.step_draft import StepDraft
from stepscope.engine.workload.arrivals import Corpus, question

TEXTS = ("copy", "chat")
BATCHES = (1, 8, 32)
PASSAGE_CHARS = 700
MAX_TOKENS = 96
MAX_MODEL_LEN = 1024  # in which the bytes of the demo model fit, too
LEAST_REQUESTS = 6  # at batch 1: one after another
OFF = "off"
MODES: dict[str, dict[str, KnobValue]] = {
    OFF: {"speculative": "off"},
    "on": {"speculative": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 5},
    "on 2-4": {"speculative": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
}


class Done(NamedTuple):
    """One batch of requests."""

    rate: float  # output tokens a second
    num_drafted: int
    num_accepted: int


class DraftCounter:
    """A sink that counts drafts and forwards messages."""

    def __init__(self, sink: TelemetrySink) -> None:
        self.num_drafted = self.num_accepted = 0
        self._sink = sink

    @property
    def next_sequence(self) -> int:
        return self._sink.next_sequence

    @property
    def num_dropped(self) -> int:
        return self._sink.num_dropped

    def publish(self, message: Telemetry) -> None:
        if isinstance(message, StepDraft):
            for draft in message.drafts or ():
                self.num_drafted += draft.num_drafted
                self.num_accepted += draft.num_accepted
        self._sink.publish(message)


class TokenCounter:
    """The client of all requests."""

    num_tokens = 0

    def reply(self, message: AnyReply) -> None:
        if isinstance(message, Output):
            self.num_tokens += len(message.token_ids)


def submits(text: str, num_requests: int) -> list[Submit]:
    corpus = Corpus.english()
    made = []
    for number in range(num_requests):
        prompt = question(number)
        if text == "copy":
            passage = corpus.passage(number * 5_000, PASSAGE_CHARS)
            prompt = f"Repeat this text word for word:\n\n{passage}"
        temperature, seed = (0.7, number) if text == "chat" else (0.0, None)
        made.append(
            Submit(
                messages=[ChatMessage(role="user", content=prompt)],
                sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed),
                with_text=False,
            )
        )
    return made


def run(
    engine: OpenEngine, calls: list[tuple[Submit, list[int]]], changes: dict[str, KnobValue]
) -> Done:
    """The requests of `calls`, all submitted at once."""
    core = engine.core
    core.set_knobs(changes)
    sink = core.sink
    assert sink is not None
    counter = DraftCounter(sink)
    core.publish_to(counter)
    client = TokenCounter()
    start_ns = core.clock()
    for submit, token_ids in calls:
        core.inbox.put(Call(submit, client, token_ids))
    while core.step():
        pass
    rate = client.num_tokens / (core.clock() - start_ns) * 1e9
    core.publish_to(sink)
    return Done(rate, counter.num_drafted, counter.num_accepted)


@contextlib.contextmanager
def engine_of(model: str, max_num_seqs: int) -> Iterator[OpenEngine]:
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=model,
            endpoint=f"ipc://{folder}/engine",
            kv_memory="1GB",
            max_model_len=MAX_MODEL_LEN,
            device="cpu",
        )
        knobs = Knobs(max_num_batched_tokens=512, max_num_seqs=max_num_seqs)
        with open_engine(config, knobs, progress=lambda what, share: None) as engine:
            yield engine


def measure(engine: OpenEngine, text: str, batch: int, num_rounds: int) -> dict[str, list[Done]]:
    """The rounds of each mode, in turns."""
    made = submits(text, max(batch, LEAST_REQUESTS))
    calls = [(submit, engine.intake.prepare(submit)) for submit in made]
    rounds: dict[str, list[Done]] = {mode: [] for mode in MODES}
    engine.core.set_knobs({"max_num_seqs": batch})
    run(engine, calls, MODES[OFF])  # fills the prefix cache
    for _ in range(num_rounds):
        for mode, changes in MODES.items():
            rounds[mode].append(run(engine, calls, changes))
    return rounds


def line(text: str, batch: int, mode: str, rounds: dict[str, list[Done]]) -> str:
    """Rates are medians of the rounds, drafts those of all rounds."""
    own, without = rounds[mode], rounds[OFF]
    num_drafted = sum(done.num_drafted for done in own)
    num_accepted = sum(done.num_accepted for done in own)
    accepted = f"{num_accepted / num_drafted:.0%}" if num_drafted else "-"
    ratios = [done.rate / off.rate for done, off in zip(own, without, strict=True)]
    against = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    rate = statistics.median(done.rate for done in own)
    return f"{text:5}{batch:>6}  {mode:7}{accepted:>9}{rate:>10.0f}{against:>22}"


def model_here() -> str:
    """SmolLM2 if it is in the user's cache: nothing is downloaded for a measurement."""
    cached = Path(platformdirs.user_cache_dir("stepscope")) / smollm2.VERSION
    return smollm2.NAME if cached.is_dir() else "demo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--rounds", type=int, default=3, help="of each mode")
    args = parser.parse_args()
    with engine_of(model_here(), max(args.batches)) as engine:
        info, machine = engine.core.info, describe_machine()
        how = f"{info.dtype}, {info.implementation}, {info.attention_backend}"
        print(f"{info.model} ({how}), {machine.num_cores} cores of {machine.cpu}")
        print(
            f"{'text':5}{'batch':>6}  {'mode':7}{'accepted':>9}{'tokens/s':>10}{'against off':>22}"
        )
        for text in args.texts:
            for batch in args.batches:
                rounds = measure(engine, text, batch, args.rounds)
                for mode in MODES:
                    print(line(text, batch, mode, rounds), flush=True)


if __name__ == "__main__":
    main()
