"""The marks that rendered prompts have for roles and types, such as `<|user|>`: those of the APIs are known by heart.

What is rendered between them is in `rendering.py`.
"""

from __future__ import annotations

#: Roles, types of Responses items, and types of content that is no text.
_NAMES = """
system developer user assistant tool function
message item_reference reasoning function_call function_call_output custom_tool_call custom_tool_call_output
web_search_call file_search_call code_interpreter_call image_generation_call computer_call computer_call_output
local_shell_call local_shell_call_output mcp_call mcp_list_tools mcp_approval_request mcp_approval_response
text input_text output_text summary_text refusal thinking redacted_thinking tool_use tool_result server_tool_use
web_search_tool_result mcp_tool_use mcp_tool_result search_result image image_url input_image input_audio
audio_url video_url file input_file document
"""
_KNOWN = {name: b"<|%b|>" % name.encode() for name in _NAMES.split()}
#: The known ones and what they end with: none of it is a client's text.
ENDINGS = frozenset(mark[start:] for mark in _KNOWN.values() for start in range(len(mark)))


def mark_of(name: str) -> bytes:
    """The mark for *name*, which may be any text."""
    return _KNOWN.get(name) or b"<|%b|>" % name.encode()
