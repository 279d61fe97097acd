#!/usr/bin/env bash
# Installs a real LMCache, without what only GPUs need, into DIR/lmcache. About 2 minutes and 1.5 GB.
#
#   tests/e2e/setup_lmcache.sh [DIR]      DIR: $E2E_FOLDER, else a folder named smetric-e2e among the temporary files
#
# Does nothing when it is there already. Needs Python 3.11 (PYTHON=…), Linux on x86-64 and pip's usual index.
set -euo pipefail
version=0.5.6
torch=2.13.0
dir=${1:-${E2E_FOLDER:-${TMPDIR:-/tmp}/smetric-e2e}}
[[ -e $dir/lmcache/ready ]] && { echo "$dir/lmcache is ready"; exit 0; }
mkdir -p "$dir"

rm -rf "$dir/lmcache"
"${PYTHON:-python3.11}" -m venv "$dir/lmcache"
python=$dir/lmcache/bin/python
pip() { "$python" -m pip --disable-pip-version-check --quiet --no-input "$@"; }

echo "torch $torch (a CPU build, if pip knows where to find one)"
pip install "torch==$torch"
echo "lmcache $version"
pip install --no-deps "lmcache==$version"
# Left out: what needs a GPU or a cloud, and what only its tests and its build need.
"$python" - > "$dir/lmcache/requirements.txt" <<'REQUIREMENTS'
from importlib.metadata import requires
LEFT_OUT = (
    "torch", "cufile", "nvtx", "cupy", "cuda", "awscrt", "google-", "redis", "pytest", "setuptools", "grpcio-observability"
)
for one in requires("lmcache") or ():
    if "extra ==" not in one and not one.startswith(LEFT_OUT):
        print(one)
REQUIREMENTS
pip install --requirement "$dir/lmcache/requirements.txt"
touch "$dir/lmcache/ready"
echo "$dir/lmcache is ready"
