#!/usr/bin/env bash
# What needs a GPU and no network: tests, memcheck of a small run, the encoder as one graph. Run in the project's root.
#
#     bash bench/device/gpu_tests.sh [OUT]        results go to OUT (default: $OUT, else bench/results/device)
OUT="${1:-${OUT:-bench/results/device}}"
source bench/device/setup.sh
set -uo pipefail
mkdir -p "$OUT"
failed=0

# warnings of this machine's versions are no errors; processes side by side share the compiling of kernels
python3 -c 'import xdist' 2>/dev/null && parallel="-n 6" || parallel=""
pytest="python3 -m pytest -o addopts= -W default -p no:cacheprovider -q"
$pytest $parallel -m gpu tests/rose/test_gpu_*.py tests/rose/speculation 2>&1 | tee "$OUT/gpu_tests.log" || failed=1
$pytest $parallel tests/rose/test_cuda_encoder.py tests/rose/kernels tests/rose/attention 2>&1 | tee "$OUT/kernel_tests.log" || failed=1
# every access of one small run, eager and captured, is within its memory
compute-sanitizer --tool memcheck --error-exitcode 9 $pytest -m gpu tests/rose/test_gpu_encoder.py \
    -k 'alone_and_in_company and qwen3' 2>&1 | tail -15 | tee "$OUT/memcheck.log" || failed=1
python3 -m bench.micro.encoder_graph --out "$OUT" 2>&1 | tee "$OUT/encoder_graph.log" || failed=1
exit $failed
