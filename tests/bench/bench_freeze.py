"""What a long prompt does to all other requests: prefilled whole, and in chunks.

Twice the same arrivals on the demo model, each against a fresh engine process: twelve chats stream,
and seven documents of 4,096 tokens arrive among them. Reported are the latencies of the chats. With
`--record FOLDER` each run is kept as `freeze.mcap` and `chunked.mcap`.

    python tests/bench/bench_freeze.py [--record recordings/samples]
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from common import parser, percentile
from served import serving

from stepscope.engine.client.client import ControlClient
from stepscope.engine.workload.arrivals import Arrival, PromptWriter
from stepscope.engine.workload.load import LoadGenerator, LoadReport
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.subscriber import Subscriber

MODES = {
    "freeze": ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"],
    "chunked": ["--max-num-batched-tokens", "256"],
}
# A cache that the work fills, so that the KV map has something to show.
SIZES = ["--kv-memory", "64MB", "--max-num-seqs", "16"]
NUM_CHATS, CHAT_PROMPT, CHAT_OUTPUT = 12, 96, 400
NUM_DOCUMENTS, DOCUMENT_PROMPT, DOCUMENT_OUTPUT = 7, 4096, 16
# In the files: a chunked step is well within the bound between tokens, a document that is prefilled
# whole takes several times as long.
LEVELS = {"slo_ttft_ms": 1500.0, "slo_itl_ms": 150.0}


def plan(kind: Literal["chat", "document"], writer: PromptWriter) -> list[Arrival]:
    """Chats arrive shortly after one another, documents while the chats stream.

    Documents are so far apart that each stall is over before the next, and so near that more than
    one gap in a hundred of a chat is a stall: the 99th percentile is one of them then.
    """
    if kind == "chat":
        times, first, sizes = [0.03 * i for i in range(NUM_CHATS)], 1, (CHAT_PROMPT, CHAT_OUTPUT)
    else:
        times, first = [0.4 + 1.1 * i for i in range(NUM_DOCUMENTS)], 1 + NUM_CHATS
        sizes = (DOCUMENT_PROMPT, DOCUMENT_OUTPUT)
    return [
        Arrival(at_s, f"{kind}-{i}", kind, *sizes, prompt=writer.unique(first + i, sizes[0]))
        for i, at_s in enumerate(times)
    ]


def drive(endpoint: str) -> list[LoadReport]:
    """The latencies that the clients of chats and of documents see."""
    with ControlClient(endpoint) as chats, ControlClient(endpoint) as documents:
        writer = PromptWriter(chats.info().chars_per_token or 4.0)
        loads = [
            LoadGenerator(chats, iter(plan("chat", writer))),
            LoadGenerator(documents, iter(plan("document", writer))),
        ]
        with ThreadPoolExecutor(len(loads)) as pool:
            return list(pool.map(LoadGenerator.run, loads))


def run(mode: str, recording: Path | None) -> list[LoadReport]:
    """One engine, one run."""
    with serving(*SIZES, *MODES[mode]) as engine:
        subscriber = Subscriber(engine.endpoint)
        recorder = Recorder(subscriber, recording, levels=LEVELS) if recording else None
        subscriber.start()
        while subscriber.history.info is None:
            time.sleep(0.02)
        reports = drive(engine.endpoint)
        time.sleep(0.5)
        if recorder is not None:
            recorder.stop()
            assert recorder.state == "finished", recorder.error
        subscriber.stop()
    return reports


def main() -> None:
    given = parser(__doc__, record=Path).parse_args()
    print(f"{NUM_CHATS} chats, {NUM_DOCUMENTS} documents of {DOCUMENT_PROMPT} tokens (ms)")
    print(f"{'':10}{'ITL p50':>9}{'p99':>9}{'max':>9}{'TTFT chat':>11}{'document':>10}{'all s':>8}")
    p99 = []
    for mode in MODES:
        chats, documents = run(mode, given.record / f"{mode}.mcap" if given.record else None)
        itl_ms = [1e3 * percentile(chats.itl_s, share) for share in (0.5, 0.99, 1.0)]
        ttft_ms = [1e3 * percentile(each.ttft_s, 0.5) for each in (chats, documents)]
        p99.append(itl_ms[1])
        print(
            f"{mode:10}" + "".join(f"{ms:9.0f}" for ms in itl_ms) + f"{ttft_ms[0]:11.0f}"
            f"{ttft_ms[1]:10.0f}{max(chats.duration_s, documents.duration_s):8.1f}"
        )
    print(f"p99 ITL of freeze / chunked: {p99[0] / p99[1]:.1f}")


if __name__ == "__main__":
    main()
