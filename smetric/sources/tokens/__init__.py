"""Token ids of prompts, equal to those the engine computes on."""
