"""Row H11: service without privileges on a read-only file system."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from tests.fakes import FakeEngine, fetch
from tests.faults.harness import chat
from tests.faults.process import process

#: The one place where it may write, in the name space of mounts below.
STATE = "/srv"
#: Prefix of a command that runs as the user nobody, with no capability, no home and a file system that is read-only but
#: for the folder `$WRITABLE`, which is at `STATE`.
UNPRIVILEGED = (
    *("unshare", "--mount", "--propagation", "private", "bash", "-c"),
    f'mount --bind "$WRITABLE" {STATE} && mount -o remount,bind,ro / && cd / && '
    'exec env -u HOME setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs --inh-caps=-all "$@"',
    "unprivileged",
)
#: Conditions without which a test would prove nothing.
CONFINED = f"""
import os, tempfile
import smetric.app
assert (os.getuid(), os.geteuid()) == (65534, 65534)
for path in (smetric.app.__file__, "/", {__file__!r}):
    assert os.statvfs(path).f_flag & os.ST_RDONLY, path
tempfile.TemporaryFile(dir={STATE!r}).close()
"""


def why_not_confined(writable: Path) -> str:
    """Why no process can be confined like that here, to *writable*, which becomes nobody's; empty if one can."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return "needs root, unshare and setpriv"
    os.chown(writable, 65534, 65534)
    tried = subprocess.run(
        [*UNPRIVILEGED, sys.executable, "-c", CONFINED],
        env={**os.environ, "WRITABLE": str(writable)},
        capture_output=True,
        check=False,
        timeout=60,
    )
    return tried.stderr.decode().strip().rpartition("\n")[2] if tried.returncode else ""


async def test_h11_router_serves_unprivileged_on_a_read_only_file_system(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    if why_not := await asyncio.to_thread(why_not_confined, state):
        pytest.skip(f"no process can be confined here: {why_not}")
    environ = {
        "WRITABLE": str(state),
        "SMETRIC_STATE_DIR": STATE,
        "SMETRIC_PREFIX_INDEX__FOLDER": STATE,
        "SMETRIC_PREFIX_INDEX__SAVE_EVERY": "100ms",
        "SMETRIC_RECORD": f"{STATE}/decisions.jsonl",
    }
    engine = FakeEngine()
    await engine.start()
    arguments = ("--instance", engine.url)
    async with process(tmp_path / "log", *arguments, before=UNPRIVILEGED, environ=environ, policy="smetric") as router:
        status = await asyncio.to_thread(Path(f"/proc/{router.process.pid}/status").read_text)
        assert "Uid:\t65534\t65534\t65534\t65534" in status
        assert "CapEff:\t0000000000000000" in status
        assert (await fetch(router.data, "POST", "/v1/chat/completions", chat())).status == 200
        (instance,) = orjson.loads((await fetch(router.admin, "GET", "/admin/instances")).body)["instances"]
        drained = await fetch(router.admin, "POST", f"/admin/instances/{instance['id']}/drain")
        assert drained.status == 200
        router.terminate()
        assert await router.ended() == 0
        written = {path.name: path.stat().st_uid for path in state.iterdir()}
        assert written == {"drained.json": 65534, "prefix-index": 65534, "decisions.jsonl": 65534}
        log = await asyncio.to_thread(router.log.read_text)
        assert "Traceback" not in log
        assert '"level":"error"' not in log
    await engine.stop()
