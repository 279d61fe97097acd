"""Examination of a live set-up: engines, sources, tokens and other routers, with a remedy for each fault."""
