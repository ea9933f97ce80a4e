"""An unmodified vLLM as a stepscope endpoint: `STEPSCOPE_ENDPOINT=vllm-0 vllm serve ...`.

`plugin` is what vLLM loads; it wraps the scheduler that vLLM builds. `hooks` calls `watcher` around
every step, which makes step records of what vLLM scheduled. `attachment` owns sockets, threads and
the way out. `shapes` says what we need of vLLM's objects, `versions` what differs between its
releases.

May import: engine.control, engine.loop, engine.protocol, engine.scheduling, engine.telemetry,
  engine.transport.
What a new release of vLLM does differently is an entry in `versions.py`.
"""
