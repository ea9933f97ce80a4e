"""What a long prompt does to all other requests: prefilled whole, and in chunks.

Twice the same arrivals on the demo model, each against a fresh engine process: twelve chats stream,
and seven documents of 4,096 tokens arrive among them. Reported are the latencies of the chats. With
`--record FOLDER` each run is kept as `freeze.mcap` and `chunked.mcap`.

    python tests/bench/bench_freeze.py [--record recordings/samples]
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

from served import serving

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import Output
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.workload.arrivals import Corpus, PromptWriter
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.subscriber import Subscriber

MODES = {
    "freeze": ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"],
    "chunked": ["--max-num-batched-tokens", "256"],
}
# A cache that the work fills, so that the KV map has something to show.
SIZES = ["--kv-memory", "64MB", "--max-num-seqs", "16"]
NUM_CHATS = 12
CHAT_PROMPT, CHAT_OUTPUT = 96, 400
DOCUMENT_PROMPT, DOCUMENT_OUTPUT = 4096, 16
# So far apart that each stall is over before the next, and so near that more than one gap in a
# hundred of a chat is a stall: the 99th percentile is one of them then.
DOCUMENTS_AT_S = tuple(0.4 + 1.1 * i for i in range(7))


# In the files: a chunked step is well within the bound between tokens, a document that is prefilled
# whole takes several times as long.
LEVELS = {"slo_ttft_ms": 1500.0, "slo_itl_ms": 150.0}


class Planned(NamedTuple):
    at_s: float
    name: str
    num_prompt_tokens: int
    max_tokens: int


def plan() -> list[Planned]:
    """Chats arrive shortly after one another, documents while the chats stream."""
    chats = [Planned(0.03 * i, f"chat-{i}", CHAT_PROMPT, CHAT_OUTPUT) for i in range(NUM_CHATS)]
    documents = [
        Planned(at_s, f"document-{i}", DOCUMENT_PROMPT, DOCUMENT_OUTPUT)
        for i, at_s in enumerate(DOCUMENTS_AT_S)
    ]
    return sorted(chats + documents)


def run(mode: str, recording: Path | None) -> dict[str, list[float]]:
    """One engine, one run. Returns seconds: gaps between the tokens of chats (`itl`), times to the
    first token of chats and of documents, and the `wall` time of all of it."""
    with serving(*SIZES, *MODES[mode]) as engine, ControlClient(engine.endpoint) as client:
        subscriber = Subscriber(engine.endpoint)
        recorder = Recorder(subscriber, recording, levels=LEVELS) if recording else None
        subscriber.start()
        while subscriber.history.info is None:
            time.sleep(0.02)
        times = drive(client)
        time.sleep(0.5)
        if recorder is not None:
            recorder.stop()
            assert recorder.state == "finished", recorder.error
        subscriber.stop()
    return times


def drive(client: ControlClient) -> dict[str, list[float]]:
    """Send the plan and collect the latencies that a client sees."""
    info = client.info()
    writer = PromptWriter(Corpus.english(), info.chars_per_token or 4.0)
    times: dict[str, list[float]] = {"itl": [], "ttft_chat": [], "ttft_document": []}
    sent: dict[int, tuple[Planned, float]] = {}
    last_token_s: dict[int, float] = {}
    waiting = plan()
    num_open = len(waiting)
    start_s = time.monotonic()
    while num_open:
        while waiting and time.monotonic() - start_s >= waiting[0].at_s:
            planned = waiting.pop(0)
            submit = Submit(
                client_id=planned.name,
                prompt=writer.unique(len(sent) + 1, planned.num_prompt_tokens),
                max_prompt_tokens=planned.num_prompt_tokens,
                sampling=SamplingParams(max_tokens=planned.max_tokens, ignore_eos=True),
                with_text=False,
            )
            sent[client.send(submit)] = (planned, time.monotonic())
        received = client.receive(0.005)
        if received is None or not isinstance(received[1], Output):
            continue
        command_id, output = received
        now_s = time.monotonic()
        planned, sent_s = sent[command_id]
        kind = planned.name.partition("-")[0]
        if command_id in last_token_s:
            if kind == "chat":
                times["itl"].append(now_s - last_token_s[command_id])
        else:
            times[f"ttft_{kind}"].append(now_s - sent_s)
        last_token_s[command_id] = now_s
        num_open -= output.finish_reason is not None
    times["wall"] = [time.monotonic() - start_s]
    return times


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, help="folder for freeze.mcap and chunked.mcap")
    args = parser.parse_args()
    print(f"{NUM_CHATS} chats, {len(DOCUMENTS_AT_S)} documents of {DOCUMENT_PROMPT} tokens (ms)")
    print(f"{'':10}{'ITL p50':>9}{'p99':>9}{'max':>9}{'TTFT chat':>11}{'document':>10}{'all s':>8}")
    p99 = {}
    for mode in MODES:
        times = run(mode, args.record / f"{mode}.mcap" if args.record else None)
        p99[mode] = percentile(times["itl"], 0.99)
        figures = [percentile(times["itl"], share) for share in (0.5, 0.99, 1.0)]
        print(
            f"{mode:10}{figures[0]:9.0f}{figures[1]:9.0f}{figures[2]:9.0f}"
            f"{percentile(times['ttft_chat'], 0.5):11.0f}"
            f"{percentile(times['ttft_document'], 0.5):10.0f}{times['wall'][0]:8.1f}"
        )
    print(f"p99 ITL of freeze / chunked: {p99['freeze'] / p99['chunked']:.1f}")


if __name__ == "__main__":
    main()
