"""Where n-gram speculation pays: text that copies against chat, one request at once and many.

    python tests/bench/bench_speculative.py [--texts copy] [--batches 1 8] [--json out.json]

One engine; speculation is off, on with the default lookup, and on with a shorter one, in turns of
one run. The model is SmolLM2 where it has been fetched, else the demo model: its random weights
soon repeat themselves, so its figures say nothing of real text. A `copy` asks for a passage word
for word, greedy; a `chat` is a question at temperature 0.7, with a seed.

Requests of a batch begin together and end by themselves or after 96 tokens. Their prompts are in
the prefix cache, so the figures are of decoding. Several tokens of one step reach a request
together: ITL has one sample for them. `equal` are the requests with the same tokens as without
speculation: where two tokens are almost as likely as each other, a step of another size may round
to the other one.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

from stepscope.engine.bench.step_meter import Percentiles
from stepscope.engine.bench.throughput import describe_machine
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call
from stepscope.engine.loop.outlet import TelemetrySink
from stepscope.engine.models.cache import smollm2
from stepscope.engine.process.serve import OpenEngine, open_engine
from stepscope.engine.protocol.commands import ChatMessage, Submit
from stepscope.engine.protocol.replies import AnyReply, Output, Submitted
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import KnobValue, Telemetry
from stepscope.engine.scheduling.request import Request
from stepscope.engine.telemetry.step_draft import StepDraft
from stepscope.engine.workload.arrivals import Corpus, question

TEXTS = ("copy", "chat")
BATCHES = (1, 8, 32)
PASSAGE_CHARS = 700
MAX_TOKENS = 96
MAX_MODEL_LEN = 512
LEAST_REQUESTS = 6  # at batch 1: one after another
OFF = "off"
MODES: dict[str, dict[str, KnobValue]] = {
    OFF: {"speculative": "off"},
    "on": {"speculative": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 5},
    "on 2-4": {"speculative": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
}
HEADER = (
    f"{'text':5}{'batch':>6}  {'mode':7}{'accepted':>9}{'tokens a step':>14}{'tokens/s':>10}"
    f"{'against off':>22}{'ITL p50':>9}{'p99':>8}{'equal':>9}"
)


class Done(NamedTuple):
    """One batch of requests.

    Attributes:
        num_given: steps in which a request got tokens, of all requests.
        itl_ns: gaps between the tokens of a request that came in different steps.
    """

    seconds: float
    outputs: list[list[int]]
    num_given: int
    num_drafted: int
    num_accepted: int
    itl_ns: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.num_tokens / self.seconds


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


class Client:
    """Notes when the tokens of one request arrived."""

    def __init__(self, core: EngineCore) -> None:
        self.request: Request | None = None
        self.times_ns: list[int] = []
        self._core = core

    def reply(self, message: AnyReply) -> None:
        if isinstance(message, Submitted):
            self.request = self._core.scheduler.requests[message.request_id]
        elif isinstance(message, Output) and message.token_ids:
            assert self.request is not None
            assert self.request.last_token_ns is not None
            self.times_ns.append(self.request.last_token_ns)


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


def run(engine: OpenEngine, calls: list[tuple[Submit, list[int]]], knobs: Knobs) -> Done:
    """The requests of `calls`, all submitted at once."""
    core = engine.core
    core.set_knobs(knobs)
    sink = core.sink
    assert sink is not None
    counter = DraftCounter(sink)
    core.publish_to(counter)
    clients = [Client(core) for _ in calls]
    start_ns = core.clock()
    for (submit, token_ids), client in zip(calls, clients, strict=True):
        core.inbox.put(Call(submit, client, token_ids))
    while core.step():
        pass
    core.publish_to(sink)
    gaps = [after - before for client in clients for before, after in pairwise(client.times_ns)]
    return Done(
        seconds=(max(client.times_ns[-1] for client in clients) - start_ns) / 1e9,
        outputs=[client.request.output_token_ids for client in clients if client.request],
        num_given=sum(len(client.times_ns) for client in clients),
        num_drafted=counter.num_drafted,
        num_accepted=counter.num_accepted,
        itl_ns=gaps,
    )


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
    core = engine.core
    knobs = core.scheduler.knobs.changed({"max_num_seqs": batch}, core.limits)
    rounds: dict[str, list[Done]] = {mode: [] for mode in MODES}
    run(engine, calls, knobs.changed(MODES[OFF], core.limits))  # fills the prefix cache
    for _ in range(num_rounds):
        for mode, changes in MODES.items():
            rounds[mode].append(run(engine, calls, knobs.changed(changes, core.limits)))
    return rounds


def figures(mode: str, rounds: dict[str, list[Done]]) -> dict[str, Any]:
    """Figures of one mode; rates are medians of the rounds, all else covers the rounds together."""
    own, without = rounds[mode], rounds[OFF]
    num_drafted = sum(done.num_drafted for done in own)
    itl = Percentiles.of_ns([gap for done in own for gap in done.itl_ns])
    ratios = [done.rate / off.rate for done, off in zip(own, without, strict=True)]
    pairs = list(zip(own[0].outputs, without[0].outputs, strict=True))
    return {
        "accepted": sum(done.num_accepted for done in own) / num_drafted if num_drafted else None,
        "tokens_a_step": sum(done.num_tokens for done in own) / sum(done.num_given for done in own),
        "tokens_per_s": statistics.median(done.rate for done in own),
        "against_off": [min(ratios), statistics.median(ratios), max(ratios)],
        "itl_p50_ms": None if itl is None else itl.p50,
        "itl_p99_ms": None if itl is None else itl.p99,
        "num_equal": sum(output == expected for output, expected in pairs),
        "num_requests": len(pairs),
    }


def line(text: str, batch: int, mode: str, of: dict[str, Any]) -> str:
    accepted = "-" if of["accepted"] is None else f"{of['accepted']:.0%}"
    low, middle, high = of["against_off"]
    against = "" if mode == OFF else f"{middle:.2f} ({low:.2f} to {high:.2f})"
    equal = f"{of['num_equal']}/{of['num_requests']}"
    return (
        f"{text:5}{batch:>6}  {mode:7}{accepted:>9}{of['tokens_a_step']:>14.2f}"
        f"{of['tokens_per_s']:>10.0f}{against:>22}{of['itl_p50_ms']:>9.1f}{of['itl_p99_ms']:>8.1f}"
        f"{equal:>9}"
    )


def model_here() -> str:
    """SmolLM2 if it is in the user's cache: nothing is downloaded for a measurement."""
    cached = Path(platformdirs.user_cache_dir("stepscope")) / smollm2.VERSION
    return smollm2.NAME if cached.is_dir() else "demo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--rounds", type=int, default=3, help="of each mode")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    with engine_of(model_here(), max(args.batches)) as engine:
        info, machine = engine.core.info, describe_machine()
        how = f"{info.dtype}, {info.implementation}, {info.attention_backend}"
        print(f"{info.model} ({how}), {machine.num_cores} cores of {machine.cpu}")
        print(HEADER)
        for text in args.texts:
            for batch in args.batches:
                rounds = measure(engine, text, batch, args.rounds)
                for mode in MODES:
                    of = figures(mode, rounds)
                    print(line(text, batch, mode, of), flush=True)
                    found.append({"text": text, "batch": batch, "mode": mode, **of})
    if args.json:
        args.json.write_text(json.dumps({"model": info.model, "figures": found}, indent=1))


if __name__ == "__main__":
    main()
