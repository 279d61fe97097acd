"""check, test and explain on policies in files, by name and on standard input."""

import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from smetric.cli import main
from smetric.files import shipped_policies

GOOD = """
policy mine
param OVERLOAD = 2.0 in 1..8
let idle = argmin(requests)
route idle when req.turn == 0 as first_turn
route argmax(hit_len) when max(requests) <= OVERLOAD * mean(requests) as warmest
route idle as spread

test "a first turn goes to the least loaded"
  given turn = 0
  instance | requests
  a        |        5
  b        |        1
  expect b as first_turn
"""
BAD = "policy mine\nroute argmin(reqests)\nrout argmin(requests)\n"
THREE = {
    "instances": [
        {"id": "gpu-0", "requests": 20, "hit_len": 8000, "age(requests)": 0.4},
        {"id": "gpu-1", "requests": 4, "hit_len": 0},
        {"id": "gpu-2", "requests": 3, "hit_len": None},
    ],
    "request": {"turn": 3, "prompt_len": 9000, "est_hit": 8000},
}


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.policy"
    path.write_text(GOOD)
    return str(path)


@pytest.fixture
def three(tmp_path: Path) -> str:
    path = tmp_path / "three.json"
    path.write_text(json.dumps(THREE))
    return str(path)


def test_check_is_silent_about_what_is_fine(good: str) -> None:
    for arguments in ((), ("smetric", "bailian"), (good,)):
        result = run("check", *arguments)
        assert (result.exit_code, result.output) == (0, "")


def test_check_takes_standard_input() -> None:
    assert run("check", "-", stdin=GOOD).exit_code == 0
    assert "--> <stdin>:" in run("check", "-", stdin=BAD).output


def test_check_reports_the_mistakes_of_every_file_and_ends_with_1(tmp_path: Path, good: str) -> None:
    paths = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.policy"
        path.write_text(BAD)
        paths.append(str(path))
    result = run("check", paths[0], good, paths[1])
    assert result.exit_code == 1
    assert result.output.count("did you mean `route`?") == 2
    assert f"{paths[0]}:3:1" in result.output
    assert f"{paths[1]}:3:1" in result.output


def test_check_prints_warnings_and_ends_with_0() -> None:
    result = run("check", "-", stdin="policy p\nlet unused = mean(requests)\nroute argmin(requests)\n")
    assert result.exit_code == 0
    assert "warning: " in result.output
    assert "--> <stdin>:2:" in result.output


def test_check_says_what_a_policy_reads_and_when_it_looks_up(good: str) -> None:
    printed = run("check", "-v", good, "smetric").output
    assert "parameters  OVERLOAD = 2" in printed
    assert "reads       requests" in printed
    assert "looks up    hit_len, when reached by warmest" in printed
    assert "looks up    hit_len, when reached by not_overloaded" in printed


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("smetrik", "policy smetrik: no such shipped policy; did you mean smetric?"),
        ("nothing_like_it", "; shipped: "),
        ("./none.policy", "policy none.policy: cannot be read: No such file or directory"),
    ],
)
def test_a_policy_that_is_not_there_is_a_usage_error(argument: str, message: str) -> None:
    for command in ("check", "test"):
        result = run(command, argument)
        assert result.exit_code == 2
        assert message in result.output


