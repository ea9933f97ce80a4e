"""Decides what the next step computes: requests, the waiting queue, the scheduler, batching modes,
the plan of a step, the KV cache and its blocks. Needs no torch.

May import: engine.protocol, engine.text.
A new batching mode is one function in `batching.py`; an order of the queue goes into
`WaitingQueue` (`request.py`); `StepPlan._grow` chooses which request is preempted.
"""
