#!/bin/sh
# Everything that needs a GPU, from cheap to dear; reports and figures go to the folder given (default: here).
#   sh tests/gpu/run_all.sh OUT
# Exits with 1 if anything failed. Some 10 minutes on an H200, most of them compiling.
set -u
out=${1:-.}
failed=0
part() {
    name=$1
    shift
    echo "== $name"
    "$@" >"$out/$name.log" 2>&1 || failed=1
    tail -n 25 "$out/$name.log"
}
part selftest python3 -m rocmega.selftest --report "$out/selftest.json" --soak 10000
part sanitizer python3 -m pytest -q -rs tests/gpu/test_sanitizer.py
part glm python3 -m pytest -q -rs tests/gpu/test_glm.py tests/platform tests/host/test_chain_on_gpu.py
part fused python3 -m pytest -q -rs tests/gpu/test_glm_fused.py
part compare-arms python3 -m pytest -q -rs tests/gpu/test_compare.py
exit $failed
