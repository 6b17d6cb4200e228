#!/bin/sh
# What needs a GPU, from cheap to dear; logs, reports and figures go to a folder.
#   sh tests/gpu/run_all.sh OUT [PART ...]      parts: selftest sanitizer glm fused compare deepseek; all of these unless named
#   sh tests/gpu/run_all.sh OUT ranks           on a host with two GPUs
# Exits with 1 if anything failed. Most of the time goes to compiling, so kernels are built first, side by side.
set -u
out=${1:-.}
[ $# -gt 0 ] && shift
parts=${*:-selftest sanitizer glm fused compare deepseek}
failed=0

make() {
    python3 -m rocmega build "$@" >"$out/build-$(echo "$*" | tr -d ' ').log" 2>&1 &
}

build() {
    arch=$(python3 -c 'from rocmega.drivers.select import pick; print(pick().arch)')
    if [ "$parts" != deepseek ] && [ "$parts" != ranks ]; then
        for format in f32 bf16 fp8; do make glm-5.2-tiny --arch "$arch" --format "$format"; done
        make glm-5.2-mid --arch "$arch" --format fp8
    fi
    case " $parts " in *" deepseek "*)
        for name in deepseek-v4-flash-tiny deepseek-v4.1-flash-tiny; do
            for format in f32 bf16 mxfp4; do make "$name" --arch "$arch" --format "$format"; done
            for target in "$arch" host; do make "$name" --arch "$target" --format mxfp4 --activations f32; done
            make "$name" --arch host --format f32
        done
        make deepseek-v4-flash --arch "$arch"
        ;;
    esac
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
part ranks python3 -m pytest -q -rs -s tests/gpu/test_ranks.py
part deepseek python3 -m pytest -q -rs -s tests/gpu/test_deepseek.py
exit $failed
