"""One session of the dashboard: what it was started with, its source, its export choices.

May import: engine.adapters.metrics, engine.adapters.sglang, engine.client, engine.protocol,
  engine.protocol.settings, engine.transport, recordings, recordings.alerts, recordings.file,
  recordings.fleets, recordings.history, recordings.live, recordings.samples, recordings.state,
  tui.session.compare, tui.session.control, tui.session.export, tui.session.recording,
  tui.session.time, tui.session.tour, tui.settings, tui.views, tui.views.frame, tui.views.pages.
What a new session needs is made in `session_maker.py`.
"""
