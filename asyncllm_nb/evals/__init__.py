"""Evaluations: what shared memory does to accuracy, work and delay, measured on any model.

Each of these is a module with a command line (``python -m asyncllm_nb.evals.sharded --help``):

sharded        an input that arrives while a model thinks
sequential     a writer at once with the thinker, beside one that writes after it
logs           a log that is watched by probes, beside a loop that reads everything first
approximation  how far views of shared blocks are from a fresh encoding
patterns       ready-made agents beside the ordinary loop that does the same work
patterns_io    the same for agents that take input while they work
report         a page of Markdown about the first three

With ``--processes 8`` the first six deal their problems to so many processes, with one thread each.

The other modules are what these are made of. Nothing is imported here, so that each can be run with
``python -m``.
"""
