#!/usr/bin/env bash
# Make .venv what requirements/*.lock and pyproject.toml say, and nothing when it already is.
#
# Called by tools/quickstart and tools/test before they do anything; a good environment costs a few
# file reads.  CPU profile only: a .venv that a person made with a CUDA build of torch (the `gpu`
# extra of pyproject.toml) is left as it is.
#
# .venv/.moerl-stamp holds the fingerprint of the inputs of a finished installation.  It is written
# last.  While packages are unpacked it says `incomplete`, and an environment found so is rebuilt
# from scratch: pip cannot tell a half unpacked package from a whole one.  Then `packages`, until
# this project is installed and checked.
#
# Packages are installed without dependency resolution: the locks are complete, and nothing that
# they do not name can enter.  Where wheels come from is pip's own configuration; no index is named
# here.  Rejected: a resolver run per machine (slow, not repeatable, draws in CUDA through sglang).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/.moerl-stamp
log=build/setup.log
locks=(requirements/cpu.lock requirements/cpu-nodeps.lock)
site=.venv/lib/python3.11/site-packages
pip_pid=

main() {
  if fresh || own_cuda_environment; then return; fi
  # The lock is this file's own inode, held by pip too: a second set-up, or one started after this
  # script was killed and pip lives on, waits here and then finds the work done.
  exec 9<tools/setup.sh
  flock --nonblock 9 || { say "another set-up of this folder is running, waiting for it"; flock 9; }
  if fresh; then return; fi
  trap stop_pip EXIT
  mkdir -p build
  : >"$log"
  install
}

fingerprint() {
  { pwd -P; cat "${locks[@]}" pyproject.toml tools/setup.sh .venv/pyvenv.cfg; } | sha256sum
}

fresh() {
  [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$(fingerprint)" ]]
}

own_cuda_environment() {
  [[ ! -f $stamp ]] && grep -qs "^cuda.* = '" "$site/torch/version.py"
}

# Whether packages may be installed over what is there: right Python, whole, not moved here.
reusable() {
  [[ -x .venv/bin/python && -d $site ]] &&
    [[ ! -f $stamp || $(<"$stamp") != incomplete ]] &&
    grep -qsF "$PWD/.venv" .venv/bin/activate
}

install() {
  compiler_present
  if reusable; then
    say "updating .venv (log: $log)"
    echo incomplete >"$stamp"
  else
    local python
    python=$(find_python)
    say "creating .venv with $python, about 3 GB (log: $log)"
    "$python" -m venv --clear .venv >>"$log" 2>&1 || fail "$python could not create .venv"
    echo incomplete >"$stamp"
  fi
  run_pip "$(cat "${locks[@]}" | grep -c ==) pinned packages" "${locks[@]/#/--requirement=}"
  echo packages >"$stamp"
  run_pip "this project" --no-build-isolation --editable .
  # transformers imports torchvision, whose packaged build expects CUDA (moerl/engine/torchvision_fix.py)
  echo "import moerl.engine.torchvision_fix as fix; fix.arm()" >"$site/moerl-torchvision.pth"
  verify
  .venv/bin/python -m moerl.kernels.build
  fingerprint >"$stamp"
  say "environment ready"
}

compiler_present() {
  local name
  for name in cc gcc clang; do
    if command -v "$name" >/dev/null; then return; fi
  done
  fail "no C compiler (cc, gcc or clang) is on PATH and some packages come as source:" \
    "install one, for example Debian's package build-essential"
}

# Prints the first Python 3.11 on PATH that can make an environment with pip in it.
find_python() {
  local candidate met="none was found" version
  for candidate in $(type -ap python3.11 python3 python); do
    version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
      continue
    if [[ $version != 3.11 ]]; then
      met="$candidate is $version"
    elif ! "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
      met="$candidate lacks the modules venv and ensurepip (on Debian: the package python3.11-venv)"
    else
      echo "$candidate"
      return
    fi
  done
  fail "Python 3.11 with venv is needed on PATH: $met"
}

# run_pip WHAT ARGUMENT...: install without dependencies, with a sign of life every ten seconds.
run_pip() {
  local what=$1
  shift
  say "installing $what"
  # The wheel of megatron-core for Python 3.11 declares 3.12 and works on both.
  .venv/bin/python -m pip install --no-deps --ignore-requires-python --no-input \
    --progress-bar=off "$@" >>"$log" 2>&1 </dev/null &
  pip_pid=$!
  local ticks=0
  while kill -0 "$pip_pid" 2>/dev/null; do
    sleep 0.1
    ticks=$((ticks + 1))
    if ((ticks % 100 == 0)); then say "$(progress)"; fi
  done
  local code=0
  wait "$pip_pid" || code=$?
  pip_pid=
  if ((code == 0)); then return; fi
  tail -n 15 "$log" >&2
  if grep -q "No matching distribution found for torch==" "$log"; then
    fail "pip's configuration offers no CPU build of torch: add PyTorch's CPU wheels to its indexes" \
      "(pip config set global.extra-index-url URL) and start again"
  fi
  fail "pip exited with $code while installing $what; the whole log is $log"
}

progress() {
  if grep -q "^Installing collected packages" "$log"; then
    echo "unpacking, $(find "$site" -maxdepth 1 -name '*.dist-info' | wc -l) packages done"
  else
    echo "fetching, $(grep -cE '^(Collecting|Requirement already)' "$log") packages looked up"
  fi
}

verify() {
  .venv/bin/python - <<'PYTHON' || exit 1
import importlib.metadata, sys
import torch

if torch.version.cuda is not None:
    sys.exit(f"setup: torch {torch.__version__} is a CUDA build, the CPU profile needs a +cpu one: "
             "remove .venv and check which indexes pip is configured with")
names = sorted({d.name for d in importlib.metadata.distributions()})
if cuda := [name for name in names if name.lower().startswith("nvidia-")]:
    sys.exit(f"setup: {', '.join(cuda)} must not be in the CPU profile: uninstall it or remove "
             ".venv")
PYTHON
}

stop_pip() {
  if [[ -n $pip_pid ]]; then kill "$pip_pid" 2>/dev/null || true; fi
}

say() {
  printf '[%3d s] setup: %s\n' "$SECONDS" "$*"
}

fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

main
