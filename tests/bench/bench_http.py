"""What HTTP costs: the same streams over HTTP and straight over the control socket, in turn.

One engine, one HTTP server, one client process that reads as little as it can; rounds alternate,
so that both sides see the same machine. Latencies are the client's: a burst of tokens counts as
gaps of nothing and one long one. Also what the HTTP process takes of a processor for a token.

    python tests/bench/bench_http.py [--streams 64] [--tokens 128] [--rounds 5] [--threads 1]
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import Output
from stepscope.engine.protocol.settings.sampling_params import SamplingParams

PROMPT_TOKENS = 32


@dataclass
class Round:
    """The figures of a client; times in seconds."""

    num_tokens: int = 0
    seconds: float = 0.0
    server_seconds: float = 0.0  # processor seconds of the HTTP process
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=0, help="of the engine, 0: all")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"{folder}/engine"
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "stepscope.tui.cli", "serve", "--http", "0"),
                *("--model", args.model, "--endpoint", endpoint, "--kv-memory", "256MB"),
                *("--threads", str(args.threads)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert server.stdout is not None
            url = next(
                match[1]
                for line in server.stdout
                if (match := re.search(r"on (http://[^/]+)/v1", line))
            )
            rounds: dict[str, list[Round]] = {"control socket": [], "HTTP": []}
            for number in range(args.rounds + 1):
                direct = over_control_socket(endpoint, args.streams, args.tokens)
                before_s = http_process_s(server.pid)
                http = asyncio.run(over_http(url, args.streams, args.tokens))
                http.server_seconds = http_process_s(server.pid) - before_s
                if number:  # the first is a warm-up
                    rounds["control socket"].append(direct)
                    rounds["HTTP"].append(http)
            report(rounds, args.streams, args.tokens)
        finally:
            server.terminate()
            server.wait()


def http_process_s(engine: int) -> float:
    """Processor seconds of the HTTP process so far; it is the engine's only child."""
    times = [child.cpu_times() for child in psutil.Process(engine).children()]
    return float(sum(each.user + each.system for each in times))


def over_control_socket(endpoint: str, num_streams: int, num_tokens: int) -> Round:
    result = Round()
    last: dict[int, float] = {}
    with ControlClient(endpoint) as client:
        client.info()
        start = time.perf_counter()
        for number in range(num_streams):
            client.send(
                Submit(
                    prompt_token_ids=[number % 97] * PROMPT_TOKENS,
                    sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
                )
            )
        num_open = num_streams
        while num_open:
            received = client.receive(60.0)
            assert received is not None, "the engine is silent"
            command_id, reply = received
            if not isinstance(reply, Output):
                continue
            note(result, last, command_id, start, len(reply.token_ids))
            num_open -= reply.finish_reason is not None
        result.seconds = time.perf_counter() - start
    return result


async def over_http(url: str, num_streams: int, num_tokens: int) -> Round:
    result = Round()
    last: dict[int, float] = {}
    where = urlsplit(url)

    async def stream(number: int) -> None:
        body = json.dumps(
            {
                "prompt": [number % 97] * PROMPT_TOKENS,
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: %s\r\ncontent-length: %d\r\n\r\n"
            % (where.netloc.encode(), len(body))
            + body
        )
        status = await reader.readline()
        assert b" 200 " in status, status
        tail = b""
        while b"[DONE]" not in tail:
            received = await reader.read(65536)
            assert received, "the connection was cut"
            text = tail + received
            note(result, last, number, start, text.count(b"data: {"))
            # Possibly the beginning of an event, none of it counted yet.
            tail = text[text.rfind(b"\n\n") + 2 :] if b"[DONE]" not in text else text
            assert b"data: {" not in tail or b"[DONE]" in tail
        writer.close()

    start = time.perf_counter()
    await asyncio.gather(*(stream(number) for number in range(num_streams)))
    result.seconds = time.perf_counter() - start
    return result


def note(result: Round, last: dict[int, float], stream: int, start: float, tokens: int) -> None:
    now = time.perf_counter()
    for _ in range(tokens):
        if stream in last:
            result.gaps.append(now - last[stream])
        else:
            result.first.append(now - start)
        last[stream] = now
    result.num_tokens += tokens


def report(rounds: dict[str, list[Round]], num_streams: int, num_tokens: int) -> None:
    print(f"{num_streams} streams of {num_tokens} tokens, median of the rounds")
    print(
        f"{'':16}{'tokens/s':>10}{'TTFT p50':>11}{'ITL mean':>11}{'ITL p50':>11}{'ITL p99':>11}  ms"
    )
    rows: dict[str, list[float]] = {}
    for name, all_rounds in rounds.items():
        row = []
        for value in (
            lambda r: r.num_tokens / r.seconds,
            lambda r: 1e3 * statistics.median(r.first),
            lambda r: 1e3 * statistics.fmean(r.gaps),
            lambda r: 1e3 * statistics.median(r.gaps),
            lambda r: 1e3 * statistics.quantiles(r.gaps, n=100)[98],
        ):
            row.append(statistics.median(value(each) for each in all_rounds))
        rows[name] = row
        print(f"{name:16}{row[0]:10,.0f}" + "".join(f"{each:11.2f}" for each in row[1:]))
    ratios = [http / direct for direct, http in zip(*rows.values(), strict=True)]
    print(f"{'ratio':16}{ratios[0]:10.2f}" + "".join(f"{each:11.2f}" for each in ratios[1:]))
    each_us = [1e6 * each.server_seconds / each.num_tokens for each in rounds["HTTP"]]
    print(f"{statistics.median(each_us):.1f} us of a processor for a token in the HTTP process")


if __name__ == "__main__":
    main()
