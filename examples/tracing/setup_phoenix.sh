#!/usr/bin/env bash
# Installs Arize Phoenix, a tracing UI, into an environment of its own: DIR/venv. About 3 minutes and 850 MB.
#
#   examples/tracing/setup_phoenix.sh [DIR]      DIR: $PHOENIX_FOLDER, else a folder named smetric-phoenix among the
#                                                temporary files
#
# Does nothing when it is there already. Phoenix comes under the Elastic License 2.0; SMetric does not depend on it.
set -euo pipefail
version=20.26.1
dir=${1:-${PHOENIX_FOLDER:-${TMPDIR:-/tmp}/smetric-phoenix}}
[[ -e $dir/ready ]] && { echo "$dir is ready"; exit 0; }
mkdir -p "$dir"
rm -rf "$dir/venv"
"${PYTHON:-python3}" -m venv "$dir/venv"
echo "installing arize-phoenix $version into $dir/venv: a few minutes …"
"$dir/venv/bin/python" -m pip --disable-pip-version-check --quiet --no-input install "arize-phoenix==$version"
touch "$dir/ready"
echo "$dir is ready"
