"""Commands that open the dashboard or draw it.

May import: engine.adapters.metrics, engine.http, engine.models, engine.protocol,
  engine.transport, engine.workload, recordings, recordings.compare, recordings.file,
  recordings.fleets, recordings.history, recordings.importing, recordings.live,
  recordings.replay, recordings.samples, tui.app, tui.cli.recordings, tui.cli.shared,
  tui.screens, tui.session, tui.settings, tui.views, tui.views.frame, tui.views.pages.
One module for each command.
"""
