"""An unmodified vLLM as a stepscope endpoint: `STEPSCOPE_ENDPOINT=vllm-0 vllm serve ...`.

`plugin` is what vLLM loads; it wraps the scheduler that vLLM builds. `attachment` calls `watcher`
around every step, which reads what vLLM scheduled. `shapes` says what we need of vLLM's objects,
`versions` what differs between its releases.

May import: engine.adapters.attached, engine.protocol, engine.protocol.settings,
  engine.scheduling, engine.telemetry, engine.transport.
What a new release of vLLM does differently is an entry in `versions.py`.
"""
