from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from smetric.config.settings import TokenizerSettings
from smetric.doctor.examination import as_text, examine
from smetric.doctor.site import Severity
from tests.doctor.lab import Lab, the_only, told
from tests.sources.tokens.recorded import model_folder


async def test_a_tokenizer_of_another_model_is_found(lab: Lab, tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path, "plain"))
    lab.settings = replace(lab.settings, tokenizer=TokenizerSettings(source="local", folders={"*": folder}))
    found = dict(told(await examine(lab.settings)))
    assert found.keys() == {"tokens", "hits"}
    assert "with tools has other token ids here than on e0" in found["tokens"].what
    assert "let `tokenizer.folders` name" in found["tokens"].remedy
    assert "the engine counts" in found["hits"].what


async def test_a_model_without_a_folder_is_found(lab: Lab, tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path, "plain"))
    lab.settings = replace(lab.settings, tokenizer=TokenizerSettings(source="local", folders={"n": folder}))
    check, finding = the_only(await examine(lab.settings))
    assert (check, finding.severity) == ("tokens", Severity.ERROR)
    assert "set `tokenizer.folders: {m: FOLDER}`" in finding.remedy


async def test_instances_that_want_a_key_are_shown_theirs(lab: Lab) -> None:
    for front in lab.fronts:
        front.key = "a-key-of-an-engine"
    keyed = tuple(replace(one, api_key="a-key-of-an-engine") for one in lab.settings.instances)
    lab.settings = replace(lab.settings, instances=keyed, tokenizer=TokenizerSettings(source="engine"))
    examination = await examine(lab.settings)
    assert told(examination) == [], as_text(examination)
