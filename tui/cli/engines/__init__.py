"""Commands that run an engine, send it requests, change its knobs or ask for its state.

May import: engine.adapters.metrics, engine.adapters.sglang, engine.adapters.vllm, engine.bench,
  engine.client, engine.execution, engine.http, engine.models, engine.process, engine.protocol,
  engine.scheduling, engine.telemetry, engine.transport, engine.workload, recordings,
  recordings.alerts, recordings.file, recordings.history, recordings.live, recordings.session,
  recordings.state, tui.cli.recordings, tui.cli.shared, tui.session, tui.settings, tui.views.
One module for each command.
"""
