"""The description of an attached SGLang (`EngineInfo`)."""

import os
import time
import uuid
from importlib.metadata import version
from typing import Any

from stepscope.engine.adapters.attached.description import known, rank_endpoint, service_level
from stepscope.engine.adapters.sglang.knobs import SglangKnobBoard
from stepscope.engine.adapters.sglang.shapes import SglangScheduler
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.transport.endpoints import Endpoint


def describe(
    scheduler: SglangScheduler, parallel: Any, board: SglangKnobBoard, endpoint: Endpoint
) -> EngineInfo:
    """Return the engine's description. Values that this version of SGLang lacks are None.

    The number of blocks is None, because SGLang does not report single blocks.
    """
    args, model = scheduler.server_args, scheduler.model_config
    release = known(lambda: version("sglang"))
    rank, size = data_parallel(parallel)
    return EngineInfo(
        engine_id=uuid.uuid4().hex,
        name=endpoint.name,
        software_version=version("stepscope"),
        pid=os.getpid(),
        model=str(getattr(args, "served_model_name", None) or args.model_path),
        architecture=known(lambda: str(model.hf_config.architectures[0])),
        dtype=known(lambda: str(model.dtype).removeprefix("torch.")),
        device=known(lambda: str(args.device)),
        implementation=f"SGLang {release or ''}".strip(),
        attention_backend=known(lambda: str(args.attention_backend)),
        num_layers=known(lambda: int(model.num_hidden_layers)),
        num_kv_heads=known(lambda: int(model.num_key_value_heads)),
        head_dim=known(lambda: int(model.head_dim)),
        block_size=scheduler.page_size,
        max_model_len=board.limits.max_model_len,
        max_num_batched_tokens=board.limits.max_num_batched_tokens,
        max_num_seqs=board.limits.max_num_seqs,
        knobs=board.specs,
        telemetry_endpoint=endpoint.telemetry,
        control_endpoint=endpoint.control,
        monotonic_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        overlap=scheduler.enable_overlap,
        keeps_snapshots=True,
        engine="sglang",
        engine_version=release,
        data_parallel_rank=rank if size > 1 else None,
        data_parallel_size=size,
        tensor_parallel_size=known(lambda: int(parallel.tp_size)),
        slo_ttft_ms=service_level("STEPSCOPE_SLO_TTFT_MS"),
        slo_itl_ms=service_level("STEPSCOPE_SLO_ITL_MS"),
    )


def endpoint_of(parallel: Any, text: str) -> Endpoint:
    """Return the endpoint of this data-parallel rank, as `rank_endpoint` derives it from `text`."""
    return rank_endpoint(text, *data_parallel(parallel))


def data_parallel(parallel: Any) -> tuple[int, int]:
    """Return this data-parallel rank and the number of ranks.

    The number of ranks is the number of replicas times the number of groups of data-parallel
    attention.
    """
    groups = parallel.attn_dp_size
    rank = (parallel.dp_rank or 0) * groups + parallel.attn_dp_rank
    return rank, parallel.dp_size * groups
