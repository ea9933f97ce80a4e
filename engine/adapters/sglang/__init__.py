"""Watches an unmodified SGLang, through a plugin or through the metrics that SGLang publishes.

SGLang loads `plugin`, which hooks the scheduler's event loop. `attachment` wraps the scheduler's
methods, `watcher` reads batches, `shapes` declares what we use of SGLang's objects, and which
setups cannot be watched. Knob changes reach all tensor-parallel ranks by SGLang's own
broadcast. `forward_passes` reads the stream of `--enable-forward-pass-metrics`. The stream has only
totals for each forward pass, and no single requests.

May import: engine.adapters.attached, engine.protocol, engine.protocol.settings,
  engine.telemetry, engine.transport.
Tried with the scheduler of SGLang 0.5.23 on a CPU, but not with a running SGLang server.
"""
