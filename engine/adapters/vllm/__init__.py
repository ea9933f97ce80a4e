"""Makes an unmodified vLLM a stepscope endpoint: `STEPSCOPE_ENDPOINT=vllm-0 vllm serve ...`.

vLLM loads `plugin`, which attaches to the scheduler that vLLM builds. Around every step
`attachment` calls `watcher`, which reads what vLLM has `scheduled`, and who waits for what.
In vLLM's API servers `front_end` watches what HTTP does, in its workers `ranks` times their steps.
`versions` declares what we use of vLLM's objects, and handles the differences of its releases.

May import: engine.adapters.attached, engine.protocol, engine.scheduling, engine.telemetry,
  engine.transport.
A new reason to wait is found in `scheduled.py` (`HeldRequests`, `common_reason`). To support a
new release of vLLM, add its differences to `versions.py`.
"""
