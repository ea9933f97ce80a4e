"""Runs guidellm and aiperf, unmodified, against a live server: `make test-clients`.

Each has a virtual environment of its own under `.venv-clients`, made once. A client that cannot be
installed is skipped, with the reason; one that is there and does not get what it wants fails.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.served import serving

ENVIRONMENTS = Path(__file__).parents[2] / ".venv-clients"
NUM_REQUESTS, OUTPUT_TOKENS = 20, 16
TIMEOUT_S = 600


class Client(NamedTuple):
    """A client, how to run it, and how to read its report: (finished requests, output tokens)."""

    package: str
    arguments: Callable[[str, Path, Path], list[str]]
    result: Callable[[Path], tuple[int, int]]
    environment: dict[str, str]


def guidellm_arguments(url: str, tokenizer: Path, output: Path) -> list[str]:
    return [
        *("guidellm", "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url},model=demo"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={output}/guidellm.json"),
    ]


def guidellm_result(output: Path) -> tuple[int, int]:
    (benchmark,) = json.loads((output / "guidellm.json").read_text())["benchmarks"]
    done = benchmark["requests"]["successful"]
    assert not benchmark["requests"]["errored"], benchmark["requests"]["errored"][0]
    return len(done), sum(request["output_tokens"] for request in done)


def aiperf_arguments(url: str, tokenizer: Path, output: Path) -> list[str]:
    return [
        *("aiperf", "profile", "--model", "demo", "--url", url, "--tokenizer", str(tokenizer)),
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--ui", "none"),
        *("--concurrency", "4", "--request-count", str(NUM_REQUESTS)),
        *("--isl", "64", "--osl", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true"),
        *("--artifact-dir", str(output)),
    ]


def aiperf_result(output: Path) -> tuple[int, int]:
    found = json.loads((output / "profile_export_aiperf.json").read_text())
    assert not found["error_summary"], found["error_summary"]
    tokens = found["total_usage_completion_tokens"]["avg"]
    return int(found["request_count"]["avg"]), int(tokens)


# Both must look for the tokenizer in the folder only; aiperf accepts no folder when it is told that
# it is offline.
OFFLINE = {"HF_HUB_OFFLINE": "1"}
CLIENTS = {
    "guidellm": Client("guidellm==0.8.1", guidellm_arguments, guidellm_result, OFFLINE),
    "aiperf": Client("aiperf==0.13.0", aiperf_arguments, aiperf_result, {}),
}


def main() -> None:
    from stepscope.engine.models.made_checkpoints import byte_tokenizer

    num_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        byte_tokenizer().save_pretrained(tokenizer)  # of the demo model, which is served
        with serving("--http", "0", "--kv-memory", "64MB") as server:
            for name, client in CLIENTS.items():
                if reason := install(name, client):
                    print(f"{name:10} skipped: {reason}")
                    continue
                problem = run(name, client, server.url, tokenizer, Path(folder) / name)
                num_failed += problem is not None
                print(f"{name:10} {problem or 'passed'}")
    sys.exit(num_failed)


def install(name: str, client: Client) -> str | None:
    """Make the client's environment unless it exists; return why that fails, if it does."""
    folder = ENVIRONMENTS / name
    marker = folder / ".installed"
    if marker.exists() and marker.read_text() == client.package:
        return None
    constraints = ENVIRONMENTS / f"{name}-constraints.txt"
    pip = (str(folder / "bin" / "python"), "-m", "pip", "-q", "--disable-pip-version-check")
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        # The build of torch that is installed here: on a machine without a GPU that is the small
        # one, if pip knows where it is.
        constraints.write_text(f"torch=={version('torch')}\n")
        command = [*pip, "install", "-c", str(constraints), client.package]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
    except (subprocess.SubprocessError, OSError) as error:
        said = str(getattr(error, "stderr", None) or error)
        lines = [line for line in said.splitlines() if line.startswith("ERROR")]
        return lines[-1] if lines else str(error)
    marker.write_text(client.package)
    return None


def run(name: str, client: Client, url: str, tokenizer: Path, output: Path) -> str | None:
    """Run the client; return what is wrong with its results."""
    output.mkdir()
    program, *arguments = client.arguments(url, tokenizer, output)
    command = [str(ENVIRONMENTS / name / "bin" / program), *arguments]
    log = output / "log"
    try:
        with log.open("w") as said:
            subprocess.run(
                command,
                cwd=output,
                env={**os.environ, **client.environment},
                stdout=said,
                stderr=said,
                timeout=TIMEOUT_S,
                check=True,
            )
        found = client.result(output)
    except subprocess.SubprocessError as error:
        return f"FAILED: {error}\n{log.read_text()[-3000:]}"
    except (OSError, ValueError, LookupError, AssertionError) as error:
        return f"FAILED, its report says: {error!r}"
    expected = (NUM_REQUESTS, NUM_REQUESTS * OUTPUT_TOKENS)
    return None if found == expected else f"FAILED: {found} requests and tokens, not {expected}"


if __name__ == "__main__":
    main()
