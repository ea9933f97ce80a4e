"""Commands that predict what would happen on another GPU, or with other knobs.

May import: engine.process, engine.protocol, engine.scheduling, engine.simulation,
  engine.transport, engine.workload, recordings.autopilot, recordings.file,
  recordings.simulation, recordings.state, tui.cli.recordings, tui.cli.shared, tui.session,
  tui.settings, tui.views.
A new command that simulates gets a module here.
"""
