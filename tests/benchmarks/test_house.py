"""Figures of the house: size, loaded modules, and the path of one request."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.house import BEGIN, END, LABORATORY, ROOT, House, RequestPath, Size, measure, package_size, write

HOUSE = House(Size(3, 4000), Size(2, 300), RequestPath(7, 20, (7, 8), (19, 21), ("smetric/app.py",), ()))


def test_package_size_leaves_out_laboratory_and_other_files(tmp_path: Path) -> None:
    package = tmp_path / "smetric"
    for name, text in {
        "app.py": "a\n\nb\n",
        "proxy/http.py": "c\n",
        "lab/engine.py": "d\n",
        "ui/page.js": "e\n",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert package_size(tmp_path) == Size(2, 4)


@pytest.mark.slow
def test_measure_follows_a_request_through_a_router_process() -> None:
    house = measure(ROOT, turns=3, quiet_s=1.1, traced=False)
    assert house.loaded is not None
    assert house.request is not None
    assert 0 < house.loaded.modules <= house.package.modules
    assert 0 < house.loaded.lines <= house.package.lines
    path = house.request
    assert 5 < path.enters <= house.loaded.modules
    assert path.moves >= path.enters - 1
    assert all((ROOT / name).is_file() for name in path.modules)
    assert not [name for name in path.modules if name.split("/")[1] in LABORATORY]
    assert path.background


def test_write_puts_the_table_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "architecture.md"
    page.write_text(f"# Architecture\n\n{BEGIN}\nold\n{END}\n\nMore.\n")
    for _ in range(2):
        write(HOUSE, page)
        before, _, rest = page.read_text().partition(BEGIN)
        table, _, after = rest.partition(END)
        assert (before, after) == ("# Architecture\n\n", "\n\nMore.\n")
        assert "| lines in them | 4,000 | ≤ 37,000 |" in table
        assert "| modules that a warm streaming request enters | 7 | ≤ 45 |" in table
        assert "traces" not in table


def test_write_names_the_markers_that_a_page_lacks(tmp_path: Path) -> None:
    page = tmp_path / "architecture.md"
    for text in (None, "# Architecture\n", f"{END} {BEGIN}"):
        if text is not None:
            page.write_text(text)
        with pytest.raises(SystemExit, match=r"architecture\.md: no place for the figures: .*house:begin"):
            write(HOUSE, page)
