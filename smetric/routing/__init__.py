"""Routing: from a request and a snapshot to a charged instance."""