def test_a_file_named_without_its_ending_or_folder_is_found_for_you(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.policy", "other.txt"):
        Path(name).write_text("policy mine\nroute rr_argmin(0)\n")
    for argument, file in (("mine", "mine.policy"), ("other.txt", "./other.txt")):
        result = run("check", argument)
        assert (result.exit_code, f"did you mean the file {file}?" in result.output) == (2, True)
        assert run("check", file).exit_code == 0


def test_a_snapshot_that_cannot_be_read_is_a_usage_error(good: str, tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff")
    for path, reason in ((tmp_path / "none.json", "No such file or directory"), (binary, "not UTF-8")):
        result = run("explain", good, "--snapshot", str(path))
        assert result.exit_code == 2
        assert result.output == f"Error: {path}: cannot be read: {reason}; give a JSON file, or - for standard input\n"


@pytest.mark.slow
def test_test_runs_the_tests_of_all_shipped_policies() -> None:
    result = run("test", "--verbose")
    assert result.exit_code == 0, result.output
    for name in shipped_policies():
        assert f"{name}.policy:" in result.output
    assert result.output.rstrip().endswith("passed, 0 failed")


def test_a_failing_test_is_printed_with_what_was_decided_instead(tmp_path: Path) -> None:
    path = tmp_path / "wrong.policy"
    path.write_text(GOOD.replace("expect b", "expect a"))
    result = run("test", str(path))
    assert result.exit_code == 1
    assert f"FAILED {path}:9 a first turn goes to the least loaded" in result.output
    assert "expected a, got b" in result.output
    assert "→ first_turn" in result.output
    assert result.output.rstrip().endswith("0 passed, 1 failed")


def test_a_file_that_does_not_check_fails_its_tests(good: str) -> None:
    result = run("test", good, "-", stdin=BAD)
    assert result.exit_code == 1
    assert "1 passed, 0 failed, 1 file does not check" in result.output


def test_explain_says_why_on_a_snapshot(three: str) -> None:
    result = run("explain", "smetric", "--snapshot", three)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("smetric: route to gpu-2")
    assert "✗ not_overloaded" in result.output
    assert run("explain", "smetric", "--snapshot", "-", stdin=json.dumps(THREE)).output == result.output


def test_explain_takes_parameters(three: str) -> None:
    result = run("explain", "smetric", "--snapshot", three, "--set", "OVERLOAD=5")
    assert result.output.startswith("smetric: route to gpu-0")
    result = run("explain", "smetric", "--snapshot", three, "--set", "OVERLOD=5")
    assert result.exit_code == 1
    assert "error: `--set` sets `OVERLOD`, which this policy does not declare" in result.output
    assert "did you mean `OVERLOAD`?" in result.output


def test_explain_treats_a_look_up_that_nothing_is_said_about_as_unknown() -> None:
    rows = [{"id": "a", "requests": 1}, {"id": "b", "requests": 2}]
    later = {"instances": rows, "request": {"turn": 2, "est_hit": 100, "prompt_len": 200}}
    result = run("explain", "smetric", "--snapshot", "-", stdin=json.dumps(later))
    assert result.exit_code == 0, result.output
    assert "hit_len" in result.output
    first = run("explain", "smetric", "--snapshot", "-", stdin=json.dumps({"instances": rows}))
    assert "not looked up" in first.output or "hit_len" not in first.output


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("[", "<stdin>: not JSON"),
        ("[]", "<stdin>: expected an object, got []"),
        ({"instance": []}, "<stdin>: instance: no such name; did you mean instances?"),
        ({}, "instances: expected a list of 1 to 10000 objects"),
        ({"instances": []}, 'instances: expected a list of 1 to 10000 objects: [{"id": "a", "requests": 3}, …]'),
        ({"instances": [{"id": "a"}, {"id": "a"}]}, 'instances[1]: id: expected a text of its own, got "a"'),
        ({"instances": [{"id": "a", "reqests": 1}]}, "instances[0]: reqests: no such name; did you mean requests?"),
        ({"instances": [{"id": "a", "requests": "1"}]}, 'instances[0]: requests: expected a number, got "1"'),
        ({"instances": [{"id": "a", "requests": -1}]}, "requests: expected a number from 0 to"),
        ({"instances": [{"id": "a", "age(requests)": "x"}]}, "age(requests): expected seconds"),
        (
            {"instances": [{"id": "a", "hit_len": 9}], "request": {"prompt_len": 8}},
            "hit_len: expected a number from 0 to 8",
        ),
        ({"instances": [{"id": "a"}], "request": {"turns": 1}}, "request: turns: no such name; did you mean turn?"),
        ({"instances": [{"id": "a"}], "request": {"prompt_len": None}}, "prompt_len: is never unknown"),
        ({"instances": [{"id": "a"}], "cursors": {"x": 1}}, "cursors: expected instance ids"),
        ({"instances": [{"id": "a"}], "seed": -1}, "seed: expected a whole number"),
        ('{"instances": [{"id": "a", "requests": NaN}]}', "requests: expected a number from 0 to"),
        ("[" * 100_000, "<stdin>: "),
    ],
)
def test_a_mistake_in_a_snapshot_is_one_line_that_names_the_place(document: Any, message: str) -> None:
    text = document if isinstance(document, str) else json.dumps(document)
    result = run("explain", "smetric", "--snapshot", "-", stdin=text)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def test_a_snapshot_without_an_end_is_read_as_far_as_one_can_be_long() -> None:
    result = run("explain", "smetric", "--snapshot", "/dev/zero")
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "/dev/zero: larger than 67108864 bytes; is this the right file?" in result.output


