#!/usr/bin/env bash
# Everything that is to be known from a machine with a GPU, in one command of less than ten minutes:
#
#   benchmarks/gpu_check.sh RESULTS.md [STAGE...]
#
# Needs Python 3.11 with torch, numpy, transformers, hypothesis and pytest ($PYTHON names it; python3), and either nvcc,
# cmake 3.26 and a C++ compiler or the libraries in $PAGEDEC_LIB_DIR: libpagedec_cuda.so, and libpagedec_scalar.so, which the
# tests compare with.
#
# Each stage has a time limit, and what it prints goes to RESULTS.md as it comes: a run that is cut keeps what it has. A
# stage that fails says so, and the next begins; the exit status is the number of those that failed.
set -uo pipefail

STAGES="device build kernels copy attention linear readout engine decode ranks sanitizer"
TOTAL=${GPU_CHECK_SECONDS:-570}
MODULE_SECONDS=100 # of one module of tests
PARALLEL=6         # modules at a time
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(command -v "${PYTHON:-python3}") || exit 2
PATH=$(dirname "$python"):$PATH:/usr/local/cuda/bin # its cmake and ninja before the system's, which may be too old
export PYTHONPATH=$root PYTHONUNBUFFERED=1

device() {
  printf '## Device\n\n'
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.limit --format=csv |
    sed 's/^/    /'
  printf '    %s, %s processors, %s\n' "$(uname -srm)" "$(nproc)" "$("$python" --version)"
  "$python" -c 'import torch; print("    torch", torch.__version__, "with CUDA", torch.version.cuda)'
  nvcc --version 2>/dev/null | sed -n 's/^\(.*release.*\)$/    \1/p'
  printf '    commit %s\n' "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
  nvidia-smi >/dev/null
}

compile() { # LOG COMMAND...
  local log=$1
  shift
  "$@" >"$log" 2>&1 || {
    tail -n 40 "$log" >&2
    return 1
  }
}

build() {
  printf '## Build\n\n'
  local ninja=() arch
  if [ -f "${PAGEDEC_LIB_DIR:-/nowhere}/libpagedec_cuda.so" ]; then
    echo "    brought along: $(cd "$PAGEDEC_LIB_DIR" && echo *.so)"
  else
    command -v nvcc >/dev/null || {
      echo "there is no nvcc, and no libpagedec_cuda.so in \$PAGEDEC_LIB_DIR" >&2
      return 1
    }
    command -v ninja >/dev/null && ninja=(-G Ninja)
    # for this machine's device alone, which halves nvcc's time
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    compile "$logs/cmake" cmake -S csrc -B build/gpu "${ninja[@]}" -DPAGEDEC_CUDA=ON -Wno-dev \
      -DPAGEDEC_LIB_DIR="$root/pagedec/lib" -DCMAKE_CUDA_ARCHITECTURES="${arch:-90}" || return 1
    # the kernels first: nothing else is needed to measure them
    compile "$logs/cuda" cmake --build build/gpu -j"$(nproc)" --target pagedec_cuda || return 1
    compile "$logs/scalar" cmake --build build/gpu -j"$(nproc)" --target pagedec_scalar || return 1
    echo "    for sm_${arch:-90}: $(cd pagedec/lib && echo *.so)"
  fi
  "$python" - <<'END'
from pagedec.cli.active import kernel_facts
from tests.kernels import host_memory
fact = kernel_facts(frozenset())["cuda"]
print("    cuda:", fact)
if not fact.startswith(("active", "available")):
    raise SystemExit(1)
print("    memory of the host:", "in its reach" if host_memory.reaches_all("cuda") else "in its reach where it is mapped")
END
}

# A kernel that fails takes the device from its whole process, so each module has a process of its own.
module() { # FILE
  local log=$logs/$(basename "$1").log status
  # Python's small objects from malloc: a device may reach no other memory of the tests (tests/kernels/host_memory.py)
  PYTHONMALLOC=malloc timeout --kill-after=5 $MODULE_SECONDS "$python" -m pytest -q --maxfail=20 -m gpu -p no:cacheprovider "$1" \
    >"$log" 2>&1
  status=$?
  printf '| %s | %s | %s |\n' "$1" "$(tail -n 1 "$log" | tr -d '=|' | cut -c1-100)" $status
  grep -E '^(FAILED|ERROR|E   )' "$log" | sort | uniq -c | sort -rn | head -n 12 | cut -c1-240 >&2
  return $status
}

modules() { # FILE...
  printf '| module | tests | status |\n|---|---|---|\n'
  printf '%s\n' "$@" | xargs -P $PARALLEL -I{} bash "$root/benchmarks/gpu_check.sh" --inside module {}
}

kernels() {
  printf '## Tests of kernels\n\n'
  local files
  files=$("$python" -c 'from tests.kernels.cuda_library import on_devices; print(*on_devices())') || return 1
  modules $files
}

