"""Choice of a tokenizer for each model: files on this machine, else the engines."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from smetric.errors import ConfigError
from smetric.sources.tokens import auto as module
from smetric.sources.tokens.auto import MOST_CACHED, AutoEncoder, hub_folder
from smetric.sources.tokens.chat import ChatPrompt, TextPrompt, Unsupported
from tests.sources.tokens.recorded import model_folder

MODEL = "org/model-1"
TEXT = TextPrompt("a", add_special_tokens=False)


class Named:
    """Encoder that answers with one id."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.is_open = False

    async def start(self) -> None:
        self.is_open = True

    async def stop(self) -> None:
        self.is_open = False

    async def encode(self, model: str, prompt: TextPrompt | ChatPrompt, size: int) -> array[int]:
        if isinstance(prompt, ChatPrompt) and self.id != 1:
            raise Unsupported
        return array("I", [self.id])


def cached(folder: Path, model: str = MODEL, files: Path | None = None) -> dict[str, str]:
    """Put *model* into a cache as the hub's client lays it out; return the variables that name it."""
    repository = folder / "hub" / ("models--" + model.replace("/", "--"))
    snapshot = repository / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0a1b")
    (repository / "blobs").mkdir()
    for file in files.iterdir() if files is not None else ():
        blob = repository / "blobs" / file.name
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    return {"HF_HOME": str(folder)}


def test_hub_folder_is_the_snapshot_of_main(tmp_path: Path) -> None:
    environ = cached(tmp_path, files=model_folder(tmp_path, "plain"))
    found = hub_folder(MODEL, environ)
    assert found is not None
    assert json.loads((found / "tokenizer.json").read_text())
    assert hub_folder(MODEL, {"HF_HUB_CACHE": str(tmp_path / "hub")}) == found
    cached(tmp_path, "org/empty")
    for other in ("org/empty", "org/model", "../org/model-1", "a/b/c", "", "mödel"):
        assert hub_folder(other, environ) is None
    assert hub_folder(MODEL, {"HF_HUB_CACHE": "~no.such.user/hub"}) is None, "there is no home directory"


async def test_auto_encodes_by_the_files_of_the_hub(tmp_path: Path) -> None:
    from smetric.sources.tokens.local import LocalEncoder

    environ = cached(tmp_path, files=model_folder(tmp_path, "plain"))
    auto = AutoEncoder(
        Named(1),
        None,
        frozenset(),
        lambda folder: LocalEncoder({"*": folder}, max_bytes=1 << 20),
        models=frozenset({MODEL}),
        find=lambda model: hub_folder(model, environ),
    )
    await auto.start()
    chat = ChatPrompt([{"role": "user", "content": "a"}])
    await asyncio.wait(auto._chosen.values())
    assert len(await auto.encode(MODEL, chat, 10)) > 1
    await auto.stop()


@pytest.mark.parametrize(
    ("configured", "names", "has_package", "is_found", "expected"),
    [
        (True, {MODEL}, True, True, 2),
        (True, {"*"}, True, False, 2),
        (True, {"other"}, True, True, 3),
        (False, set(), True, True, 3),
        (False, set(), True, False, 1),
        (False, set(), False, True, 1),
    ],
    ids=["its folder", "a folder for all", "another's folder", "the hub", "no files", "no package"],
)
async def test_auto_prefers_folders_then_the_hub_then_engines(
    configured: bool, names: set[str], has_package: bool, is_found: bool, expected: int
) -> None:
    engine, folders, hub = Named(1), Named(2), Named(3)
    auto = AutoEncoder(
        engine,
        folders if configured else None,
        frozenset(names),
        (lambda _: hub) if has_package else None,
        models=frozenset({MODEL}),
        find=lambda _: Path("/hub") if is_found else None,
    )
    await auto.start()
    await asyncio.wait(auto._chosen.values())
    assert (await auto.encode(MODEL, TEXT, 1)).tolist() == [expected]
    assert (await auto.encode(MODEL, ChatPrompt([]), 1)).tolist() == [1], "engines render what files cannot"
    auto.distrust(MODEL)
    assert (await auto.encode(MODEL, TEXT, 1)).tolist() == [1]
    await auto.stop()
    assert not engine.is_open
    assert not folders.is_open


class Hub:
    """An `AutoEncoder` for which every model lies on this machine, and the encoders that it loaded."""

    def __init__(self) -> None:
        self.loaded: list[Named] = []
        self.auto = AutoEncoder(Named(1), None, frozenset(), self._load, find=Path)

    def _load(self, folder: Path) -> Named:
        if folder.name == "broken":
            raise ConfigError("broken")
        encoder = Named(2)
        encoder.is_open = True
        self.loaded.append(encoder)
        return encoder

    async def ids(self, *models: str) -> list[int]:
        """Return the id of each model once its choice is made."""
        for model in models:
            assert (await self.auto.encode(model, TEXT, 1))[0] in (1, 2)
            await asyncio.wait(self.auto._chosen.values())
        return [(await self.auto.encode(model, TEXT, 1))[0] for model in models]

    @property
    def open(self) -> int:
        return sum(encoder.is_open for encoder in self.loaded)


FULL = [f"m{number}" for number in range(MOST_CACHED)]


async def test_auto_asks_engines_while_files_load_if_they_are_unusable_and_for_too_many_models() -> None:
    hub = Hub()
    assert (await hub.auto.encode("m0", TEXT, 1)).tolist() == [1], "it is loading"
    assert await hub.ids("broken", *FULL, "more") == [1, *[2] * MOST_CACHED, 1]
    await hub.auto.stop()
    assert (len(hub.loaded), hub.open) == (MOST_CACHED, 0)


async def test_auto_gives_back_the_place_of_a_distrusted_model() -> None:
    hub = Hub()
    await hub.ids(*FULL)
    hub.auto.distrust("m0")
    assert await hub.ids("m0", "more") == [1, 2]
    assert (len(hub.loaded), hub.open) == (MOST_CACHED + 1, MOST_CACHED)
    await hub.auto.stop()
    assert hub.open == 0


async def test_auto_gives_back_the_place_of_a_forgotten_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CHOICES", MOST_CACHED - 1)
    hub = Hub()
    for _ in range(2):
        for model in FULL:
            assert await hub.ids(model) == [2]
    assert (len(hub.loaded), hub.open) == (2 * MOST_CACHED, MOST_CACHED - 1)
    assert (await hub.auto.encode("loading", TEXT, 1)).tolist() == [1]
    assert await hub.ids(*FULL[:-1]) == [2] * (MOST_CACHED - 1), "one forgotten while it loads takes no place"
    await hub.auto.stop()
    assert hub.open == 0


@pytest.mark.parametrize("fails", ["find", "load"])
async def test_auto_asks_engines_if_the_choice_fails(fails: str) -> None:
    def fail(_: object) -> Named:
        raise RuntimeError

    auto = AutoEncoder(Named(1), None, frozenset(), fail, find=fail if fails == "find" else Path)  # type: ignore[arg-type]
    with capture_logs() as logs:
        for _ in range(3):
            assert (await auto.encode(MODEL, TEXT, 1)).tolist() == [1]
            await asyncio.wait(auto._chosen.values())
    assert [(line["event"], line["reason"]) for line in logs] == [("smetric.tokenize.by_engines", "RuntimeError")]
    await auto.stop()
