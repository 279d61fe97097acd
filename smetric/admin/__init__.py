"""Admin port: metrics, decisions, policies, drains and the live page."""
