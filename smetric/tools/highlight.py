"""Pygments lexer for policies."""

from __future__ import annotations

from pygments.lexer import RegexLexer, bygroups, words
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Whitespace

from smetric.features import VOCABULARY
from smetric.policy.builtin import BUILTINS
from smetric.policy.keywords import KEYWORDS, Role
from smetric.policy.types import BASES

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_UNIT = "(" + "|".join((*BASES, *BASES.values())) + r")\b"
_COLOURS = {
    Role.HEADER: Keyword.Namespace,
    Role.STATEMENT: Keyword.Declaration,
    Role.PART: Keyword,
    Role.OPERATOR: Operator.Word,
    Role.LITERAL: Keyword.Constant,
    Role.CASE: Keyword,
}


def _reserved(role: Role) -> words:
    return words(tuple(word for word, row in KEYWORDS.items() if row.role is role), prefix=r"\b", suffix=r"\b")


class PolicyLexer(RegexLexer):
    """The SMetric policy language."""

    name = "SMetric policy"
    aliases = ("smetric",)
    filenames = ("*.policy",)
    mimetypes = ("text/x-smetric-policy",)

    tokens = {  # noqa: RUF012 - Pygments' own way
        "root": [
            (r"##[^\n]*", Comment.Special),
            (r"#[^\n]*", Comment.Single),
            (r'"[^"\n]*"', String.Double),
            (rf"\b(policy|library|use)([ \t]+)({_NAME})", bygroups(Keyword.Namespace, Whitespace, Name.Namespace)),
            (rf"\b(def)([ \t]+)({_NAME})", bygroups(Keyword.Declaration, Whitespace, Name.Function)),
            (rf"\b(as|failing)([ \t]+)({_NAME})", bygroups(Keyword, Whitespace, Name.Label)),
            (r"[0-9]+(\.[0-9]+)?(us|ms|s|m|h)\b", Number),
            (rf"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)([ \t]*){_UNIT}", bygroups(Number, Whitespace, Keyword.Type)),
            (r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?", Number),
            (rf"\b(per)([ \t]+){_UNIT}", bygroups(Keyword, Whitespace, Keyword.Type)),
            *((_reserved(role), colour) for role, colour in _COLOURS.items()),
            (rf"\b(req)(\s*)(\.)(\s*)({_NAME})",
             bygroups(Name.Builtin.Pseudo, Whitespace, Punctuation, Whitespace, Name.Attribute)),
            (words(tuple(BUILTINS), prefix=r"\b", suffix=r"(?=\s*\()"), Name.Builtin),
            (rf"{_NAME}(?=\s*\()", Name.Function),
            (words(tuple(VOCABULARY.features), prefix=r"\b", suffix=r"\b"), Name.Variable.Instance),
            (_NAME, Name),
            (r"\.\.|==|!=|<=|>=|[-+*/=<>?]", Operator),
            (r"[()\[\]{},:|.]", Punctuation),
            (r"\s+", Whitespace),
        ]
    }  # fmt: skip
