"""Shared-memory inference: blocks, views, memory pools, scheduler, batch, model, sampling, trace.

Knows torch, transformers (only where a model is loaded) and the kernels. Never widgets, IPython or
ipywidgets: what a notebook sees is built on top, in ``asyncllm_nb``.
"""
