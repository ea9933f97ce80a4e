"""Engines observed through their Prometheus metrics only: `stepscope top http://host:8000`.

`address` holds the address of a server's metrics, `fetch` downloads them with bounds on time and
size, `names` lists the metric names of each engine, `reading` parses the listed metrics, `interval`
computes totals from two readings, `local_servers` finds servers on this machine.

May import: engine.protocol, engine.protocol.settings.
To support a metric of a new release, add its name to `names`. Values that a server does not export
stay unknown.
"""