@pytest.mark.parametrize(
    "arguments",
    [(), ("smetric",), ("--snapshot", "-"), ("smetric", "--snapshot", "-", "--decision", "A"), ("--decision", "a b"),
     ("--decision", "A", "--admin", "localhost"), ("smetric", "--snapshot", "-", "--set", "OVERLOAD")],
)  # fmt: skip
def test_explain_wants_a_snapshot_or_a_decision(arguments: tuple[str, ...]) -> None:
    result = run("explain", *arguments, stdin='{"instances": [{"id": "a"}]}')
    assert result.exit_code == 2
    assert "Error: " in result.output


class Admin(http.server.BaseHTTPRequestHandler):
    """What is no router's admin port, and knows no decision."""

    answers: ClassVar = {
        "/admin/decisions/01GONE/record": (404, b'{"error": "no such decision"}'),
        "/admin/decisions/01ODD/record": (200, b"<html>"),
        "/admin/decisions/01OTHER/record": (200, b'{"decision": {"id": "01OTHER"}}'),
        "/admin/decisions/01ILL/record": (500, b"[]"),
    }

    otherwise = 404, b"{}"

    def do_GET(self) -> None:
        status, body = self.answers.get(self.path, self.otherwise)
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def admin() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Admin) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("decision", "code", "message"),
    [
        ("01GONE", 1, "decision 01GONE is not among the last ones of"),
        ("01ODD", 3, "not as SMetric does"),
        ("01NOWHERE", 3, "answers 404, but not as SMetric does"),
        ("01OTHER", 3, "not as SMetric does"),
        ("01ILL", 3, "answers 500"),
    ],
)
def test_explain_says_what_a_router_does_not_know(admin: str, decision: str, code: int, message: str) -> None:
    result = run("explain", "--decision", decision, "--admin", admin + "/")
    assert (result.exit_code, message in result.output) == (code, True), result.output


@pytest.mark.parametrize(
    "url",
    [
        "localhost",
        "http://",
        "http://[::1",
        "http://a:b",
        "http://a:99999",
        "http://a b",
        "http://b\u00fc",
        "http://a?x",
        "ftp://a",
    ],
)
def test_what_is_no_url_of_an_admin_port_is_a_usage_error(url: str) -> None:
    result = run("explain", "--decision", "01GOOD", "--admin", url)
    assert result.exit_code == 2
    assert f'--admin: expected a URL such as http://127.0.0.1:9464, got "{url}"' in result.stderr


def test_a_password_in_an_admin_url_is_refused_and_not_shown() -> None:
    result = run("explain", "--decision", "01GOOD", "--admin", "http://me:secret@127.0.0.1:9464")
    assert result.exit_code == 2
    assert "no user or password" in result.stderr
    assert "secret" not in result.stderr


def test_a_host_that_no_look_up_takes_does_not_answer() -> None:
    result = run("explain", "--decision", "01GOOD", "--admin", "http://a..b")
    assert (result.exit_code, "http://a..b does not answer" in result.stderr) == (3, True)


