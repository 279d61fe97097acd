"""Commands about policy files: check, test, fmt and bench."""

from __future__ import annotations

import ast
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import watchfiles

from smetric.files import shipped_policies
from tests.cli.commands import BAD, GOOD, run


def test_check_without_findings_prints_nothing(good: str) -> None:
    for arguments in ((), ("smetric", "bailian"), (good,)):
        result = run("check", *arguments)
        assert (result.exit_code, result.output) == (0, "")


def test_check_reads_standard_input() -> None:
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


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("smetrik", "policy smetrik: no such shipped policy; did you mean smetric?"),
        ("nothing_like_it", "; shipped: "),
        ("./none.policy", "policy none.policy: cannot be read: No such file or directory"),
    ],
)
def test_policy_missing_is_a_usage_error(argument: str, message: str) -> None:
    for command in ("check", "test"):
        result = run(command, argument)
        assert result.exit_code == 2
        assert message in result.output


def test_policy_name_suggests_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.policy", "other.txt"):
        Path(name).write_text("policy mine\nroute rr_argmin(0)\n")
    for argument, file in (("mine", "mine.policy"), ("other.txt", "./other.txt")):
        result = run("check", argument)
        assert (result.exit_code, f"did you mean the file {file}?" in result.output) == (2, True)
        assert run("check", file).exit_code == 0


@pytest.mark.slow
def test_test_runs_the_tests_of_all_shipped_policies() -> None:
    result = run("test", "--verbose")
    assert result.exit_code == 0, result.output
    for name in shipped_policies():
        assert f"{name}.policy:" in result.output
    assert result.output.rstrip().endswith("passed, 0 failed")


def test_test_prints_the_decision_of_a_failing_test(tmp_path: Path) -> None:
    path = tmp_path / "wrong.policy"
    path.write_text(GOOD.replace("expect b", "expect a"))
    result = run("test", str(path))
    assert result.exit_code == 1
    assert f"FAILED {path}:9 a first turn goes to the least loaded" in result.output
    assert "expected a, got b" in result.output
    assert "→ first_turn" in result.output
    assert result.output.rstrip().endswith("0 passed, 1 failed")


def test_test_fails_for_a_file_that_does_not_check(good: str) -> None:
    result = run("test", good, "-", stdin=BAD)
    assert result.exit_code == 1
    assert "1 passed, 0 failed, 1 file does not check" in result.output


