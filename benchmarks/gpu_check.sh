#!/usr/bin/env bash
# Everything that is to be known from a machine with a GPU, in one command of less than ten minutes:
#
#   benchmarks/gpu_check.sh RESULTS.md [STAGE...]
#
# Needs Python 3.11 with torch, numpy, transformers, hypothesis and pytest ($PYTHON names it; python3), and either nvcc,
# cmake 3.26 and a C++ compiler or the libraries in $PAGEDEC_LIB_DIR: libpagedec_cuda.so, and libpagedec_scalar.so,
# which the tests compare with.
#
# Stages are in the order of what must be known first: whether it builds and loads; whether linear layers, attention and
# an engine say what a processor says; the tests of engines; how fast it is; the other tests of kernels; whether memory
# is in order. Each has a time limit that leaves those behind it the least that they need, and what it prints goes to
# RESULTS.md as it comes: a run that is cut keeps what it has. A stage that fails says so, and the next begins; the exit
# status is the number of those that failed.
set -uo pipefail

STAGES="device build smoke engine copy attention linear decode beam kernels readout ranks sanitizer"
# Seconds: with less a stage is not begun, and after the most it is stopped.
declare -A LEAST=([device]=5 [build]=100 [smoke]=25 [engine]=40 [copy]=10 [attention]=30 [linear]=25 [decode]=45 [beam]=25
  [kernels]=45 [readout]=15 [ranks]=5 [sanitizer]=30)
declare -A MOST=([device]=60 [build]=150 [smoke]=60 [engine]=90 [copy]=30 [attention]=80 [linear]=70 [decode]=100 [beam]=60
  [kernels]=150 [readout]=40 [ranks]=100 [sanitizer]=120)
TOTAL=${GPU_CHECK_SECONDS:-570}
# What is near a processor's in seconds: of linear layers, of attention, and tokens of an engine in need of room.
SMOKE="tests/kernels/test_gemm.py tests/kernels/test_cuda_attention.py
  tests/engine/test_cuda_engine.py::test_a_crowd_that_is_preempted"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/benchmarks/gpu_tests.sh"
PATH=$(dirname "$python"):$PATH:/usr/local/cuda/bin:/usr/local/nvidia/bin # its cmake before one that may be too old

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
    [[ $arch =~ ^[0-9]+$ ]] ||
      arch=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
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
print("    memory of the host: in its reach" + ("" if host_memory.reaches_all("cuda") else " where it is mapped"))
END
}

tests() { bash "$root/benchmarks/gpu_tests.sh" "$@"; }

smoke() {
  printf '## Near a processor\n\n'
  tests $SMOKE
}

kernels() {
  printf '## Tests of kernels\n\n'
  local files
  files=$("$python" -c 'from tests.kernels.cuda_library import on_devices; print(*on_devices(), sep="\n")') || return 1
  tests $(grep -vxF "$(printf '%s\n' $SMOKE)" <<<"$files")
}

engine() {
  printf '## Tests of engines\n\n'
  tests tests/engine/test_cuda_engine.py tests/engine/test_cuda_small_weights.py tests/engine/test_cuda_mixtures.py \
    tests/engine/test_attention_of_packages.py
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
  tests tests/parallel/test_nccl.py || return 1
  "$python" benchmarks/gpu_ranks.py --world "$devices"
}

copy() { "$python" benchmarks/gpu_copy.py; }
attention() { "$python" benchmarks/gpu_attention.py; }
linear() { "$python" benchmarks/gpu_linear.py --beside q4_k q6_k int8_weight_only; }
readout() { "$python" benchmarks/gpu_readout.py; }
decode() { "$python" benchmarks/gpu_decode.py; }
beam() { "$python" benchmarks/gpu_beam.py; }

# Over the smallest benchmarks: all that kernels touch there is the device's own memory, each array by itself.
sanitizer() {
  local tool name log status more said failed=0
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
      limited 60 compute-sanitizer --tool $tool --error-exitcode 9 \
        "$python" benchmarks/gpu_$name.py --smoke --isa cuda $more >"$log" 2>&1
      status=$?
      said=$(grep -E 'SUMMARY|not supported' "$log" | head -n 1 | tr -d '=|')
      printf '| %s | %s | %s | %s |\n' $tool $name "$said" $status
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
[ ! -f "${PAGEDEC_LIB_DIR:-/nowhere}/libpagedec_cuda.so" ] || LEAST[build]=20 MOST[build]=50
for name in $stages; do
  [[ " $STAGES " == *" $name "* ]] || {
    echo "$name is no stage; there are $STAGES" >&2
    exit 2
  }
done
cd "$root" || exit 2
mkdir -p "$(dirname "$results")"
logs=$(mktemp -d)
export GPU_TESTS_LOGS=$logs
trap 'rm -rf "$logs"' EXIT
failed=()
write() { tee -a "$results"; }

printf '# On a GPU, %s\n\n    %s\n\n' "$(date -u '+%Y-%m-%d %H:%M UTC')" "$command_line" | write
behind=0
for name in $stages; do behind=$((behind + LEAST[$name])); done
for name in $stages; do
  behind=$((behind - LEAST[$name])) limit=${MOST[$name]} left=$((TOTAL - SECONDS)) from=$SECONDS
  [ $limit -le $((left - behind)) ] || limit=$((left - behind))
  [ $limit -ge ${LEAST[$name]} ] || limit=${LEAST[$name]} # a build that has taken its time costs the last ones
  if [ $limit -gt $left ]; then
    printf '_%s: left out, no time_\n\n' "$name" | write
    failed+=("$name")
    continue
  fi
  # modules end before their stage does, and say how far they came
  export GPU_TESTS_SECONDS=$((limit > 103 ? 100 : limit - 3))
  limited $limit bash "$root/benchmarks/gpu_check.sh" --inside "$name" 2>"$logs/complaints" | write
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