@pytest.mark.parametrize("command", ["drain", "undrain", "rollback", "try"])
def test_what_answers_as_no_admin_port_does_is_not_taken_for_one(
    command: str, admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for body in (b"{}", b"[]", b"404", b"[" * 9000, b'{"error": {"message": "this path is not served here"}}'):
        monkeypatch.setattr(Admin, "otherwise", (404, body))
        result = run(command, "smetric", "--admin", admin)
        assert (result.exit_code, "answers 404, but not as SMetric does" in result.stderr) == (3, True), result.output


@pytest.mark.parametrize("command", ["drain", "undrain", "rollback"])
def test_a_name_that_is_no_text_is_asked_for_as_it_is(command: str, admin: str) -> None:
    result = run(command, "gpu-\udcff", "--admin", admin)
    assert "404" in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_a_token_that_fits_in_no_header_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, admin: str) -> None:
    monkeypatch.setenv("SMETRIC_ADMIN__TOKEN", "two lines,\nso to speak")
    result = run("explain", "--decision", "01GOOD", "--admin", admin)
    assert result.exit_code == 2
    assert "SMETRIC_ADMIN__TOKEN: admin.token: expected 16 to 256 printable ASCII characters" in result.stderr
    assert "so to speak" not in result.stderr


def test_a_router_that_does_not_answer_ends_with_3() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Admin) as server:
        port = server.server_port
    result = run("explain", "--decision", "01GOOD", "--admin", f"http://127.0.0.1:{port}")
    assert result.exit_code == 3
    assert "is the router running" in result.output


def test_findings_as_json_have_code_place_and_help(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text(BAD)
    result = run("check", "--format", "json", str(path))
    assert result.exit_code == 1
    (file,) = json.loads(result.stdout)["files"]
    assert (file["file"], file["ok"]) == (str(path), False)
    first = file["findings"][0]
    assert first == {
        "severity": "error",
        "code": "unknown-name",
        "message": "unknown name `reqests`",
        "help": "did you mean `requests`?",
        "file": str(path),
        "line": 2,
        "column": 14,
        "end_line": 2,
        "end_column": 21,
        "start": 25,
        "end": 32,
    }
    assert [found["code"] for found in file["findings"]] == ["unknown-name", "statement"]


def test_a_sound_policy_as_json_says_what_it_reads_and_when_it_looks_things_up() -> None:
    (file,) = json.loads(run("check", "--format", "json", "smetric").stdout)["files"]
    assert (file["ok"], file["policy"], file["findings"]) == (True, "smetric", [])
    assert file["reads"] == ["requests"]
    assert file["lookups"]["hit_len"]["when"] == "when reached"
    assert file["lookups"]["hit_len"]["asked_by"] == ["not_overloaded"]
    assert "store_hit_len" in file["never"]


def test_findings_for_github_are_workflow_commands_on_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text("policy p\nlet f = requests + hit_len\nroute argmin(requests) when 1 < 2\nroute argmin(0)\n")
    lines = run("check", "--format", "github", str(path)).stdout.splitlines()
    assert lines == [
        f"::error file={path},line=2,endLine=2,col=9,endColumn=27,title=units::cannot add requests and tokens"
        "%0Aput both on one scale first, e.g. norm(…) of each, or divide by a rate"
    ]
    path.write_text("policy p\nroute argmin(requests) when 1 < 2\nroute argmin(0)\n")
    result = run("check", "--format", "github", str(path))
    assert result.exit_code == 0
    assert result.stdout.startswith("::warning ")


def test_a_look_up_that_no_configured_source_fills_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text("policy p\nroute argmax(hit_len, then: store_hit_len)\n")
    config = tmp_path / "smetric.yaml"
    config.write_text("lmcache:\n  url: http://127.0.0.1:8000\n  mode: controller\n")
    result = run("check", "--config", str(config), str(path))
    assert result.exit_code == 0
    assert "warning: no configured source fills `store_hit_len`" in result.stderr
    assert "fills `hit_len`" not in result.stderr
    assert run("check", str(path)).stderr == ""


def test_verbose_says_when_each_look_up_is_asked_for(tmp_path: Path) -> None:
    lines = run("check", "-v", "smetric", "load_only").stdout.splitlines()
    assert "  looks up    hit_len, when reached by not_overloaded" in lines
    assert "  never       host_hit_len, disk_hit_len, store_hit_len" in lines
    assert lines[-1] == "  never       hit_len, host_hit_len, disk_hit_len, store_hit_len"


def test_what_is_no_utf_8_has_a_place_and_stops_no_other_file(tmp_path: Path) -> None:
    latin = tmp_path / "latin.policy"
    latin.write_bytes(b"policy p\n# f\xfcr\nroute argmin(requests)\n")
    bad = tmp_path / "bad.policy"
    bad.write_text(BAD)
    result = run("check", "--format", "json", str(latin), str(bad))
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)["files"]
    assert [(each["code"], each["line"], each["column"]) for each in first["findings"]] == [("encoding", 2, 4)]
    assert len(second["findings"]) == 2
    for command in ("check", "test", "fmt", "bench"):
        said = run(command, str(latin))
        assert said.exit_code == 1
        assert "error: this character is not valid UTF-8\n" in said.stderr
    assert latin.read_bytes()[12:13] == b"\xfc"


