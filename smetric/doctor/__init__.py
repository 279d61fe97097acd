"""Examines a live set-up: engines, sources, tokens and other routers, and says what is wrong and how to mend it."""
