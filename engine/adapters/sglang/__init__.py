"""SGLang by what it publishes itself: totals of every forward pass, and no request.

`sglang serve ... --enable-forward-pass-metrics --forward-pass-metrics-ipc-name ipc:///tmp/fpm`
publishes at `ipc:///tmp/fpm.0`, `.1` and so on, one for each data-parallel rank.

May import: engine.protocol.
Written against the source of SGLang 0.5.23 and not seen running.
"""
