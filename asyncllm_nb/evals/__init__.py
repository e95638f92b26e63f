"""Evaluations: what shared memory does to accuracy, work and delay, measured on any model.

`sharded` lets an input arrive while a model thinks, `sequential` compares with a model that writes after
thinking, `logs` watches a log with probes. Each is a module with a command line, and imports nothing
here, so that it can be run with ``python -m``.
"""