def test_check_config_warns_of_look_ups_without_a_source(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text("policy p\nroute argmax(hit_len, then: store_hit_len)\n")
    config = tmp_path / "smetric.yaml"
    config.write_text("lmcache:\n  url: http://127.0.0.1:8000\n  mode: controller\n")
    result = run("check", "--config", str(config), str(path))
    assert result.exit_code == 0
    assert "warning: no configured source fills `store_hit_len`" in result.stderr
    assert "fills `hit_len`" not in result.stderr
    assert run("check", str(path)).stderr == ""


def test_check_config_refuses_what_fits_no_instance(tmp_path: Path) -> None:
    path, config = tmp_path / "p.policy", tmp_path / "smetric.yaml"
    path.write_text('policy p\nkeep pool == "h10O"\nprefer pool == "a100" or zone == "z"\nroute rr_argmin(requests)\n')
    config.write_text("instances:\n- {url: http://a:1, pool: h100}\n- {url: http://b:1, pool: a100}\n")
    result = run("check", "--config", str(config), str(path))
    assert result.exit_code == 1
    assert "error: this holds for none of the 2 instances" in result.stderr
    assert "= help: did you mean `h100`?" in result.stderr
    assert "warning: this holds for none of the 2 instances" in result.stderr
    assert run("check", str(path)).exit_code == 0


@pytest.mark.parametrize(
    ("text", "code", "message", "place"),
    [
        (b"policy p\n# f\xfcr\nroute argmin(requests)\n", "encoding", "this character is not valid UTF-8", (2, 4)),
        (b"policy p\n" + b"#\n" * 40_000, "too-long", "this file is too long: a policy has at most 65536 bytes", None),
        (None, "unreadable", "policy {path}: cannot be read: No such file or directory", (1, 1)),
    ],
)
def test_check_unusable_file_is_a_finding_beside_others(
    tmp_path: Path, good: str, text: bytes | None, code: str, message: str, place: tuple[int, int] | None
) -> None:
    path, bad = tmp_path / "odd.policy", tmp_path / "bad.policy"
    bad.write_text(BAD)
    if text is not None:
        path.write_bytes(text)
    message, exit_code = message.format(path=path), 1 if text is not None else 2
    result = run("check", "--format", "json", str(path), str(bad), good)
    assert result.exit_code == exit_code
    first, second, third = json.loads(result.stdout)["files"]
    (finding,) = first["findings"]
    assert (finding["code"], finding["message"], finding["file"]) == (code, message, str(path))
    assert place in (None, (finding["line"], finding["column"]))
    assert (len(second["findings"]), third["ok"]) == (2, True)
    assert f"::error file={path},line=" in run("check", "--format", "github", str(path)).stdout
    tested = run("test", str(path), good)
    assert tested.exit_code == exit_code
    assert tested.stdout.splitlines()[-1].startswith("1 passed, 0 failed, 1 ")
    for command in ("test", "fmt", "bench"):
        said = run(command, str(path))
        assert said.exit_code == exit_code
        assert text is None or message in said.stderr
    assert text is None or path.read_bytes() == text


@pytest.mark.parametrize(
    ("text", "code"), [(b"policy mine\n# f\xfcr\n", "encoding"), (b"policy mine\n" + b"#\n" * 40_000, "too-long")]
)
def test_check_unreadable_test_file_is_a_finding_beside_others(
    tmp_path: Path, good: str, text: bytes, code: str
) -> None:
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
def test_policy_is_read_from_a_pipe(command: str) -> None:
    reading, writing = os.pipe()
    os.write(writing, GOOD.encode())
    os.close(writing)
    assert run(command, f"/dev/fd/{reading}").exit_code == 0
    os.close(reading)


def test_policy_name_finds_the_shipped_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("check", "common").exit_code == 0
    (file,) = json.loads(run("check", "--format", "json", "common").stdout)["files"]
    assert file["library"] == "common"
    assert "common.policy: a library, which decides nothing" in run("bench", "common").stderr
    monkeypatch.chdir(tmp_path)
    (tmp_path / "common").mkdir()
    assert "policy common: no policy files in this folder" in run("check", "common").stderr


def test_test_k_selects_by_sentence(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text(GOOD)
    assert run("test", "-k", "LEAST loaded", str(path)).stdout == "1 passed, 0 failed\n"
    none = run("test", "-k", "nothing like it", str(path))
    assert none.exit_code == 1
    assert none.stdout == "0 passed, 0 failed\n"
    assert none.stderr == 'no test has "nothing like it" in its sentence\n'
    assert run("test", "-k", "x", "--min-coverage", "50", str(path)).exit_code == 2


def test_test_coverage_is_reported_and_may_fail(tmp_path: Path) -> None:
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


def test_test_file_beside_a_policy_runs_with_it(tmp_path: Path) -> None:
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
def test_check_prove_prints_the_smallest_counterexample(tmp_path: Path) -> None:
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


def test_check_prove_unknown_promise_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text("## Holds: ballanced.\npolicy p\nroute rr_argmin(0)\n")
    result = run("check", "--prove", str(path))
    assert result.exit_code == 2
    assert f"{path}: it holds `ballanced`: no such property; did you mean `balanced`?" in result.output


def test_check_folder_means_all_policies_in_it(tmp_path: Path) -> None:
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
def test_policy_missing_leaves_the_others_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, missing: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("none").mkdir()
    Path("bad.policy").write_text(BAD)
    result = run(command, missing, "bad.policy")
    assert result.exit_code == 2
    assert f"policy {missing}: no " in result.output
    assert "bad.policy:" in result.output


def test_check_finds_libraries_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "common.policy").write_text("library common\ndef near(x) = x + 1\n")
    (tmp_path / "p.policy").write_text("policy p\nuse common (near)\nroute argmin(near(requests)) as near_one\n")
    assert run("check", str(tmp_path / "p.policy"), str(tmp_path / "common.policy")).exit_code == 0
    (tmp_path / "common.policy").write_text("library common\ndef near(x) = meen(x)\n")
    for name in ("p", "common"):
        result = run("check", str(tmp_path / f"{name}.policy"))
        assert result.exit_code == 1
        assert f"--> {tmp_path}/common.policy:2:15" in result.stderr


UGLY = "policy mine\nroute argmin( requests )when req.turn==0 as first_turn # why\nroute rr_argmin(0)as spread"


FINE = """\
policy mine

route argmin(requests)  when req.turn == 0  as first_turn  # why
route rr_argmin(0)                          as spread
"""


@pytest.fixture
def ugly(tmp_path: Path) -> Path:
    path = tmp_path / "mine.policy"
    path.write_text(UGLY)
    return path


def test_fmt_file_once_and_again(ugly: Path) -> None:
    ugly.chmod(0o640)
    first = run("fmt", str(ugly))
    assert (first.exit_code, first.output) == (0, f"{ugly}: laid out\n")
    assert ugly.read_text() == FINE
    assert stat.S_IMODE(ugly.stat().st_mode) == 0o640
    written = ugly.stat().st_ino
    second = run("fmt", str(ugly))
    assert (second.exit_code, second.output) == (0, "")
    assert ugly.stat().st_ino == written
    assert os.listdir(ugly.parent) == ["mine.policy"]


def test_fmt_check_names_files_and_writes_nothing(ugly: Path) -> None:
    result = run("fmt", "--check", str(ugly))
    assert result.exit_code == 1
    assert f"run `smetric fmt {ugly}`" in result.stderr
    assert ugly.read_text() == UGLY
    spaced = ugly.rename(ugly.with_name("not mine.policy"))
    assert f"run `smetric fmt '{spaced}'`" in run("fmt", "--check", str(spaced)).stderr
    assert run("fmt", "--check", "-", stdin=UGLY).stderr == "<stdin>: not in its canonical layout\n"
    ugly.write_text(FINE)
    assert (
        run("fmt", "--check", "--diff", str(ugly)).exit_code,
        run("fmt", "--check", "--diff", str(ugly)).output,
    ) == (0, "")


def test_fmt_diff_prints_changes_and_writes_nothing(ugly: Path) -> None:
    result = run("fmt", "--diff", str(ugly))
    assert result.exit_code == 1
    assert "-route rr_argmin(0)as spread\n\\ No newline at end of file\n" in result.stdout
    assert "+route rr_argmin(0)                          as spread\n" in result.stdout
    assert ugly.read_text() == UGLY


def test_fmt_standard_input_goes_to_standard_output() -> None:
    assert run("fmt", "-", stdin=UGLY).stdout == FINE
    assert run("fmt", "-", stdin=FINE).stdout == FINE
    assert run("fmt", "-", "--check", stdin=UGLY).exit_code == 1


def test_fmt_folder_skips_hidden_files(ugly: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deep/other.policy", ".hidden/third.policy", "deep/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(UGLY)
    monkeypatch.chdir(tmp_path)
    result = run("fmt")
    assert result.exit_code == 0
    assert result.output.count("laid out") == 2
    assert (tmp_path / "deep/other.policy").read_text() == FINE
    assert (tmp_path / ".hidden/third.policy").read_text() == UGLY
    assert (tmp_path / "deep/notes.txt").read_text() == UGLY


def test_fmt_file_without_folder_or_suffix(ugly: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unusual = ugly.rename(ugly.with_name("mine"))
    monkeypatch.chdir(ugly.parent)
    assert run("fmt", "mine").output == "mine: laid out\n"
    assert unusual.read_text() == FINE


def test_fmt_test_file_leaves_its_policy(ugly: Path) -> None:
    beside = ugly.with_name("mine.test.policy")
    beside.write_text('policy mine\ntest "t" instance|requests a|1 expect a')
    assert run("fmt", str(beside)).exit_code == 0
    assert beside.read_text() == ('policy mine\n\ntest "t"\n  instance | requests\n  a        |        1\n  expect a\n')
    assert ugly.read_text() == UGLY


def test_fmt_keeps_a_symbolic_link(ugly: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.policy"
    link.symlink_to(ugly)
    run("fmt", str(link))
    assert link.is_symlink()
    assert ugly.read_text() == FINE


def test_fmt_skips_a_file_that_does_not_parse(ugly: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.policy"
    broken.write_text("policy broken\nrout  x\n")
    result = run("fmt", str(broken), str(ugly))
    assert result.exit_code == 1
    assert "did you mean `route`?" in result.stderr
    assert broken.read_text() == "policy broken\nrout  x\n"
    assert ugly.read_text() == FINE


def test_fmt_missing_file_ends_with_2(tmp_path: Path) -> None:
    missing = run("fmt", str(tmp_path / "none.policy"))
    assert missing.exit_code == 2
    assert "no such file or folder" in missing.stderr


def test_fmt_failed_write_leaves_the_file(ugly: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    result = run("fmt", str(ugly))
    assert result.exit_code == 2
    assert f"policy {ugly}: cannot be written: No space left on device" in result.stderr
    assert ugly.read_text() == UGLY
    assert os.listdir(ugly.parent) == ["mine.policy"]


def test_fmt_without_room_for_a_draft_leaves_the_file(ugly: Path) -> None:
    """The longest file name leaves no room for that of a draft, as a read-only file system leaves none."""
    longest = ugly.with_name("n" * 248 + ".policy")
    ugly.rename(longest)
    result = run("fmt", str(longest))
    assert result.exit_code == 2
    assert f"policy {longest}: cannot be written: File name too long" in result.stderr
    assert longest.read_text() == UGLY


@pytest.mark.parametrize("arguments", [["."], [], ["--check"], ["--diff", "."]])
def test_fmt_folder_without_policies_ends_with_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("fmt", *arguments)
    assert result.exit_code == 2
    assert "policy .: no policy files in this folder" in result.stderr


def test_bench_table_has_a_line_per_request_and_a_column_per_size() -> None:
    result = run("bench", "smetric", "--calls", "20")
    assert result.exit_code == 0
    head, sizes, *lines = result.output.rstrip().splitlines()
    assert head.startswith("smetric ")
    assert "µs per decision" in head
    assert sizes.split() == ["8", "32", "128", "1024"]
    assert [(line.split("  ")[0], line.split()[-1]) for line in lines] == [
        ("first turn", "balance"),
        ("later turn, cached", "stick"),
        ("later turn, cache lost", "balance"),
    ]
    assert all(line.count(" / ") == 4 for line in lines)


def test_bench_json_has_every_figure() -> None:
    result = run("bench", "load_only", "round_robin", "--calls", "20", "--format", "json")
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert [each["policy"] for each in found] == ["load_only", "round_robin"]
    for each in found:
        assert len(each["hash"]) == 12
        assert len(each["figures"]) == 12
        assert set(each["figures"][0]) == {"instances", "request", "rule", "p50_us", "p99_us"}
        assert all(figure["p99_us"] >= figure["p50_us"] >= 0 for figure in each["figures"])


def test_bench_python_prints_the_compiled_policy() -> None:
    result = run("bench", "smetric", "--python")
    assert result.exit_code == 0
    (function,) = ast.parse(result.output).body
    assert isinstance(function, ast.FunctionDef)
    assert [argument.arg for argument in function.args.args] == ["policy", "snapshot", "req", "used", "seed"]
    assert "snapshot.columns" in result.output


def test_bench_skips_libraries(tmp_path: Path) -> None:
    library, policy = tmp_path / "common.policy", tmp_path / "p.policy"
    library.write_text("library common\ndef busy(x) = max(requests) > x")
    policy.write_text("policy p\nuse common (busy)\nroute argmin(requests) when busy(3)\nroute rr_argmin(0)")
    result = run("bench", str(library), str(policy), "--python")
    assert result.exit_code == 0
    assert result.stdout.count("def decide(") == 1
    assert f"{library}: a library" in result.stderr


def test_bench_refuses_what_does_not_check() -> None:
    result = run("bench", "-", stdin="policy p\nroute argmin(reqests)")
    assert result.exit_code == 1
    assert "did you mean `requests`?" in result.stderr
    assert run("bench", "none.policy").exit_code == 2
    assert run("bench", "smetric", "--python", "--format", "json").exit_code == 2
    assert run("bench", "smetric", "--calls", "1").exit_code == 2


def test_check_watch_checks_again_after_each_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.policy"
    path.write_text(BAD)

    def changes(*folders: Path, **_: object) -> Iterator[None]:
        assert folders == (tmp_path,)
        for text in (GOOD, BAD):
            path.write_text(text)
            yield
        raise KeyboardInterrupt

    monkeypatch.setattr(watchfiles, "watch", changes)
    result = run("check", "--watch", str(path))
    assert result.exit_code == 130
    assert result.stderr.count("did you mean `route`?") == 2
    assert " 1 of 1 fine\n" in result.stderr
    assert " 0 of 1 fine\n" in result.stderr
    assert run("check", "--watch", "-", stdin=GOOD).exit_code == 2
