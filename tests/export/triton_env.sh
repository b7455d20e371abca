#!/usr/bin/env bash
# Set up what tests/export/test_triton_server.py needs in the directory given: an environment of
# Debian's Python with nvidia-pytriton, whose wheel bundles tritonserver, and the tested torch.
# Ends with 3 and a reason where this machine cannot have one.
set -euo pipefail
directory=$1
here=$(cd "$(dirname "$0")/../.." && pwd)
no() { echo "no Triton server here: $*" >&2; exit 3; }
python=/usr/bin/python3
[ -x $python ] || no "$python, Debian's own Python, is absent"
version=$($python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if ! $python -c 'import ensurepip' 2>/dev/null || ! ldconfig -p | grep -q "libpython$version.so.1.0"; then
    [ "$(id -u)" = 0 ] || no "apt-get install python$version-venv libpython$version"
    { apt-get -qq update && apt-get -qq install -y "python$version-venv" "libpython$version"; } >/dev/null 2>&1 ||
        no "apt-get cannot install python$version-venv and libpython$version"
fi
$python -m venv "$directory"
"$directory/bin/pip" install --quiet --only-binary :all: nvidia-pytriton==0.7.0 || no "nvidia-pytriton does not install"
"$directory/bin/pip" install --quiet -c <(grep -E '^(torch|safetensors|tqdm)==' "$here/constraints.txt") torch safetensors tqdm ||
    no "torch does not install beside nvidia-pytriton"
