#!/usr/bin/env bash
# Set up what the test of KServe's client needs in the directory given: an environment with kserve, which pins
# older packages than ours; what fits comes from the site-packages of .venv.
set -euo pipefail
directory=$1
here=$(cd "$(dirname "$0")/../.." && pwd)
"$here/.venv/bin/python" -m venv "$directory"
site=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$here/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/shared.pth"
"$directory/bin/pip" install --quiet kserve==0.21.0
