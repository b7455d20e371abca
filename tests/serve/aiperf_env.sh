#!/usr/bin/env bash
# Set up what the test with AIPerf needs in the directory given: an environment with its own, other pins of packages.
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
"$here/.venv/bin/python" -m venv "$1"
"$1/bin/pip" install --quiet aiperf==0.13.0
