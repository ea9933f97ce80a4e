"""What commands share: options made from Structs, finding an engine, progress, exit codes.

May import: engine.adapters.metrics, engine.client, engine.protocol, engine.protocol.settings,
  engine.transport, recordings, recordings.alerts, recordings.compare.side, recordings.figures,
  recordings.file, recordings.file.mcap, recordings.importing, recordings.samples,
  recordings.state.series, tui.session, tui.settings, tui.views.
Code that commands of different packages need goes here.
"""
