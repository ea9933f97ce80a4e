"""The lab (`stepscope lab`): tries claims of the literature on this machine's engine.

It is a package of `tui.cli`, because only commands may both start engines and read recordings.
May import: engine.client, engine.execution, engine.protocol, engine.transport,
  recordings.compare, recordings.export, recordings.file, recordings.live, recordings.session,
  recordings.simulation, recordings.state, tui.cli.recordings, tui.cli.shared, tui.settings.
A new experiment is one entry of `experiments.py`.
"""
