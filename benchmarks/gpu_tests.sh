#!/usr/bin/env bash
# Runs the tests marked gpu, each module in a process of its own: a kernel that fails takes the device from its whole
# process.
#
#   benchmarks/gpu_tests.sh FILE_OR_FOLDER[::TEST]...
#
# Of a folder, the modules that have such tests. A module has $GPU_TESTS_SECONDS (100), $GPU_TESTS_AT_ONCE (6) run at a
# time, and what each says stays in $GPU_TESTS_LOGS (build/gpu-tests). The exit status is 0 where all have passed.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(realpath -s "$(command -v "${PYTHON:-python3}")") || exit 2
logs=${GPU_TESTS_LOGS:-$root/build/gpu-tests}
export PYTHON=$python PYTHONPATH=$root PYTHONUNBUFFERED=1

# All that the command has started ends with it, and with this shell: timeout gives it a group of processes of its own,
# which signals to ours do not reach.
limited() { # SECONDS COMMAND...
  timeout --kill-after=5 "$@" &
  # shellcheck disable=SC2064 # this process, whatever is started later
  trap "kill $!; exit 143" TERM INT
  wait $!
  local status=$?
  trap - TERM INT
  return $status
}

module() { # FILE
  local log status
  log=$logs/$(basename "$1").log
  # Python's small objects from malloc: a device may reach no other memory of the tests (tests/kernels/host_memory.py).
  # What they compare with computes on processors, of which all modules have some; and of plugins that happen to be
  # installed they need none.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
  PYTHONMALLOC=malloc limited "${GPU_TESTS_SECONDS:-100}" \
    "$python" -m pytest -q --maxfail=20 -m gpu -p no:cacheprovider "$1" >"$log" 2>&1
  status=$?
  printf '| %s | %s | %s |\n' "$1" "$(tail -n 1 "$log" | tr -d '=|' | cut -c1-100)" $status
  grep -E '^(FAILED|ERROR|E   )' "$log" | sort | uniq -c | sort -rn | head -n 12 | cut -c1-240 >&2
  return $status
}

modules_of() { # FILE_OR_FOLDER...
  local place tests
  for place in "$@"; do
    [ -d "$place" ] || { echo "$place" && continue; }
    tests=$("$python" -m pytest -q --collect-only -m gpu -p no:cacheprovider "$place") || {
      tail -n 20 <<<"$tests" >&2
      return 1
    }
    sed -n 's/::.*//p' <<<"$tests" | uniq
  done
}

# gpu_check.sh has limited() from here.
[ "${BASH_SOURCE[0]}" = "$0" ] || return 0

cd "$root" || exit 2
mkdir -p "$logs"
if [ "${1:-}" = --module ]; then
  module "$2"
  exit $?
fi
[ $# -ge 1 ] || {
  echo "usage: $0 FILE_OR_FOLDER[::TEST]..." >&2
  exit 2
}
modules=$(modules_of "$@") || exit 1
printf '| module | tests | status |\n|---|---|---|\n'
xargs -P "${GPU_TESTS_AT_ONCE:-6}" -I{} bash "$root/benchmarks/gpu_tests.sh" --module {} <<<"$modules"
