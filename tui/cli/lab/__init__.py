"""The lab: what the literature claims, tried on this machine's engine (`stepscope lab`).

It starts engines and reads recordings, and only commands may do both: so it is a room of `tui.cli`.
May import: engine.client, engine.protocol, engine.protocol.settings, engine.transport,
  recordings.attribution, recordings.compare, recordings.compare.side, recordings.export,
  recordings.file, recordings.history, recordings.live, recordings.state.series, tui.cli.shared,
  tui.settings.
A new experiment is one file in `experiments`.
"""
