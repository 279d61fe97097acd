"""Proxy: from an inference request to the answer of an instance."""
