"""Drawing: takes numbers, strings and bytes. Never torch, the engine or the kernels."""
