#!/usr/bin/env bash
# Everything worth running on a machine with a GPU, in under 9 minutes, from a bare checkout, without a network:
#   bash bench/gpu_check.sh [OUT_DIR]          (default: bench/results)
# Needs a python with what expertly[dev] installs; PYTHON=... chooses it. BENCHMARK_S=270: seconds for its last part.
# Writes OUT_DIR/gpu-*: each file as soon as it is known, whatever happens later. Without a GPU it runs through in
# minutes, on a simulated one and a small model.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export EXPERTLY_CACHE=${EXPERTLY_CACHE:-$(mktemp -d)} EXPERTLY_BENCH_DIR=${EXPERTLY_BENCH_DIR:-$(mktemp -d)}
"$PYTHON" -c 'import expertly.api, pytest, pytest_timeout' || { echo "gpu_check: $PYTHON lacks a package"; exit 2; }
"$PYTHON" -c 'from setuptools import setup; setup()' -q build_ext --inplace >/dev/null 2>&1 || echo "gpu_check: no kernels for the processor were compiled"
failed=0
gpu=tests/engine/test_gpu.py
if "$PYTHON" -c 'import sys, torch; sys.exit(not torch.accelerator.is_available())'; then
  OUT=${1:-bench/results}
  tests=(-m gpu -k "not graphs" tests/hardware/test_measure.py "$gpu")
  graphs=("$gpu" -k graphs)
  size=(--experts-gib 8 --tokens 24 --seconds "${BENCHMARK_S:-270}")
else
  echo "gpu_check: no GPU is here, so nothing of one is measured: simulated accelerator and benchmark run on the CPU"
  OUT=${1:-$(mktemp -d)}
  tests=(tests/engine/test_cuda.py "$gpu")
  graphs=(tests/engine/test_graphs.py)
  size=(--experts-gib 0.02 --tokens 4 --seconds 60)
fi
mkdir -p "$OUT"

echo "== doctor: the link"
timeout 60 "$PYTHON" -m expertly doctor --json --out "$OUT/gpu-machine.txt" >/dev/null || failed=1

run_tests() { # NAME WORKERS PYTEST_ARGS...: in processes of their own, as a device that has failed once fails for good
  timeout -s INT -k 10 155 "$PYTHON" -m pytest -v -n "$2" -p no:cacheprovider --tb=short --junitxml="$OUT/gpu-$1.xml" \
    "${@:3}" >"$OUT/gpu-$1.txt" 2>&1
}
echo "== tests: systems x five families first; CUDA graphs; beside them, the benchmark's models are made"
timeout 155 "$PYTHON" bench/gpu.py "${size[@]}" --prepare >"$OUT/gpu-prepare.txt" 2>&1 &
cores=$(nproc)
run_tests tests-graphs $((cores / 8)) "${graphs[@]}" & graphs_pid=$!
run_tests tests $((cores / 2)) "${tests[@]}" || failed=1
wait $graphs_pid || failed=1
wait
for name in tests tests-graphs prepare; do echo "-- $OUT/gpu-$name.txt"; grep -v PASSED "$OUT/gpu-$name.txt" | tail -40; done

echo "== time per token against resident and on-demand, kernels against the memory's bandwidth"
timeout 300 "$PYTHON" bench/gpu.py "${size[@]}" --out "$OUT/gpu-tpot.json" || failed=1

exit $failed
