"""Write the Grafana dashboard beside this file from the rows of `rows.py`; `--check` fails if it is stale.

python examples/grafana/generate.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from panels import Panel, Row, series
from rows import rows

from smetric import names

FILE = Path(__file__).parent / "smetric.json"
_WIDE = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Return the dashboard in the format that Grafana 10 and later import."""
    return {
        "title": "SMetric",
        "uid": "smetric",
        "description": "Decisions of SMetric routers, and what came of them.",
        "tags": ["smetric", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": [_reloads()]},
        "panels": _panels(),
    }


def text() -> str:
    """Return the content of the dashboard's file."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def _variables() -> list[dict[str, Any]]:
    """Return the variables for data source, router and instance."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    build, up = names.BUILD_INFO.name, names.UP.name
    return [
        source,
        _variable("job", f"label_values({build}, job)"),
        _variable("router", f'label_values({build}{{job=~"$job"}}, router)'),
        _variable("instance", f'label_values({up}{{job=~"$job", router=~"$router"}}, instance)'),
    ]


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _reloads() -> dict[str, Any]:
    """Return the annotation that marks policy changes on every panel."""
    return {
        "name": "Policy changes",
        "datasource": _SOURCE,
        "enable": True,
        "iconColor": "purple",
        "expr": f"increase({series(names.POLICY_RELOADS)}[$__interval]) > 0",
        "titleFormat": "policy: {{result}}",
    }


def _panels() -> list[dict[str, Any]]:
    """Return the rows from top to bottom; a folded row contains its panels."""
    result: list[dict[str, Any]] = []
    y = 0
    for row in rows():
        head = {"id": len(result) + 1, "type": "row", "title": row.title, "collapsed": row.is_folded}
        head["gridPos"] = {"x": 0, "y": y, "w": _WIDE, "h": 1}
        below = _laid_out(row, y + 1)
        head["panels"] = below if row.is_folded else []
        result.append(head)
        if not row.is_folded:
            result += below
        y = max((one["gridPos"]["y"] + one["gridPos"]["h"] for one in below), default=y + 1)
    for number, panel in enumerate(_all(result), 1):
        panel["id"] = number
    return result


def _all(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for panel in panels for one in (panel, *panel.get("panels", ()))]


def _laid_out(row: Row, y: int) -> list[dict[str, Any]]:
    result, x, lowest = [], 0, y
    for panel in row.panels:
        if x + panel.width > _WIDE:
            x, y = 0, lowest
        result.append(_panel(panel) | {"gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height}})
        x, lowest = x + panel.width, max(lowest, y + panel.height)
    return result


def _panel(panel: Panel) -> dict[str, Any]:
    is_stat = panel.kind == "stat"
    targets = [
        {
            "refId": chr(ord("A") + place),
            "datasource": _SOURCE,
            "expr": line.expr,
            "legendFormat": line.legend or "__auto",
            "instant": is_stat,
            "range": not is_stat,
            "exemplar": not is_stat and "histogram_quantile" in line.expr,
        }
        for place, line in enumerate(panel.lines)
    ]
    defaults: dict[str, Any] = {"unit": panel.unit}
    options: dict[str, Any] = {}
    if panel.kind == "status-history":
        defaults["color"] = {"mode": "continuous-GrYlRd"}
        options = {"showValue": "never", "rowHeight": 0.95, "colWidth": 1, "legend": {"showLegend": False}}
    elif not is_stat:
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    if panel.is_stacked:
        defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 20}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.doc,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def main() -> int:
    """Write the file, or with `--check` compare it; return the exit code."""
    if "--check" not in sys.argv:
        FILE.write_text(text())
    elif not FILE.exists() or FILE.read_text() != text():
        print("examples/grafana/smetric.json is stale; run: python examples/grafana/generate.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
