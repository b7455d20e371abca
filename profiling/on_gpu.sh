#!/usr/bin/env bash
# Runs everything in the repository that needs a GPU, in about ten minutes, and leaves the results in DIR.
#   profiling/on_gpu.sh --out DIR
# Needs Python with torch (CUDA), numpy, scipy, safetensors, tqdm, and for the tests pytest and hypothesis.
# Every step runs even if an earlier one failed; the exit status is 0 only if all passed.
set -u
[ "${1:-}" = --out ] && [ -n "${2:-}" ] || { echo "usage: profiling/on_gpu.sh --out DIR" >&2; exit 2; }
mkdir -p "$2"
out=$(cd "$2" && pwd)
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "no CUDA device: nothing to run here")' || exit 2
failed=0
step() { # step NAME SECONDS COMMAND...
  local name=$1 limit=$2; shift 2
  echo "== $name"
  timeout "$limit" "$@" 2>&1 | tee "$out/$name.log"
  [ "${PIPESTATUS[0]}" = 0 ] || { echo "== $name failed"; failed=1; }
}
step tests 180 "$python" -m pytest -m gpu --junitxml "$out/tests.xml"
step engine 240 "$python" benchmarks/engine.py --device cuda --families ofa_resnet50 --only forward --batch-sizes 1 \
  --seconds 3 --compile --out "$out/engine.json"
# Tables for profiling/tables/: 100 Pareto subnets, eager and as CUDA graphs. A sweep that is cut short is resumed
# if this script is run again.
for family in ofa_resnet50 ofa_mbv3; do
  for mode in eager graphs; do
    step "profile_${family}_$mode" 150 "$python" "profiling/sweep_$family.py" --device cuda --mode $mode \
      --subnets 100 --input-shape 3 224 224 --batch-sizes 1 2 4 8 16 32 64 --warmup-ms 5 --min-time-ms 60 \
      --max-windows 6 --resume --out "$out/${family}_$mode.json" --plot "$out/${family}_$mode"
  done
done
step profile_digits 60 "$python" -m subnetact.profile --device cuda --min-time-ms 100 --resume --out "$out/digits.json"
exit $failed
