"""State that several routers share."""
