"""Requests: body and headers to what routing needs of them."""
