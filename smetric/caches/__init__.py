"""What answers say of the caches: whether predicted hits were true, and what clients do that breaks them."""
