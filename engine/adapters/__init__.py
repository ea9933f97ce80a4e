"""Other people's engines as stepscope endpoints, one package for each engine.

An adapter watches an engine from inside its process and publishes what every step did, in the same
messages as our own engine. It imports no torch, and nothing of the other engine at the top of a
module.

May import: nothing of ours.

Two rules hold for all of them. An error of ours never ends a request: the adapter detaches itself
and restores what it changed. And no token and no text leaves the process.
"""
