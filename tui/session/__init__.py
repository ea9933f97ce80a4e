"""One session of the dashboard: its source of steps, its engine, and what they need.

May import: engine.adapters.metrics, engine.client, engine.protocol, engine.transport,
  engine.workload, recordings, recordings.alerts, recordings.autopilot, recordings.compare,
  recordings.file, recordings.file.mcap, recordings.fleets, recordings.history,
  recordings.importing, recordings.live, recordings.replay, recordings.session,
  recordings.state, tui.settings, tui.views, tui.views.frame, tui.views.pages.
`Session` in `session.py` makes everything that it needs. A new way to change the engine is a method
of `Operator`; one to reach a step goes beside `goto.py`, a chapter of the tour into `chapters.py`.
"""
