"""Emulated engines: the engine model on a real clock, with vLLM's HTTP interface."""