def test_a_file_that_cannot_be_read_is_a_finding_beside_the_others_and_ends_with_2(tmp_path: Path, good: str) -> None:
    bad = tmp_path / "bad.policy"
    bad.write_text(BAD)
    gone = tmp_path / "gone.policy"
    result = run("check", "--format", "json", str(gone), str(bad), good)
    assert result.exit_code == 2
    first, second, third = json.loads(result.stdout)["files"]
    (finding,) = first["findings"]
    assert (finding["code"], finding["file"], finding["line"]) == ("unreadable", str(gone), 1)
    assert finding["message"] == f"policy {gone}: cannot be read: No such file or directory"
    assert (len(second["findings"]), third["ok"]) == (2, True)
    assert f"::error file={gone},line=1" in run("check", "--format", "github", str(gone)).stdout
    tested = run("test", str(gone), good)
    assert tested.exit_code == 2
    assert tested.stdout.splitlines()[-1] == "1 passed, 0 failed, 1 cannot be read"
    assert "gone.policy: cannot be read" in tested.stderr


def test_a_file_that_is_too_long_is_a_finding_beside_the_others(tmp_path: Path, good: str) -> None:
    long = tmp_path / "long.policy"
    long.write_text("policy long\nroute argmin(requests)\n" + "# ü\n" * 40_000)
    result = run("check", "--format", "json", str(long), good)
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)["files"]
    (finding,) = first["findings"]
    assert (finding["code"], finding["message"]) == (
        "too-long",
        "this file is too long: a policy has at most 65536 bytes",
    )
    assert second["ok"]
    assert run("test", str(long), good).stdout.splitlines()[-1] == "1 passed, 0 failed, 1 file does not check"
    for command in ("fmt", "bench"):
        assert run(command, str(long)).exit_code == 1
    assert long.stat().st_size > 65536


@pytest.mark.parametrize(
    ("text", "code"), [(b"policy mine\n# f\xfcr\n", "encoding"), (b"policy mine\n" + b"#\n" * 40_000, "too-long")]
)
def test_a_file_of_tests_stops_no_other_file_either(tmp_path: Path, good: str, text: bytes, code: str) -> None:
    beside = Path(good).with_name("good.test.policy")
    beside.write_bytes(text)
    other = tmp_path / "other.policy"
    other.write_text(BAD)
    result = run("check", "--format", "json", good, str(other))
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)["files"]
    assert [(found["code"], found["file"]) for found in first["findings"]] == [(code, str(beside))]
    assert len(second["findings"]) == 2
    beside.unlink()
    beside.mkdir()
    unread = run("check", good, str(other))
    assert unread.exit_code == 2
    assert "good.test.policy: cannot be read: not a regular file" in unread.stderr
    assert "did you mean `route`?" in unread.stderr


