"""Watches an unmodified SGLang, through a plugin.

SGLang loads `plugin`, which hooks the scheduler's event loop. `attachment` wraps the scheduler's
methods, `watcher` reads batches, `shapes` declares what we use of SGLang's objects, and which
setups cannot be watched. Knob changes reach all tensor-parallel ranks by SGLang's own broadcast.
The stream of `--enable-forward-pass-metrics` is read by `recordings.live.forward_passes`.

May import: engine.adapters.attached, engine.protocol, engine.telemetry, engine.transport.
A new reason to wait is found in `watcher.py`.
Tried with the scheduler of SGLang 0.5.23 on a CPU, but not with a running SGLang server.
"""
