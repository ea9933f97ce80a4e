"""What HTTP costs: processor time of the HTTP process for a token of many streams.

The client reads as little as it can.

    python tests/bench/bench_http.py [--streams 64] [--threads 1]
"""

import asyncio
import json
import statistics
from urllib.parse import urlsplit

from common import cpu_s, parser
from served import serving

NUM_ROUNDS, NUM_TOKENS, PROMPT_TOKENS = 5, 128, 32


def main() -> None:
    given = parser(__doc__, streams=64, threads=0).parse_args()
    options = ("--http", "0", "--kv-memory", "256MB", "--threads", str(given.threads))
    with serving(*options) as server:
        spent_us = []
        for _ in range(NUM_ROUNDS + 1):
            before_s = cpu_s(server.http_process)
            asyncio.run(read_streams(server.url, given.streams))
            spent_s = cpu_s(server.http_process) - before_s
            spent_us.append(spent_s * 1e6 / (given.streams * NUM_TOKENS))
    print(f"{given.streams} streams of {NUM_TOKENS} tokens, median of {NUM_ROUNDS} rounds")
    each_us = statistics.median(spent_us[1:])  # the first is a warm-up
    print(f"{each_us:.1f} us of a processor for a token in the HTTP process")


async def read_streams(url: str, num_streams: int) -> None:
    where = urlsplit(url)

    async def stream(number: int) -> None:
        prompt = [number % 97] * PROMPT_TOKENS
        wanted = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
        body = json.dumps({**wanted, "ignore_eos": True}).encode()
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: %s\r\ncontent-length: %d\r\n\r\n%s"
            % (where.netloc.encode(), len(body), body)
        )
        status = await reader.readline()
        assert b" 200 " in status, status
        await reader.readuntil(b"[DONE]")
        writer.close()

    await asyncio.gather(*map(stream, range(num_streams)))


if __name__ == "__main__":
    main()
