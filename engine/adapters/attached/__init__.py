"""What attaching to another engine takes from inside its process, whichever engine it is.

`attachment` owns sockets, threads and the way out; `hooks` puts our functions around its methods;
`step_notes` is what the engine's thread noted for another one to read.
An engine's own package tells `step_recorder` what came, was scheduled and ended, as requests,
rows and blocks; the recorder makes step records of it, in the order in which steps end.
`attached_core` answers commands.

May import: engine.control, engine.loop, engine.protocol, engine.protocol.settings,
  engine.telemetry, engine.transport.
What only one engine has belongs to the package of that engine.
"""
