"""What commands share: options made from Structs, finding an engine, progress, exit codes.

May import: engine.adapters.metrics, engine.client, engine.protocol, engine.transport,
  recordings, recordings.export, recordings.file, recordings.file.mcap, recordings.history,
  recordings.live, recordings.samples, tui.cli.recordings, tui.settings, tui.views.
What two kinds of commands need goes here.
"""
