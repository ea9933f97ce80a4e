"""How long the sampler takes for a step, by kind of sampling, rows and vocabulary.

    .venv/bin/python tests/bench/bench_sampler.py [--threads N] [--torch] [--device cuda]

Milliseconds, the least of several runs. `host` is what the engine uses on a CPU (NumPy, one row
after the other, one thread); with `--torch` the operations meant for a device run beside it, in
turns, on the same CPU. On a machine with other work, look at the ratio of the two columns.
"""

import argparse
import time

import numpy as np
import torch

from stepscope.engine.execution.sampling.sampler import Sampler
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.scheduling.request import Request
from stepscope.engine.text.stop_strings import StopText
from stepscope.engine.text.tokenizer import TextStream

KINDS: dict[str, dict[str, object]] = {
    "greedy": {},
    "greedy, 1 in 8 drawn": {},
    "temperature": {"temperature": 0.8},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "three penalties": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "logprobs 5": {"logprobs": 5},
}
NUM_PROMPT = 1000


def requests_of(kind: str, num_rows: int, vocab_size: int) -> list[Request]:
    rng = np.random.default_rng(1)
    requests = []
    for row in range(num_rows):
        params = KINDS[kind]
        if kind == "greedy, 1 in 8 drawn" and row % 8 == 0:
            params = {"temperature": 0.8}
        prompt = rng.integers(0, vocab_size, NUM_PROMPT).tolist()
        requests.append(Request(row, prompt, SamplingParams(**params), arrival_ns=0))  # type: ignore[arg-type]
    return requests


def logits_of(shape: str, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Logits like a trained model's (a few likely tokens, a long tail) or nearly flat ones."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * (2.5 if shape == "llm" else 1)
    if shape == "llm":
        logits[:, :20] += torch.linspace(14, 6, 20)
    return logits[:, torch.randperm(vocab_size, generator=generator)].to(torch.bfloat16)


def least_ms(run: object, seconds: float = 0.25) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        run()  # type: ignore[operator]
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            return best * 1e3


def print_samplers(rows: list[int], vocabs: list[int], with_torch: bool, device: str) -> None:
    heads = ["host"] if device == "cpu" else []
    heads += ["torch"] if with_torch or device != "cpu" else []
    print(f"{'':24}" + "".join(f"{f'{r} x {v}':>18}" for v in vocabs for r in rows))
    for shape in ("llm", "flat"):
        for kind in KINDS:
            if shape == "flat" and "top-p" not in kind:
                continue
            cells = []
            for vocab_size in vocabs:
                for num_rows in rows:
                    logits = logits_of(shape, num_rows, vocab_size).to(device)
                    requests = requests_of(kind, num_rows, vocab_size)
                    times = []
                    for head in heads:
                        sampler = Sampler(0, on_host=head == "host")
                        sampler.sample(logits, requests)

                        def run(sampler: Sampler = sampler) -> None:
                            sampler.sample(logits, requests)  # noqa: B023

                        times.append(least_ms(run))
                    cells.append(" /".join(f"{ms:.3f}" for ms in times))
            name = kind if shape == "llm" else f"{kind}, flat"
            print(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    print("cells: " + " / ".join(heads))


def print_stop_strings() -> None:
    words = [" the", " of", "ing", " harbour", "\n", ".", " quiet", "ed"]

    def decode(token_ids: object) -> str:
        return "".join(words[token_id] for token_id in token_ids)  # type: ignore[attr-defined]

    token_ids = np.random.default_rng(1).integers(0, len(words), 2000).tolist()
    print("\nstop strings: microseconds a token, decoding included")
    for stops in (("\n\nUser:",), ("\n\n", "###", "User:", "</s>"), tuple("xyzXYZ01234!?&%#")):
        best = float("inf")
        for _ in range(20):
            text = StopText(TextStream(decode), stops, False)
            start = time.perf_counter()
            for token_id in token_ids:
                text.push(token_id, True)
            best = min(best, time.perf_counter() - start)
        print(f"  {len(stops):2} strings  {best / len(token_ids) * 1e6:.2f}")
    best = float("inf")
    for _ in range(20):
        stream = TextStream(decode)
        start = time.perf_counter()
        for token_id in token_ids:
            stream.push((token_id,))
        best = min(best, time.perf_counter() - start)
    print(f"  decoding   {best / len(token_ids) * 1e6:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--torch", action="store_true", help="measure the device's way too")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 49152, 151936])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        print_samplers(arguments.rows, arguments.vocab, arguments.torch, arguments.device)
    print_stop_strings()


if __name__ == "__main__":
    main()
