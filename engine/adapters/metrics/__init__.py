"""Engines that are known by their Prometheus metrics only: `stepscope top http://host:8000`.

`address` says where metrics are, `fetch` gets them with bounds on time and size, `names` is the
table of what each engine calls what, `reading` picks from a text what the table names, `interval`
makes totals of two readings, `local_servers` finds servers on this machine.

May import: engine.protocol, engine.protocol.settings.
A metric of a new release is an entry in `names`. What totals cannot say stays unknown.
"""
