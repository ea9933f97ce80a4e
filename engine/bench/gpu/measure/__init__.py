"""The parts of `stepscope bench gpu`, each measured in a worker process of its own.

May import: kernels, kernels.dispatch, kernels.plain, engine.bench, engine.bench.gpu,
  engine.client, engine.control, engine.execution, engine.execution.machine, engine.loop,
  engine.models, engine.process, engine.protocol, engine.protocol.settings, engine.scheduling.
To add a part, add a module here and a branch to `worker.py`.
"""
