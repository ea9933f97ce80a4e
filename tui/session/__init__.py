"""One session of the dashboard: its source of steps, its engine, and what they need.

May import: engine.adapters.metrics, engine.client, engine.protocol, engine.protocol.settings,
  engine.transport, recordings, recordings.alerts, recordings.compare, recordings.compare.side,
  recordings.file, recordings.file.mcap, recordings.fleets, recordings.history,
  recordings.importing, recordings.live, recordings.state, tui.session.control,
  tui.session.tour, tui.settings, tui.views, tui.views.frame, tui.views.pages.
`Session` in `session.py` makes everything that it needs.
"""
