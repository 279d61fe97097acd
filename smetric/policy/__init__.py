"""Policy language: `load` a file, then call the pure `Policy.decide` on a snapshot.

It imports nothing else of smetric; a `Vocabulary` names the values that policies may read.
"""

from smetric.policy.decision import Decision, FilterTrace, Need, RuleTrace
from smetric.policy.diagnostic import Diagnostic, PolicyError, PolicyText, Severity
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
    "PolicyText",
    "Reader",
    "RequestField",
    "RuleTrace",
    "Severity",
    "Snapshot",
    "Unknown",
    "Vocabulary",
    "digest_of",
    "load",
]
