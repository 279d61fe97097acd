"""What the live page shows: figures of the last seconds, the stream of decisions, one decision in full."""
