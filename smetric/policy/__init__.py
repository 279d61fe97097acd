"""The policy language: `load` a file, then `Policy.decide` on a snapshot, purely.

It imports nothing of smetric; the words that policies may read are handed to it as a `Vocabulary`.
"""

from smetric.policy.decision import Decision, FilterTrace, Need, RuleTrace
from smetric.policy.diagnostic import Diagnostic, PolicyError, Severity, Source
from smetric.policy.library import Reader
from smetric.policy.parameter import Parameter
from smetric.policy.plan import Outcome
from smetric.policy.policy import Lookup, Policy, digest_of, load
from smetric.policy.snapshot import Snapshot
from smetric.policy.vocabulary import LARGEST, NEVER, Feature, Kind, RequestField, Unknown, Vocabulary

__all__ = [
    "LARGEST",
    "NEVER",
    "Decision",
    "Diagnostic",
    "Feature",
    "FilterTrace",
    "Kind",
    "Lookup",
    "Need",
    "Outcome",
    "Parameter",
    "Policy",
    "PolicyError",
    "Reader",
    "RequestField",
    "RuleTrace",
    "Severity",
    "Snapshot",
    "Source",
    "Unknown",
    "Vocabulary",
    "digest_of",
    "load",
]
