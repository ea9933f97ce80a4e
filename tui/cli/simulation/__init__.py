"""Commands that ask what would happen: on another GPU, with other knobs.

May import: engine.protocol, engine.simulation, engine.simulation.virtual, engine.workload,
  recordings.file, recordings.file.mcap, recordings.simulation, recordings.state.series,
  tui.cli.shared, tui.settings, tui.views.
A command that simulates gets a module here, its options in `tui/cli/table/simulation.py`.
"""
