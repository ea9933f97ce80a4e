"""Accounts for waits in the queue: who waited for admission, who was preempted, at what cost.

May import: engine.protocol, recordings.attribution, recordings.state.
A new figure of a preemption goes into `preemptions.py`, of one wait into `queue.py`, and of all
waits into `waits.py`.
"""
