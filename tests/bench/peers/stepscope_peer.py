"""stepscope, as `stepscope serve` runs it, telemetry on. Run by bench_throughput.py."""

import contextlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

from protocol import Done, Work, serve


def load(settings: dict[str, Any]) -> tuple[Callable[[Work], Done], dict[str, Any]]:
    import msgspec
    import zmq

    from stepscope.engine.bench.measured_run import measure
    from stepscope.engine.process.serve import open_engine
    from stepscope.engine.protocol.commands import Submit
    from stepscope.engine.protocol.settings.engine_config import EngineConfig
    from stepscope.engine.protocol.settings.knobs import Knobs
    from stepscope.engine.protocol.settings.sampling_params import SamplingParams
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
    knobs = msgspec.convert(settings.get("knobs", {}), Knobs)
    core, intake, vocab_size = resources.enter_context(
        open_engine(config, knobs, progress=lambda what, share: None)
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
            for token_ids in work.prompts(vocab_size)
        ]
        start_cpu_s = time.process_time()
        measurement = measure(core, intake, submits)
        cpu_s = time.process_time() - start_cpu_s
        result = measurement.result
        assert not result.num_failed, result.failures
        outputs = [each.output_token_ids for each in measurement.requests]
        return Done(outputs, result.seconds, cpu_s, msgspec.to_builtins(result))

    info = core.info
    how = ", ".join(
        part for part in (getattr(info, "implementation", None), info.attention_backend) if part
    )
    return run, {"software": f"stepscope {info.software_version}", "how": f"{info.dtype}, {how}"}


if __name__ == "__main__":
    serve(load)
