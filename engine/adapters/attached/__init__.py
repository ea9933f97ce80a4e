"""The code that every adapter shares: it runs inside the other engine's process.

`attachment` owns the sockets and threads, and detaches stepscope. `hooks` wraps the engine's
methods, and queues what the engine's thread saw, for another thread to process.
Each engine's package reports to `step_recorder` which requests arrived and ended, and which rows
and blocks were scheduled. The recorder builds step records, in the order in which steps end.
`attached_core` answers commands. Other processes of the engine send `reports`.

May import: engine.control, engine.loop, engine.protocol, engine.telemetry, engine.transport.
Code that only one engine needs belongs in that engine's package.
"""
