"""What the prefix index knows in part: other sources are asked first."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from smetric.fleet.instance import Instance
from smetric.request.request import InferenceRequest
from smetric.sources.prefix_index.index import PrefixIndex, PrefixPart
from tests.sources.lettered import TOKENS_PER_BLOCK, hits, instances, request


def expecting(blocks: str, expected: float) -> InferenceRequest:
    return replace(request(blocks), turn=1, est_hit=int(expected * TOKENS_PER_BLOCK))


def parts(index: PrefixIndex, asked: InferenceRequest, fleet: Sequence[Instance]) -> list[float | None]:
    cells = PrefixPart(index).lookup(asked, fleet)["hit_len"]
    return [cell if cell is None else cell / TOKENS_PER_BLOCK for cell in cells]


def test_less_than_is_expected_of_an_instance_that_was_not_watched_from_its_start_is_a_part() -> None:
    index, fleet = PrefixIndex(yields=True), instances(1, seen_empty=False)
    index.prefilled(request("ab"), fleet[0])
    for asked in (expecting("abcd", 4), expecting("abcd", 3), request("abcd")):
        assert hits(index, asked, fleet) == [None]
        assert parts(index, asked, fleet) == [2]


def test_what_is_expected_but_for_less_than_a_block_is_the_whole() -> None:
    index, fleet = PrefixIndex(yields=True), instances(1, seen_empty=False)
    index.prefilled(request("ab"), fleet[0])
    assert hits(index, expecting("abcd", 2), fleet) == [2]
    assert hits(index, expecting("abcd", 2.9), fleet) == [2]


def test_of_an_instance_that_was_watched_from_its_start_every_length_is_the_whole() -> None:
    index, fleet = PrefixIndex(yields=True), instances(2)
    index.prefilled(request("ab"), fleet[0])
    assert hits(index, expecting("abcd", 4), fleet) == [2, 0]


def test_with_nobody_else_to_ask_a_part_is_told_at_once() -> None:
    index, fleet = PrefixIndex(), instances(1, seen_empty=False)
    index.prefilled(request("ab"), fleet[0])
    assert hits(index, expecting("abcd", 4), fleet) == [2]


def test_no_part_is_unknown_never_nothing() -> None:
    index, fleet = PrefixIndex(yields=True), instances(1, seen_empty=False)
    assert parts(index, expecting("abcd", 4), fleet) == [None]
    assert parts(index, InferenceRequest(id="r", api=request("a").api, model="m", prompt=None), fleet) == [None]


def test_one_of_several_routers_that_share_nothing_knows_of_no_miss() -> None:
    index, fleet = PrefixIndex(sees_all=False, warm_up_s=0.0), instances(2)
    index.prefilled(request("ab"), fleet[0])
    assert hits(index, request("abcd"), fleet) == [2, None]
    fleet[1].restarted(2000.0)
    assert hits(index, request("abcd"), fleet) == [2, None]
