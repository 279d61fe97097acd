"""pytest plugin: collects the tests of policies, and leaves other files alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

POLICY = """policy p
route argmin(requests) as least

test "the idler is taken"
  instance | requests
  a        |        2
  b        |        1
  expect b as least

test "a wrong expectation"
  instance | requests
  a        |        2
  b        |        1
  expect a
"""
BESIDE = """policy p
test "one more"
  instance | requests
  a        |        2
  expect a
"""


def test_plugin_collects_each_test_block_and_leaves_other_files_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing but the plugin under test, whether or not an installed copy has its entry point.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name, text in {
        "p.policy": POLICY,
        "p.test.policy": BESIDE,
        "q.policy": POLICY.partition("\ntest")[0].replace("\n", " ") + 'test"on one line" instance|id a|? expect a',
        "wrong.policy": POLICY.replace("requests) as", "requets) as"),
        "common.policy": 'library common\ndef near(x) = x if pool == "test" else 0  # the test "x"\n',
        "other.policy": "not one of ours\n",
        "test_x.py": "def test_x(): pass\n",
    }.items():
        (pytester.path / name).write_text(text)
    result = pytester.runpytest_inprocess("-p", "smetric.tools.pytest_plugin", "-v", "--continue-on-collection-errors")
    result.assert_outcomes(passed=4, failed=1, errors=1)
    result.stdout.fnmatch_lines(
        [
            "p.policy::the idler is taken PASSED*",
            "p.policy::a wrong expectation FAILED*",
            "p.test.policy::one more PASSED*",
            "q.policy::on one line PASSED*",
            "test_x.py::test_x PASSED*",
            "*help: did you mean `requests`?*",
            "expected a, got b (seed 0)",
            "*→ least    always",
        ]
    )
    assert "Traceback" not in result.stdout.str()


def test_plugin_does_not_import_the_language_when_loaded() -> None:
    code = "import sys, smetric.tools.pytest_plugin; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = [name for name in result.stdout.split() if name.startswith(("smetric", "lark"))]
    assert loaded == ["smetric", "smetric.tools", "smetric.tools.pytest_plugin"]
