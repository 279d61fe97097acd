"""Emulated engines: the model of `smetric.sim` on a real clock, speaking vLLM on the wire."""