engine() {
  printf '## Tests of engines\n\n'
  modules tests/engine/test_cuda_engine.py tests/engine/test_attention_of_packages.py tests/engine/test_cuda_small_weights.py
}

# What devices exchange by NCCL: only where there are two.
ranks() {
  local devices
  devices=$(nvidia-smi --list-gpus | wc -l)
  printf '## Ranks\n\n'
  if [ "$devices" -lt 2 ]; then
    echo "    one device: nobody to exchange anything with"
    return 0
  fi
  modules tests/parallel/test_nccl.py || return 1
  "$python" benchmarks/gpu_ranks.py --world "$devices"
}

copy() { "$python" benchmarks/gpu_copy.py; }
attention() { "$python" benchmarks/gpu_attention.py; }
linear() { "$python" benchmarks/gpu_linear.py --beside q4_k q6_k int8_weight_only; }
readout() { "$python" benchmarks/gpu_readout.py; }
decode() { "$python" benchmarks/gpu_decode.py; }

# Over the smallest benchmarks: all that kernels touch there is the device's own memory, each array by itself.
sanitizer() {
  local tool name log status more failed=0
  printf '## compute-sanitizer\n\n'
  command -v compute-sanitizer >/dev/null || {
    echo "    it is not there"
    return 0
  }
  printf '| tool | kernels | summary | status |\n|---|---|---|---|\n'
  for tool in memcheck racecheck synccheck; do
    for name in readout linear attention; do
      log=$logs/$tool.$name more=
      [ $name = linear ] && more="--beside q4_k q6_k q8_0 int8_weight_only"
      timeout --kill-after=5 60 compute-sanitizer --tool $tool --error-exitcode 9 \
        "$python" benchmarks/gpu_$name.py --smoke --isa cuda $more >"$log" 2>&1
      status=$?
      printf '| %s | %s | %s | %s |\n' $tool $name "$(grep -E 'SUMMARY|not supported' "$log" | head -n 1 | tr -d '=|')" $status
      if grep -q 'not supported' "$log"; then
        echo
        echo "    compute-sanitizer does not run on this machine"
        return 0
      fi
      [ $status -eq 0 ] || { failed=1; grep -m 8 '=========' "$log" >&2; }
    done
  done
  return $failed
}

if [ "${1:-}" = --inside ]; then
  cd "$root" || exit 1
  shift
  "$@"
  exit $?
fi

[ $# -ge 1 ] || {
  echo "usage: $0 RESULTS.md [STAGE...]; stages: $STAGES" >&2
  exit 2
}
results=$(realpath -m "$1")
command_line="benchmarks/gpu_check.sh $*"
shift
stages=${*:-$STAGES}
for name in $stages; do
  [[ " $STAGES " == *" $name "* ]] || {
    echo "$name is no stage; there are $STAGES" >&2
    exit 2
  }
done
cd "$root" || exit 2
mkdir -p "$(dirname "$results")"
logs=$(mktemp -d)
export logs
trap 'rm -rf "$logs"' EXIT
failed=()
write() { tee -a "$results"; }

printf '# On a GPU, %s\n\n    %s\n\n' "$(date -u '+%Y-%m-%d %H:%M UTC')" "$command_line" | write
for name in $stages; do
  case $name in
  device) limit=20 ;; build) limit=150 ;; kernels) limit=180 ;; copy) limit=30 ;; attention) limit=90 ;;
  linear) limit=75 ;; readout) limit=45 ;; engine) limit=90 ;; decode) limit=120 ;; ranks) limit=120 ;;
  sanitizer) limit=120 ;;
  esac
  left=$((TOTAL - SECONDS)) from=$SECONDS
  [ $limit -le $left ] || limit=$left
  if [ $limit -lt 5 ]; then
    printf '_%s: left out, no time_\n\n' "$name" | write
    failed+=("$name")
    continue
  fi
  timeout --kill-after=5 $limit bash "$root/benchmarks/gpu_check.sh" --inside "$name" 2>"$logs/complaints" | write
  status=${PIPESTATUS[0]}
  if [ "$status" -ne 0 ]; then
    failed+=("$name")
    said=$(tail -n 30 "$logs/complaints" | cut -c1-300 | sed 's/^/    /')
    [ "$status" -ne 124 ] || said="    stopped after $limit s"$'\n'"$said"
    printf '\n**Failed**; the end of what it said:\n\n%s\n' "$said" | write
  fi
  printf '\n_%s: %s s, status %s_\n\n' "$name" $((SECONDS - from)) "$status" | write
  sync -- "$results" 2>/dev/null || true
done
printf '_in all %s s; failed: %s_\n' $SECONDS "${failed[*]:-none}" | write
exit ${#failed[@]}
