"""Tools for authors of policies; nothing that serves imports them."""
