#!/usr/bin/env bash
# Everything worth running on a CUDA machine, in under 8 minutes, from a bare checkout, without a network:
#   bash bench/gpu_check.sh [OUT_DIR]          (default: bench/results)
# Needs a python with torch (CUDA), transformers and pytest; PYTHON=... chooses it. Writes OUT_DIR/gpu-*.json.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
OUT=${1:-bench/results}
mkdir -p "$OUT"
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export EXPERTLY_CACHE=${EXPERTLY_CACHE:-$(mktemp -d)} EXPERTLY_BENCH_DIR=${EXPERTLY_BENCH_DIR:-$(mktemp -d)}
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "gpu_check: no CUDA device here" >&2; exit 2; }
failed=0

echo "== doctor"
timeout 90 "$PYTHON" -m expertly doctor --json --out "$OUT/gpu-machine.json" >/dev/null || failed=1

echo "== tests marked gpu"
timeout 200 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider -o timeout=180 tests || failed=1

echo "== time per token against resident and on-demand"
timeout 180 "$PYTHON" bench/gpu.py --out "$OUT/gpu-tpot.json" || failed=1

exit $failed
