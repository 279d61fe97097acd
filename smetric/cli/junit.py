"""Results of policy tests as JUnit XML, which continuous integration reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from smetric.errors import ConfigError
from smetric.policy.testing import TestResult

#: What XML 1.0 cannot hold.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(path: Path, found: Mapping[str, Sequence[TestResult]]) -> None:
    """Write *found*, the results by policy file, to *path*.

    Raises:
        ConfigError: it cannot be written.
    """
    root = ElementTree.Element("testsuites", name="smetric test")
    for file, results in found.items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": _clean(file), **_counts(results)})
        for result in results:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                name=_clean(result.sentence),
                classname=_clean(file),
                file=_clean(result.path),
                line=str(result.line),
                time=f"{result.seconds:.4f}",
            )
            if not result.passed:
                message, _, account = result.failure.partition("\n")
                failure = ElementTree.SubElement(case, "failure", message=_clean(message))
                failure.text = _clean(account)
    ElementTree.indent(root)
    try:
        ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise ConfigError(f"--junit {path}: cannot be written: {error.strerror}") from error


def _counts(results: Sequence[TestResult]) -> dict[str, str]:
    return {
        "tests": str(len(results)),
        "failures": str(sum(not result.passed for result in results)),
        "errors": "0",
        "time": f"{sum(result.seconds for result in results):.4f}",
    }


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("�", text)
