"""What commands share: options made from Structs, finding an engine, progress, exit codes.

May import: engine.adapters.metrics, engine.client, engine.protocol, engine.transport,
  recordings, recordings.alerts, recordings.compare, recordings.file, recordings.file.mcap,
  recordings.importing, recordings.live, recordings.samples, recordings.state, tui.session,
  tui.settings, tui.views.
Code that commands of different packages need goes here.
"""
