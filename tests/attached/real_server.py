"""A real vLLM server with a tiny model, and clients that stream from it."""

import http.client
import json
import os
import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.ports import free_port

HERE = Path(__file__).parent
VOCABULARY = 260  # of the byte tokenizer
START_S, STOP_S, REQUEST_S = 600.0, 60.0, 240.0
SETTINGS = (
    "--enforce-eager --load-format=dummy --dtype=float32 --max-model-len=1024 --block-size=32 "
    "--max-num-seqs=32 --max-num-batched-tokens=512 --num-gpu-blocks-override=65"
)


class Answer(NamedTuple):
    """A client's answer: the id of its request, and the server's own token counts.

    `sent_ns` and `chunks_ns` are when it sent the request and when each chunk came, by its clock.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    sent_ns: int = 0
    chunks_ns: tuple[int, ...] = ()


class CannotServeError(Exception):
    """vLLM does not run here. The message is vLLM's last error."""


WINDOWS = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "head_dim": 32,
    "sliding_window": 64,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
}  # a Gemma-3 in place of a Llama


def write_model(folder: Path, **changes: Any) -> None:
    """A Llama of two layers and random weights, with a byte tokenizer; or another, by changes."""
    from stepscope.engine.models.made_checkpoints import byte_tokenizer

    folder.mkdir()
    byte_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    # The name that every release of transformers knows.
    path.write_text(path.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    twos = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
        **dict.fromkeys(twos, 2),
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    }
    (folder / "config.json").write_text(json.dumps(config | changes))


class VllmServer:
    """vLLM's own OpenAI server in the environment of `python`.

    Args:
        folder: for its log, the witness's notes and the plugin's metadata.
        environment: on top of this process's own, for example STEPSCOPE_ENDPOINT.
        asynchronous: schedule each step while the one before it runs (`async_on_cpu`).

    Raises:
        CannotServeError: it ended instead of answering.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        folder: Path,
        environment: dict[str, str],
        options: tuple[str, ...] = (),
        *,
        asynchronous: bool = False,
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.port = free_port()
        self._model = str(model)
        plugins = folder / "plugins"
        _offer_plugins(plugins, ("witness", "async_on_cpu") if asynchronous else ("witness",))
        self._log = (folder / "log").open("w")
        command = [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", self._model, "--host", "127.0.0.1", "--port", str(self.port)),
            *(*SETTINGS.split(), *options),
        ]
        switches = ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
        variables = os.environ | dict.fromkeys(("VLLM_CPU_KVCACHE_SPACE", *switches), "1")
        variables |= {"PYTHONPATH": str(plugins), "WITNESS_DIR": str(folder), **environment}
        self._process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise

    def _wait_until_it_answers(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise CannotServeError(self.last_error())
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                time.sleep(0.5)
        raise CannotServeError(f"no answer within {START_S:.0f} s: {self.last_error()}")

    def ask(self, prompt: str, num_tokens: int, give_up_after: int | None = None) -> Answer:
        """Stream a completion; with `give_up_after`, close the connection after so many chunks.

        Raises:
            OSError, http.client.HTTPException: the server failed.
        """
        body = {"model": self._model, "prompt": prompt, "max_tokens": num_tokens}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_S)
        with closing(connection):
            headers = {"content-type": "application/json"}
            sent_ns = time.monotonic_ns()
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise http.client.HTTPException(f"HTTP {response.status}: {response.read()!r}")
            return _read_stream(response, give_up_after)._replace(sent_ns=sent_ns)

    @property
    def calls(self) -> list[dict[str, object]]:
        """The calls that the witness noted."""
        path = self.folder / "calls.jsonl"
        return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def last_error(self) -> str:
        """The last line of the log that names an error."""
        if self._process.poll() == -signal.SIGILL or "Illegal instruction" in self.log:
            return "illegal instruction"
        found = [line for line in self.log.splitlines() if "Error" in line]
        return found[-1][-300:] if found else f"exit code {self._process.poll()}"

    def stop(self) -> None:
        """End it as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)  # does nothing once it has ended
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _read_stream(response: http.client.HTTPResponse, give_up_after: int | None) -> Answer:
    request_id, usage = "", None
    chunks_ns: list[int] = []
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise http.client.HTTPException(str(chunk["error"]))
        request_id, usage = chunk["id"], chunk.get("usage") or usage
        if chunk["choices"]:
            chunks_ns.append(time.monotonic_ns())
        if len(chunks_ns) == give_up_after:
            return Answer(request_id, 0, 0)
    if usage is None:
        raise http.client.HTTPException("the stream ended without its usage")
    num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return Answer(request_id, *num_tokens, chunks_ns=tuple(chunks_ns))


def _offer_plugins(folder: Path, names: tuple[str, ...]) -> None:
    """Present the modules beside this one to vLLM as an installed package."""
    metadata = folder / "stepscope_witness-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: stepscope-witness\nVersion: 0\n"
    )
    lines = [f"{name} = stepscope_{name}:register\n" for name in names]
    (metadata / "entry_points.txt").write_text("".join(["[vllm.general_plugins]\n", *lines]))
    for name in names:
        (folder / f"stepscope_{name}.py").write_text((HERE / f"{name}.py").read_text())
