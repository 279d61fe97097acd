"""Instance: ledger, scraped load and prefill cost."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from smetric.fleet.instance import CacheConfig, Instance, Lease, Scrape


def scrape(running: float, waiting: float, own: int, at: float = 0.0) -> Scrape:
    return Scrape(measured_at=at, running=running, waiting=waiting, kv_usage=None, own=own)


def test_charge_counts_prompt_and_new_tokens_until_released() -> None:
    instance = Instance("a", "http://a")
    lease = instance.charge(2, 1000, 600)
    assert (instance.own, instance.unprefilled, instance.sent_tokens) == (2, 400, 1000)
    lease.first_output()
    assert (instance.own, instance.unprefilled, instance.sent_tokens) == (2, 0, 1000)
    lease.release()
    assert (instance.own, instance.unprefilled, instance.sent_tokens) == (0, 0, 0)


def test_lease_is_released_once() -> None:
    instance = Instance("a", "http://a")
    other = instance.charge(1, 10)
    lease = instance.charge(1, 10)
    for _ in range(3):
        lease.release()
        lease.first_output()
    assert (instance.own, instance.unprefilled, instance.sent_tokens) == (1, 10, 10)
    other.release()
    assert instance.own == 0


def test_hit_beyond_the_prompt_leaves_nothing_to_prefill() -> None:
    instance = Instance("a", "http://a")
    instance.charge(1, 100, 160)
    assert instance.unprefilled == 0


def test_lease_belongs_to_the_object_not_the_name() -> None:
    old = Instance("a", "http://a")
    lease = old.charge(1, 10)
    new = Instance("a", "http://a")
    lease.release()
    assert (old.own, new.own) == (0, 0)


def test_requests_are_scraped_plus_sent_minus_ended() -> None:
    instance = Instance("a", "http://a")
    before = [instance.charge(1, 10) for _ in range(3)]
    assert instance.requests() == 3
    # The engine runs our three and four of other clients.
    instance.scrape = scrape(running=5, waiting=2, own=3)
    assert instance.requests() == 7
    instance.charge(1, 10)
    assert instance.requests() == 8
    before[0].release()
    before[1].release()
    assert instance.requests() == 6


def test_scrape_does_not_hide_requests_on_their_way() -> None:
    instance = Instance("a", "http://a")
    for _ in range(5):
        instance.charge(1, 10)
    instance.scrape = scrape(running=1, waiting=0, own=5)
    assert instance.requests() == 5


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_ledger_ends_at_zero_after_any_order_of_events(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    instance = Instance("a", "http://a")
    leases: list[Lease] = []
    for _ in range(steps):
        if leases and rng.random() < 0.6:
            rng.choice([leases[0].first_output, leases[-1].first_output, rng.choice(leases).release])()
        else:
            hit, stored = rng.choice([None, rng.randint(0, 600)]), rng.choice([0, rng.randint(0, 600)])
            blocks = range(rng.randint(0, 9))
            lease = instance.charge(rng.randint(0, 4), rng.randint(0, 500), hit, stored, blocks)
            leases.append(lease)
            # Every token of a prompt is held, fetched or computed.
            assert min(lease.new_tokens, lease.fetched, lease.computed) >= 0
            assert min(hit or 0, lease.prompt_len) + lease.fetched + lease.computed == lease.prompt_len
        assert instance.own >= 0
        assert 0 <= instance.uncomputed <= instance.unprefilled <= instance.sent_tokens
        assert 0 <= instance.repeated <= instance.active.total()
        assert instance.unprefilled_cost() >= instance.uncomputed
        assert instance.requests() >= instance.own
    for lease in leases:
        lease.release()
    assert (instance.own, instance.unprefilled, instance.sent_tokens) == (0, 0, 0)
    assert (instance.uncomputed, instance.uncomputed_pairs, instance.repeated) == (0, 0, 0)
    assert (len(instance.decoding), len(instance.active)) == (0, 0)


def test_capacity_needs_both_numbers_of_the_engine() -> None:
    assert CacheConfig().capacity_tokens is None
    assert CacheConfig(block_size=16).capacity_tokens is None
    assert CacheConfig(block_size=16, num_blocks=100).capacity_tokens == 1600


def test_prefill_cost_includes_attention_to_the_prefix() -> None:
    instance = Instance("a", "http://a", attention_tokens=1000)
    first = instance.charge(1, 2000, 500)
    second = instance.charge(1, 100)
    assert first.cost == 1500 + 1500 * (2000 - 750) / 1000
    assert second.cost == 100 + 100 * 50 / 1000
    assert second.cost_ahead == instance.unprefilled_cost() == first.cost + second.cost
    first.first_output()
    assert instance.unprefilled_cost() == second.cost
    second.release()
    assert instance.unprefilled_cost() == 0


def test_prefill_cost_excludes_blocks_of_another_tier() -> None:
    instance = Instance("a", "http://a")
    lease = instance.charge(1, 1000, 300, stored=900)
    assert (lease.new_tokens, lease.fetched, lease.computed) == (700, 600, 100)
    assert (instance.unprefilled, instance.uncomputed) == (700, 100)
    assert instance.charge(1, 1000, 300, stored=200).fetched == 0
    assert instance.charge(1, 1000, None, stored=5000).computed == 0


@dataclass
class Passed:
    """Progress of an answer."""

    events: int = 0


def test_generated_tokens_count_while_the_request_runs() -> None:
    instance = Instance("a", "http://a")
    lease, whole = instance.charge(1, 1600, 800), instance.charge(1, 320)
    lease.answer = passed = Passed()
    assert (instance.inflight_tokens(), instance.decode_blocks()) == (1920, 120)
    passed.events = 1
    lease.first_output()
    whole.first_output()
    passed.events = 33
    assert (instance.inflight_tokens(), instance.decode_blocks()) == (1920 + 33, (1920 + 33) / 16)
    lease.release()
    assert (instance.inflight_tokens(), instance.decode_blocks()) == (320, 20)
    instance.cache = CacheConfig(block_size=32)
    assert instance.decode_blocks() == 10
    whole.release()
    assert (instance.inflight_tokens(), instance.decode_blocks(), instance.decoding) == (0, 0, set())


def test_decode_blocks_count_shared_blocks_once_and_those_of_the_next_request() -> None:
    """Dynamo's worked case: 10 blocks, of which requests on a hold 8, beside 100 blocks on a and 95 on b."""
    a, b = Instance("a", "http://a"), Instance("b", "http://b")
    prompt = range(1, 11)
    leases = [a.charge(1, 96 * 16, blocks=[*prompt[:8], *range(100, 188)]), a.charge(1, 12 * 16, blocks=[*prompt[:8]])]
    assert a.decode_blocks(0, (), 16) == 100
    assert a.decode_blocks(160, prompt, 16) == 102
    b.charge(1, 95 * 16, blocks=range(200, 295))
    assert b.decode_blocks(160, prompt, 16) == 105
    leases[0].release()
    assert a.decode_blocks(160, prompt, 16) == 14
    leases[1].release()
    assert (a.decode_blocks(160, prompt, 16), a.repeated, len(a.active)) == (10, 0, 0)
