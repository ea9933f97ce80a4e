"""The ledger of a session: who waited for admission, who was preempted, and what that cost.

May import: engine.protocol, recordings.attribution, recordings.state.
What is asked of a preemption goes into `preemptions.py`, of one wait into `queue.py`, of
all of them into `waits.py`.
"""
