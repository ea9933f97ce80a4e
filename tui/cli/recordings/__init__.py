"""Commands that write, check and read recordings, without a screen.

May import: engine.protocol, recordings.attribution, recordings.check, recordings.export,
  recordings.file, recordings.file.mcap, recordings.file.writing, recordings.history,
  recordings.live, recordings.plot, recordings.state, recordings.state.series, tui.cli.shared,
  tui.settings, tui.views.
One module a command.
"""
