"""Commands that predict what would happen on another GPU, or with other knobs.

May import: engine.process, engine.protocol.settings, engine.scheduling, engine.simulation,
  engine.simulation.virtual, engine.transport, engine.workload, recordings.autopilot,
  recordings.file, recordings.simulation, recordings.state, recordings.state.series,
  tui.cli.recordings, tui.cli.shared, tui.session.control, tui.settings, tui.views.
A new command that simulates gets a module here.
"""
