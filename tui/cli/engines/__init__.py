"""Commands that run an engine, send it requests, change its knobs or ask for its state.

May import: engine.adapters.metrics, engine.adapters.sglang, engine.adapters.vllm, engine.bench,
  engine.client, engine.execution.machine, engine.http, engine.http.server, engine.models.cache,
  engine.process, engine.protocol, engine.protocol.settings, engine.scheduling,
  engine.telemetry, engine.transport, engine.workload, recordings.alerts, recordings.figures,
  recordings.file, recordings.history, recordings.live, recordings.session, recordings.state,
  recordings.state.series, tui.cli.recordings, tui.cli.shared, tui.session.control,
  tui.settings, tui.views.
One module for each command.
"""
