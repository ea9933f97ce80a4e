"""Commands that write, check and read recordings, without a screen.

May import: engine.adapters.metrics, engine.transport, recordings, recordings.alerts,
  recordings.attribution, recordings.check, recordings.compare, recordings.export,
  recordings.file, recordings.file.mcap, recordings.file.writing, recordings.history,
  recordings.importing, recordings.live, recordings.plot, recordings.replay, recordings.session,
  recordings.state, tui.cli.shared, tui.session, tui.settings, tui.views.
One module for each command.
"""
