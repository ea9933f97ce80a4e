"""The lab (`stepscope lab`): tries claims of the literature on this machine's engine.

It is a package of `tui.cli`, because only commands may both start engines and read recordings.
May import: engine.client, engine.execution.machine, engine.protocol, engine.protocol.settings,
  engine.transport, recordings.compare.side, recordings.export, recordings.file,
  recordings.live, recordings.session, recordings.simulation, recordings.state.series,
  tui.cli.recordings, tui.cli.shared, tui.settings.
A new experiment is one entry of `experiments.py`.
"""
