"""The canonical layout of policy texts: what `smetric fmt` writes and editors are handed.

A layout changes spaces, line breaks and nothing else: the words and the comments of a text stay, in their order.
"""

from smetric.policy.layout.page import format_text

__all__ = ["format_text"]
