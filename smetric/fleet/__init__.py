"""Fleet: instances, their ledger, health and drains."""
