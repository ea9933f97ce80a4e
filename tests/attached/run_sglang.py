"""Holds the SGLang adapter to SGLang's own scheduler, on a CPU: `make test-sglang`.

The wheel of SGLang is installed without its dependencies (500 MB, once) into `.venv-sglang` or
the folder of SGLANG_ENVIRONMENT; torch and transformers are those of this environment. SGLang's
scheduler then runs a tiny model with random weights: no GPU, no HTTP server, no tokenizer. One line
a law.

    python -m tests.attached.run_sglang
"""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.engine.adapters.sglang import shapes
from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.wire import Preempted
from tests.adapters.laws import check_computed_tokens, check_rows
from tests.attached.published import Collector, Published
from tests.attached.real_server import write_model
from tests.attached.run_vllm import Report, record, verify
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("SGLANG_ENVIRONMENT", ROOT / ".venv-sglang"))
# What SGLang's scheduler imports beside torch, transformers and what stepscope has itself.
PACKAGES = (
    *("aiohappyeyeballs==2.7.1", "aiohttp==3.14.5", "aiosignal==1.4.0", "apache-tvm-ffi==0.1.11"),
    *("asttokens==3.0.2", "attrs==26.1.0", "blobfile==3.3.0", "cloudpickle==3.1.2"),
    *("compressed-tensors==0.20.0", "dill==0.4.1", "distro==1.9.0", "einops==0.8.2"),
    *("executing==2.3.0", "fastapi==0.165.0", "frozenlist==1.8.0", "interegular==0.3.3"),
    *("ipython==9.18.1", "ipython_pygments_lexers==1.1.1", "jedi==0.20.1"),
    *("matplotlib-inline==0.2.2", "multidict==7.2.1", "nvidia-ml-py==13.615.71", "openai==2.8.0"),
    *("openai-harmony==0.0.8", "opentelemetry-api==1.45.2", "orjson==3.13.0", "parso==0.8.7"),
    *("partial-json-parser==0.2.1.1.post7", "pexpect==4.9.0", "prompt_toolkit==3.0.53"),
    *("propcache==0.5.4", "pure_eval==0.2.4", "pybase64==1.5.1", "python-multipart==0.0.34"),
    *("scipy==1.17.1", "setproctitle==1.3.8", "stack-data==0.6.3", "tiktoken==0.14.0"),
    *("traitlets==5.16.1", "watchfiles==1.3.0", "xxhash==4.1.0", "yarl==1.25.1"),
)
OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "load_format": "dummy",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "max_total_tokens": 400,
    "context_length": 384,
    "chunked_prefill_size": 64,
    "max_running_requests": 8,
    "page_size": 1,
}
NUM_REQUESTS, ABORTED = 24, (5, 11)
CHUNK, SEATS = 16, 4
RETRACTS: dict[str, Any] = {"settings": {"SGLANG_TEST_RETRACT": "1"}}  # every third decode


def main() -> int:
    python, num_failed, two = environment(), 0, {"tp_size": 2}
    pages_of_4 = {"disable_overlap_schedule": True, "page_size": 4}
    ranks = (all_tokens_are_in_rows, a_change_reaches_both_ranks)
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        write_model(model)
        for name, laws, options, how in (
            ("overlap", RECORDS, {}, RETRACTS),
            ("no overlap", RECORDS, pages_of_4, RETRACTS),
            ("mixed", RECORDS, {"enable_mixed_chunk": True}, RETRACTS),
            ("two ranks", ranks, two, {"changes": True}),
            ("error", (an_error_of_ours_detaches_it,), two, {"changes": True, "fail_after": 90}),
        ):
            report = Report("sglang", f"{name}: ")
            run = Run(python, model, Path(temporary) / name, options, **how)
            for law in laws:
                report.check(law, run)
            num_failed += report.num_failed
    return min(num_failed, 1)


