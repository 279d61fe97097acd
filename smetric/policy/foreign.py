"""What other languages write, and what is written here instead.

Where it stops the parser, and what is said of anything else, is in `syntax_error`.
"""

from __future__ import annotations

#: What other languages write, and what is written here instead; where it is two marks, the parser stops at either.
FOREIGN = {
    "||": "write `or`",
    "//": "comments start with `#`",
    "/*": "comments start with `#`",
    "--": "comments start with `#`",
    "<>": "write `!=`",
    "=<": "write `<=`",
    "**": "write a product: x * x",
    "?": "write `x if c else y`",
    "if": "write `x if c else y`",
    "isnot": "compare with `!=`",
    "is": "compare with `==`",
}
CONDITION = "a condition stands behind what it decides: `route … when …`"
_LAST = "the last `route`, without a `when`, is what applies otherwise"
#: What names something in other languages, and what does here.
DEFINING = {
    "const": "write `param` or `let`",
    "var": "write `let`",
    "fn": "write `def`",
    "func": "write `def`",
    "function": "write `def`",
}
#: What statements start with in other languages, and what stands here instead.
ELSEWHERE = {
    "if": CONDITION,
    "else": CONDITION,
    "elif": CONDITION,
    "when": CONDITION,
    "default": _LAST,
    "otherwise": _LAST,
    "filter": "write `keep` or `prefer`",
    "require": "write `keep …`",
    "return": "write `route …`",
    "import": "write `use NAME (…)`",
    "from": "write `use NAME (…)`",
    **DEFINING,
}
