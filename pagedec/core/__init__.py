"""The deterministic heart: what is cached where, who runs next, and what follows from an answer. No tensors, no I/O."""
