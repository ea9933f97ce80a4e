"""What HTTP costs: processor time of the HTTP process for a token of many streams.

The client reads as little as it can.

    python tests/bench/bench_http.py [--streams 64] [--threads 1]
"""

import argparse
import asyncio
import json
import statistics
from urllib.parse import urlsplit

from served import serving

NUM_ROUNDS, NUM_TOKENS, PROMPT_TOKENS = 5, 128, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--threads", default="0", help="of the engine, 0: all")
    args = parser.parse_args()
    options = ("--http", "0", "--kv-memory", "256MB", "--threads", args.threads)
    with serving(*options) as server:
        process = server.http_process

        def spent_s() -> float:
            times = process.cpu_times()
            return float(times.user + times.system)

        spent_us = []
        for _ in range(NUM_ROUNDS + 1):
            before_s = spent_s()
            asyncio.run(read_streams(server.url, args.streams))
            spent_us.append((spent_s() - before_s) * 1e6 / (args.streams * NUM_TOKENS))
    print(f"{args.streams} streams of {NUM_TOKENS} tokens, median of {NUM_ROUNDS} rounds")
    each_us = statistics.median(spent_us[1:])  # the first is a warm-up
    print(f"{each_us:.1f} us of a processor for a token in the HTTP process")


async def read_streams(url: str, num_streams: int) -> None:
    where = urlsplit(url)

    async def stream(number: int) -> None:
        body = json.dumps(
            {
                "prompt": [number % 97] * PROMPT_TOKENS,
                "max_tokens": NUM_TOKENS,
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
        await reader.readuntil(b"[DONE]")
        writer.close()

    await asyncio.gather(*map(stream, range(num_streams)))


if __name__ == "__main__":
    main()
