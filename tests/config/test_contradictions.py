from typing import Any

import pytest

from smetric.errors import ConfigError

SECRET = "hunter2-hunter2-hunter2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("instances:\n - http://a:1\n - http://a:1\n", "smetric.yaml:3: instances[1]: id a:1 stands twice"),
        (
            "instances:\n - {id: a, url: 'http://a:1'}\n - {id: b, url: 'http://a:1'}\n",
            "smetric.yaml:3: instances[1]: url http://a:1 stands twice; give each instance its own url",
        ),
        (
            "instances:\n - {id: a, url: 'http://a'}\n - {id: b, url: 'http://a:80'}\n",
            "smetric.yaml:3: instances[1]: url http://a:80 stands twice; give each instance its own url",
        ),
        (
            "instances: [{url: 'http://a:1', api_key: k, api_key_file: f}]",
            "instances[0].api_key_file: set, and api_key too; drop one",
        ),
        (
            "instances: [{url: 'http://a:1', role: prefill}]",
            "instances[0].role: prefill, as of all instances: none takes requests; use both",
        ),
        (
            "instances: ['http://169.254.169.254']",
            "instances[0].url: http://169.254.169.254 is a link-local address, as are those of clouds' metadata "
            "services, which is no place for an instance; if it is meant, name its network in instance_networks",
        ),
        (
            "instances: ['http://gpu-1:1']\nlmcache: {instances: {'gpu-2:1': worker}}",
            "smetric.yaml:2: lmcache.instances.gpu-2:1: no instance has this id; did you mean gpu-1:1?",
        ),
        (
            "peers: {urls: [http://a:9464]}\nprefix_index: {enabled: false}",
            "smetric.yaml:1: peers.urls: set, but prefix_index.enabled is false: there is nothing to share; drop one",
        ),
        ("tokenizer: {source: local}", "tokenizer.folders: empty, but tokenizer.source is local; name each model's"),
        ("admin: {port: 8080}", "smetric.yaml:1: admin.port: 8080 is listen.port too; use another port"),
        ("listen: {key_file: k}", "listen.key_file: set, but listen.cert_file is not; name the certificate"),
        (f"admin: {{token: {SECRET}, token_file: f}}", "admin.token_file: set, and admin.token too; drop one"),
        (f"tenants: {{secret: {SECRET}, secret_file: f}}", "tenants.secret_file: set, and tenants.secret too; drop"),
        (
            f"tenants: {{cache_salt: tenant, secret: {SECRET}}}",
            "smetric.yaml:1: tenants.cache_salt: tenant, but tenant_header is not set; name the header",
        ),
        (
            "tenant_header: x-tenant\ntenants: {cache_salt: tenant}",
            "smetric.yaml:2: tenants.cache_salt: tenant, but tenants.secret is not set; any long random text will do",
        ),
        ("canary: {share: 0.1}", "smetric.yaml:1: canary: it has no policy and decides nothing; name one"),
        (
            "routes: [{policy: bailian, canary: {params: {A: 1}}}]",
            "smetric.yaml:1: routes[0].canary: it has no policy and decides nothing; name one, or drop it",
        ),
        (
            "routes:\n - {name: a, policy: bailian}\n - {name: a, policy: smetric}\n",
            "smetric.yaml:3: routes[1].name: a is the name of another route, or of the last one; give each its own",
        ),
        (
            "routes: [{policy: bailian, match: {tenant: acme}}]",
            "smetric.yaml:1: routes[0].match.tenant: set, but tenant_header is not; name the header",
        ),
        ("record: {path: a.jsonl, trace: a.jsonl}", "a.jsonl is record.path too; give each its own file"),
        ("record: {path: a.jsonl, trace: b/../a.jsonl}", "a.jsonl is record.path too; give each its own file"),
        ("observe: [bailian]", "smetric.yaml:1: observe: set, but record.path is not: nothing would be recorded"),
        (
            "overload: {soft_percent: 97}",
            "default: overload.hard_percent: 95 is less than soft_percent, 97; raise it or lower that",
        ),
        ("overload: {bodies: 1MiB}", "overload.bodies: 1048576 bytes is less than forward.max_body, 33554432 bytes"),
        ("overload: {soft_lag: 3s}", "default: overload.hard_lag: 2s is less than soft_lag, 3s"),
        ("scrape: {interval: 40s}", "default: scrape.unknown_after: 30s is less than interval, 40s"),
        ("health: {ejection: 10m, longest_ejection: 1m}", "health.longest_ejection: 60s is less than ejection, 600s"),
        ("lookup: {deadline_base: 1s, deadline_cap: 100ms}", "lookup.deadline_cap: 0.1s is less than deadline_base"),
    ],
)
def test_contradiction_names_the_setting_to_change_and_the_way_out(load: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ports_of_different_addresses_may_be_equal(load: Any) -> None:
    assert load("listen: {host: 10.0.0.1, port: 9464}\nadmin: {host: 127.0.0.1}").admin.port == 9464
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(ConfigError, match=r"admin\.port: 9464 is listen\.port too"):
            load(f"listen: {{host: {host}, port: 9464}}\nadmin: {{host: 127.0.0.1}}")
