"""Time by machine: the real work of a plan in torch, and the executors that measure it."""
