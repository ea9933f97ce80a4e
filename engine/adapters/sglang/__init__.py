"""An unmodified SGLang: as an endpoint by its plugin, or by what it publishes itself.

`plugin` is what SGLang loads; it hooks the scheduler's event loop. `attachment` puts our functions
around the scheduler's methods, `watcher` reads batches, `shapes` says what we need of SGLang's
objects, `support` what cannot be watched. Knobs go to all tensor-parallel ranks with SGLang's own
broadcast. `forward_passes` reads the stream of `--enable-forward-pass-metrics`: totals only.

May import: engine.adapters.attached, engine.protocol, engine.protocol.settings,
  engine.telemetry, engine.transport.
Tried with the scheduler of SGLang 0.5.23 on a CPU; a server of it was not seen running.
"""