class Run:
    """A run of SGLang's scheduler under load.

    Attributes:
        ranks: what the witness of each rank noted.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        folder: Path,
        options: dict[str, Any],
        settings: Mapping[str, str] = {},
        changes: bool = False,
        fail_after: int = 0,
    ) -> None:
        folder.mkdir()
        self.folder, self.fail_after = folder, fail_after
        self.options = OPTIONS | {"model_path": str(model)} | options
        num_ranks = self.options.get("tp_size", 1)
        plan = {"options": self.options, "num_requests": NUM_REQUESTS, "aborted": ABORTED}
        (folder / "plan.json").write_text(json.dumps(plan | {"fail_after": fail_after}))
        self.endpoint = f"ipc://{folder}/sglang"
        environment = (
            os.environ
            | settings
            | {
                "STEPSCOPE_ENDPOINT": self.endpoint,
                "SGLANG_USE_CPU_ENGINE": "1",
                "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(num_ranks))),
            }
        )
        script = Path(__file__).with_name("sglang_rank.py")
        with (folder / "log").open("wb") as log:
            streams: dict[str, Any] = {"stdout": log, "stderr": log}
            processes = [
                subprocess.Popen([python, script, folder, str(rank)], env=environment, **streams)
                for rank in range(num_ranks)
            ]
        try:
            self._watch(processes, changes)
        finally:
            for process in processes:
                process.kill()
        notes = [folder / f"rank{rank}.json" for rank in range(num_ranks)]
        self.ranks = [json.loads(path.read_text()) for path in notes]
        self.witness = self.ranks[0]

    def _watch(self, processes: list[subprocess.Popen[bytes]], changes: bool) -> None:
        wait_for(lambda: Path(f"{self.folder}/sglang").is_socket(), "the endpoint", 90)
        self.collector = Collector(f"{self.endpoint}.telemetry")
        recorder = record(self.endpoint, self.folder / "run.mcap")
        wait_for(lambda: bool(self.collector.payloads), "the first message")
        wait_for(lambda: any(self.folder.glob("run.mcap*")), "a recording")
        (self.folder / "go").touch()
        if changes:
            wait_for(lambda: len(self.collector.published().steps) > 20, "some steps", 90)
            with ControlClient(self.endpoint) as client:
                changed = {"max_num_batched_tokens": CHUNK, "max_num_seqs": SEATS}
                self.changed_at = client.set_knobs(changed, "a test").effective_step
        for process in processes:
            process.wait(120)
        recorder.send_signal(signal.SIGINT)
        recorder.wait(30)
        self.collector.stop()
        self.published: Published = self.collector.published()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


def all_tokens_are_in_rows(run: Run) -> str:
    steps = run.published.steps
    check_rows(run.published, run.witness["steps"])
    for step, chunk in zip(steps, run.witness["chunks"], strict=True):
        if step.num_prefill_tokens:
            num_tokens = step.num_prefill_tokens + step.num_decode_tokens
            assert num_tokens <= step.token_budget == chunk, f"step {step.step}"
    return f"{len(steps)} steps, {sum(s.num_wasted_tokens or 0 for s in steps)} tokens wasted"


def prompt_and_output_add_up(run: Run) -> str:
    published, ends = run.published, run.witness["ends"]
    assert len(ends) == NUM_REQUESTS, f"{len(ends)} of {NUM_REQUESTS} requests ended"
    assert ends.keys() == set(published.names.values())
    check_computed_tokens(published)
    for ours, name in published.names.items():
        reason, num_output = ends[name]
        if reason == "abort":
            assert published.aborted.count(ours) == 1, f"{name} was aborted"
        else:
            end = published.ends[ours]
            assert (end.reason, end.num_output_tokens) == (reason, num_output), name
    return f"{len(ends)} requests, {sum(published.cached.values())} tokens cached"


def retractions_are_published(run: Run) -> str:
    found = sorted(run.published.names[each.request_id] for each in run.published.of(Preempted))
    assert found == sorted(run.witness["retracted"]), f"{len(found)} were published"
    assert found
    return f"{len(found)}"


def used_pages_are_the_pools(run: Run) -> str:
    used = [step.kv.used for step in run.published.steps if step.kv is not None]
    assert used == run.witness["pages"]
    return f"at most {max(used)}"


def a_change_reaches_both_ranks(run: Run) -> str:
    first, second = run.ranks
    assert first["steps"] == second["steps"]
    assert first["chunks"] == second["chunks"]
    at = run.changed_at
    before, after = set(first["chunks"][:at]), set(first["chunks"][at:])
    assert (before, after) == ({OPTIONS["chunked_prefill_size"]}, {CHUNK}), (before, after)
    assert [rank["seats"] for rank in run.ranks] == [SEATS, SEATS]
    return f"from step {at} of {len(first['steps'])}"


def an_error_of_ours_detaches_it(run: Run) -> str:
    first, second = run.ranks
    assert first["steps"] == second["steps"]
    assert len(first["ends"]) == NUM_REQUESTS, f"{len(first['ends'])} requests ended"
    start = (OPTIONS["chunked_prefill_size"], OPTIONS["max_running_requests"])
    assert [(rank["chunk"], rank["seats"]) for rank in run.ranks] == [start, start]
    assert CHUNK in first["chunks"]
    num_warnings = run.log.count("stepscope has detached itself, SGLang goes on")
    assert num_warnings == 1, f"{num_warnings} warnings"
    assert not [path for path in run.folder.iterdir() if path.is_socket()]
    return f"{NUM_REQUESTS} requests complete, both ranks have SGLang's values, one warning"


def verify_finds_no_fault(run: Run) -> str:
    return verify(run.folder / "run.mcap")


RECORDS = (
    *(all_tokens_are_in_rows, prompt_and_output_add_up, retractions_are_published),
    *(used_pages_are_the_pools, verify_finds_no_fault),
)


def environment() -> Path:
    """The Python of SGLang's environment, which is made unless it is there."""
    python = ENVIRONMENT / "bin" / "python"
    release = shapes.TRIED_RELEASE
    installed = f"import importlib.metadata as m; assert m.version('sglang') == '{release}'"
    if python.exists() and subprocess.run([python, "-c", installed], check=False).returncode == 0:
        return python
    print(f"installing sglang {release} into {ENVIRONMENT}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(ENVIRONMENT)})
    ours = sysconfig.get_path("purelib")
    (Path(packages) / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, *PACKAGES, f"sglang=={release}"], check=True)
    return python


if __name__ == "__main__":
    sys.exit(main())
