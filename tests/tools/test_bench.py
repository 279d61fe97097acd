"""Cost of decisions on synthetic fleets."""

from smetric.features import VOCABULARY
from smetric.policy import load
from smetric.tools.bench import HELD, REQUESTS, SIZES, costs, figures, fleet

FEATURES = VOCABULARY.features


def test_fleet_is_reproducible_and_within_the_ranges_of_its_features() -> None:
    first, second = (fleet(32, FEATURES.values()) for _ in range(2))
    assert first.columns == second.columns
    assert set(first.columns) == set(FEATURES)
    for name, cells in first.columns.items():
        feature = FEATURES[name]
        assert len(cells) == 32
        if feature.kind.value == "number":
            assert all(feature.low <= cell <= feature.high for cell in cells)
    assert sorted(first.columns["hit_len"])[-2:] == [0, HELD]
    assert all(first.columns["healthy"])
    assert not any(first.columns["draining"])


def test_fleet_has_equal_loads_on_request() -> None:
    assert len(set(fleet(32, [FEATURES["requests"]]).columns["requests"])) > 2
    assert len(set(fleet(32, [FEATURES["requests"]], equal=True).columns["requests"])) == 1


def test_costs_measure_every_call() -> None:
    calls = {"fast": 0, "slow": 0}

    def fast() -> None:
        calls["fast"] += 1

    def slow() -> None:
        calls["slow"] += 1
        sum(range(5000))

    found = costs({"fast": fast, "slow": slow}, 100)
    assert calls == {"fast": 100, "slow": 100}
    assert found["slow"].p50 > found["fast"].p50 >= 0
    assert all(cost.p99 >= cost.p50 for cost in found.values())


def test_figures_cover_every_size_and_request_and_name_the_rule() -> None:
    policy = load(
        "policy p\n"
        "keep healthy and not draining\n"
        "route argmax(hit_len, then: requests) when req.turn != 0 and max(hit_len) > 0.5 * req.est_hit as stick\n"
        "route rr_argmin(requests) as balance",
        VOCABULARY,
    )
    found = list(figures(policy, VOCABULARY, 20))
    assert [(figure.instances, figure.request) for figure in found] == [(s, r) for s in SIZES for r in REQUESTS]
    rules = {figure.request: figure.rule for figure in found}
    assert rules == {"first turn": "balance", "later turn, cached": "stick", "later turn, cache lost": "balance"}
    assert all(figure.cost.p99 >= figure.cost.p50 > 0 for figure in found)
