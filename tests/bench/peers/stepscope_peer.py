"""stepscope, as `stepscope serve` runs it, telemetry on. Run by bench_throughput.py."""

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

from protocol import Done, Work, serve


def load(settings: dict[str, Any]) -> tuple[Callable[[Work], Done], str]:
    import msgspec
    import zmq

    from stepscope.engine.bench.measured_run import measure
    from stepscope.engine.process.serve import open_engine
    from stepscope.engine.protocol.commands import Submit
    from stepscope.engine.protocol.engine_config import EngineConfig
    from stepscope.engine.protocol.knobs import Knobs
    from stepscope.engine.protocol.sampling_params import SamplingParams
    from stepscope.engine.transport.sockets import client_socket

    resources = contextlib.ExitStack()
    folder = resources.enter_context(tempfile.TemporaryDirectory())
    config = EngineConfig(
        model=settings["model"],
        dtype=settings["dtype"],
        endpoint=f"ipc://{folder}/engine",
        kv_memory="1GB",
        device="cpu",
    )
    core, intake = resources.enter_context(
        open_engine(config, Knobs(), progress=lambda what, share: None)
    )
    subscriber = resources.enter_context(client_socket(zmq.SUB, None))
    subscriber.rcvhwm = 0
    subscriber.subscribe(b"")
    subscriber.connect(core.info.telemetry_endpoint)

    def run(work: Work) -> Done:
        submits = [
            Submit(
                prompt_token_ids=token_ids,
                sampling=SamplingParams(max_tokens=work.num_output_tokens, ignore_eos=True),
                with_text=False,
            )
            for token_ids in work.prompts(intake.vocab_size)
        ]
        result, requests = measure(core, intake, submits)
        assert not result.num_failed, result.failures
        outputs = [each.output_token_ids for each in requests]
        return Done(outputs, result.seconds, msgspec.to_builtins(result))

    info = core.info
    how = ", ".join(
        part for part in (getattr(info, "implementation", None), info.attention_backend) if part
    )
    return run, f"{info.dtype}, {how}"


if __name__ == "__main__":
    serve(load)