@pytest.mark.parametrize("command", ["check", "test"])
def test_a_policy_may_come_through_a_pipe(command: str) -> None:
    reading, writing = os.pipe()
    os.write(writing, GOOD.encode())
    os.close(writing)
    assert run(command, f"/dev/fd/{reading}").exit_code == 0
    os.close(reading)


def test_the_shipped_library_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("check", "common").exit_code == 0
    (file,) = json.loads(run("check", "--format", "json", "common").stdout)["files"]
    assert file["library"] == "common"
    assert "common.policy: a library, which decides nothing" in run("bench", "common").stderr
    monkeypatch.chdir(tmp_path)
    (tmp_path / "common").mkdir()
    assert "policy common: no policy files in this folder" in run("check", "common").stderr


def test_k_runs_the_tests_whose_sentence_contains_the_text(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text(GOOD)
    assert run("test", "-k", "LEAST loaded", str(path)).stdout == "1 passed, 0 failed\n"
    none = run("test", "-k", "nothing like it", str(path))
    assert none.exit_code == 1
    assert none.stdout == "0 passed, 0 failed\n"
    assert none.stderr == 'no test has "nothing like it" in its sentence\n'
    assert run("test", "-k", "x", "--min-coverage", "50", str(path)).exit_code == 2


def test_what_no_test_has_shown_is_named_and_may_fail_the_run(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text(GOOD)
    result = run("test", str(path))
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"{path}: 29 % covered",
        "  guard `req.turn == 0` of `first_turn` never failed",
        "  guard `max(requests) <= OVERLOAD * mean(requests)` of `warmest` never held",
        "  guard `max(requests) <= OVERLOAD * mean(requests)` of `warmest` never failed",
        "  rule `warmest` never taken",
        "  rule `spread` never taken",
        "1 passed, 0 failed",
    ]
    poor = run("test", "--min-coverage", "80", str(path))
    assert poor.exit_code == 1
    assert f"{path}: 29 % covered, less than the 80 % demanded" in poor.stdout
    assert run("test", "--min-coverage", "100", "smetric").exit_code == 0


def test_results_are_written_as_junit(tmp_path: Path) -> None:
    path, junit = tmp_path / "p.policy", tmp_path / "junit.xml"
    path.write_text(GOOD.replace("expect b", "expect a"))
    assert run("test", "--junit", str(junit), str(path), "load_only").exit_code == 1
    root = ElementTree.parse(junit).getroot()
    assert [(suite.get("tests"), suite.get("failures")) for suite in root] == [("1", "1"), ("3", "0")]
    (failure,) = root.iter("failure")
    assert failure.get("message") == "expected a, got b (seed 0)"
    assert "→ first_turn" in (failure.text or "")
    (case,) = root[0]
    assert (case.get("file"), case.get("line")) == (str(path), "9")
    assert run("test", "--junit", str(tmp_path / "no" / "x.xml"), "load_only").exit_code == 2


def test_tests_beside_a_policy_are_run_with_it_and_checked_in_their_own_text(tmp_path: Path) -> None:
    path, beside = tmp_path / "p.policy", tmp_path / "p.test.policy"
    path.write_text("policy p\nparam K = 2 requests in 1..9\nroute argmin(requests + K) as least\n")
    beside.write_text('policy p\ntest "t"\n  with K = 3\n  instance | requests\n  a | 1\n  expect a as least\n')
    for name in (path, beside):
        assert run("test", "-v", str(name)).stdout == f"passed {beside}:2 t\n1 passed, 0 failed\n"
    beside.write_text(
        'policy p\nlet x = 3\ntest "t"\n  with K = 30 tokens\n  instance | requets\n  a | 1\n  expect a\n'
    )
    result = run("check", str(path))
    assert result.exit_code == 1
    assert [line.strip() for line in result.stderr.splitlines() if "error" in line or "-->" in line] == [
        "error: a file of tests holds `test` blocks only",
        f"--> {beside}:2:1",
        "error: this test sets `K` to 30 tokens, but its unit is requests",
        f"--> {beside}:4:8",
        "error: unknown feature `requets`",
        f"--> {beside}:5:14",
    ]
    beside.write_text("policy q\n")
    assert "its header names `q`" in run("test", str(path)).stderr


@pytest.mark.slow
def test_prove_prints_the_smallest_counterexample_as_a_test(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text("## Holds: balanced.\npolicy p\nroute argmax(requests, then: waiting) as busiest\n")
    result = run("check", "--prove", str(path))
    assert result.exit_code == 1
    assert result.stdout.splitlines()[:5] == [
        f"{path}: `balanced` does not hold: c has 1 requests, the mean is 0.333",
        "",
        'test "balanced: c has 1 requests, the mean is 0.333"',
        "  instance | requests",
        "  a        |        0",
    ]
    assert run("check", str(path)).exit_code == 0
    held = run("check", "--property", "symmetric", "-v", str(path))
    assert held.exit_code == 0
    assert "  holds       symmetric: no counterexample was found" in held.stdout.splitlines()
    (file,) = json.loads(run("check", "--prove", "--format", "json", str(path)).stdout)["files"]
    assert (file["ok"], [(each["property"], each["holds"]) for each in file["promises"]]) == (
        False,
        [("balanced", False), ("symmetric", True)],
    )
    assert run("check", "--prove", "--format", "github", str(path)).stdout.startswith("::error file=")


def test_a_promise_that_nobody_knows_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text("## Holds: ballanced.\npolicy p\nroute rr_argmin(0)\n")
    result = run("check", "--prove", str(path))
    assert result.exit_code == 2
    assert f"{path}: it holds `ballanced`: no such property; did you mean `balanced`?" in result.output


def test_a_folder_stands_for_all_its_policies_and_libraries(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "deep" / "p.policy").write_text(GOOD)
    (tmp_path / "deep" / "p.test.policy").write_text("policy mine\n")
    (tmp_path / "common.policy").write_text("library common\ndef near(x) = x\n")
    (tmp_path / ".hidden" / "bad.policy").write_text(BAD)
    assert run("check", str(tmp_path)).exit_code == 0
    files = json.loads(run("check", "--format", "json", str(tmp_path)).stdout)["files"]
    assert [file["file"] for file in files] == [f"{tmp_path}/common.policy", f"{tmp_path}/deep/p.policy"]
    assert run("test", str(tmp_path)).stdout.endswith("1 passed, 0 failed\n")
    (tmp_path / "none").mkdir()
    empty = run("check", str(tmp_path / "none"))
    assert (empty.exit_code, "no policy files in this folder" in empty.output) == (2, True)


@pytest.mark.parametrize("command", ["check", "test"])
@pytest.mark.parametrize("missing", ["none", "smetrik"])
def test_what_is_not_there_leaves_the_others_to_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, missing: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("none").mkdir()
    Path("bad.policy").write_text(BAD)
    result = run(command, missing, "bad.policy")
    assert result.exit_code == 2
    assert f"policy {missing}: no " in result.output
    assert "bad.policy:" in result.output


def test_libraries_are_found_beside_the_file_and_checked_on_their_own(tmp_path: Path) -> None:
    (tmp_path / "common.policy").write_text("library common\ndef near(x) = x + 1\n")
    (tmp_path / "p.policy").write_text("policy p\nuse common (near)\nroute argmin(near(requests)) as near_one\n")
    assert run("check", str(tmp_path / "p.policy"), str(tmp_path / "common.policy")).exit_code == 0
    (tmp_path / "common.policy").write_text("library common\ndef near(x) = meen(x)\n")
    for name in ("p", "common"):
        result = run("check", str(tmp_path / f"{name}.policy"))
        assert result.exit_code == 1
        assert f"--> {tmp_path}/common.policy:2:15" in result.stderr
