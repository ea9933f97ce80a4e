"""Engines observed through their Prometheus metrics only: `stepscope top http://host:8000`.

`fetch` holds the address of a server's metrics and downloads them, with bounds on time and size,
`reading` lists the names of each engine's metrics, parses those, and computes totals from two
readings, `local_servers` finds servers on this machine.

May import: engine.protocol.
To support a metric of a new release, add its name in `reading`. What a server does not export
stays unknown.
"""
