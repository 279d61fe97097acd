"""What msgspec raises for bytes that are not what is looked for. What that means is for whoever decodes them to say."""

import msgspec

#: Of another form; no UTF-8; nested more deeply than the stack has room for, which any JSON from outside may be.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
