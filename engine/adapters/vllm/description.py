"""The description of an attached vLLM (`EngineInfo`)."""

import os
import time
import uuid
from importlib.metadata import version

from stepscope.engine.adapters.attached.description import known, rank_endpoint, service_level
from stepscope.engine.adapters.vllm.knobs import VllmKnobBoard
from stepscope.engine.adapters.vllm.shapes import VllmScheduler
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.transport.endpoints import Endpoint


def describe(
    scheduler: VllmScheduler, board: VllmKnobBoard, endpoint: Endpoint, num_blocks: int | None
) -> EngineInfo:
    """Return the engine's description. Values that this version of vLLM lacks are None.

    Args:
        num_blocks: number of usable KV blocks, None if unknown.
    """
    config = scheduler.vllm_config
    model, parallel = config.model_config, config.parallel_config
    vllm_version = known(_vllm_version)
    size = parallel.data_parallel_size
    return EngineInfo(
        engine_id=uuid.uuid4().hex,
        name=endpoint.name,
        software_version=version("stepscope"),
        pid=os.getpid(),
        model=str(known(lambda: _first(model.served_model_name)) or model.model),
        architecture=known(lambda: str(model.architectures[0])),
        dtype=known(lambda: str(model.dtype).removeprefix("torch.")),
        kv_cache_dtype=known(lambda: str(config.cache_config.cache_dtype)),
        device=known(lambda: str(config.device_config.device)),
        implementation=f"vLLM {vllm_version or ''}".strip(),
        num_layers=known(lambda: int(model.get_num_layers(parallel))),
        num_kv_heads=known(lambda: int(model.get_total_num_kv_heads())),
        head_dim=known(lambda: int(model.get_head_size())),
        block_size=scheduler.block_size,
        num_blocks=num_blocks,
        max_model_len=scheduler.max_model_len,
        max_num_batched_tokens=board.limits.max_num_batched_tokens,
        max_num_seqs=board.limits.max_num_seqs,
        knobs=board.specs,
        telemetry_endpoint=endpoint.telemetry,
        control_endpoint=endpoint.control,
        monotonic_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        overlap=bool(getattr(scheduler.scheduler_config, "async_scheduling", False)),
        keeps_snapshots=True,
        engine="vllm",
        engine_version=vllm_version,
        data_parallel_rank=data_parallel_rank(scheduler) if size > 1 else None,
        data_parallel_size=size,
        tensor_parallel_size=known(lambda: int(parallel.tensor_parallel_size)),
        slo_ttft_ms=service_level("STEPSCOPE_SLO_TTFT_MS"),
        slo_itl_ms=service_level("STEPSCOPE_SLO_ITL_MS"),
    )


def endpoint_of(scheduler: VllmScheduler, text: str) -> Endpoint:
    """Return the endpoint of this data-parallel rank, as `rank_endpoint` derives it from `text`."""
    size = scheduler.vllm_config.parallel_config.data_parallel_size
    return rank_endpoint(text, data_parallel_rank(scheduler), size)


def data_parallel_rank(scheduler: VllmScheduler) -> int:
    """Return this process's data-parallel rank.

    If the ranks are independent engines, vLLM keeps the rank in `data_parallel_index`.
    """
    parallel = scheduler.vllm_config.parallel_config
    index: int = getattr(parallel, "data_parallel_index", 0) or 0
    return index or int(getattr(parallel, "data_parallel_rank", 0) or 0)


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def _first(names: object) -> str | None:
    return (
        str(names[0]) if isinstance(names, list | tuple) else None if names is None else str(names)
    )
