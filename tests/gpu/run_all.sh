#!/bin/sh
# What needs a GPU, from cheap to dear; logs, reports and figures go to a folder.
#   sh tests/gpu/run_all.sh OUT [PART ...]      parts: selftest sanitizer glm fused compare; all unless named
# Exits with 1 if anything failed. Most of the time goes to compiling, so kernels are built first, side by side.
set -u
out=${1:-.}
[ $# -gt 0 ] && shift
parts=${*:-selftest sanitizer glm fused compare}
failed=0

build() {
    arch=$(python3 -c 'from rocmega.drivers.select import pick; print(pick().arch)')
    for format in f32 bf16 fp8; do
        python3 -m rocmega build glm-5.2-tiny --arch "$arch" --format "$format" >"$out/build-$format.log" 2>&1 &
    done
    python3 -m rocmega build glm-5.2-mid --arch "$arch" --format fp8 >"$out/build-mid.log" 2>&1 &
    wait
}

part() {
    name=$1
    shift
    case " $parts " in *" $name "*) ;; *) return ;; esac
    echo "== $name"
    "$@" >"$out/$name.log" 2>&1 || failed=1
    tail -n 25 "$out/$name.log"
}

build
part selftest python3 -m rocmega.selftest --report "$out/selftest.json" --soak 10000
part sanitizer python3 -m pytest -q -rs tests/gpu/test_sanitizer.py
part glm python3 -m pytest -q -rs tests/gpu/test_glm.py tests/platform tests/host/test_chain_on_gpu.py
part fused python3 -m pytest -q -rs tests/gpu/test_glm_fused.py
part compare python3 -m pytest -q -rs tests/gpu/test_compare.py
exit $failed
