#!/usr/bin/env bash
# Make .venv what requirements/*.lock and pyproject.toml say, and nothing when it already is.
#
# usage: tools/setup.sh          the CPU profile: requirements/cpu.lock and cpu-nodeps.lock, Python 3.11
#        tools/setup.sh --gpu    the GPU profile: requirements/gpu.lock, Python 3.12
#        tools/setup.sh --gpu FOLDER    the same in FOLDER in place of .venv; no GPU is needed
#
# Called by tools/quickstart and tools/test before they do anything; a good environment costs a few
# file reads.  Without --gpu, a .venv with a CUDA build of torch is left as it is.
#
# The GPU profile needs no CUDA toolkit: compiler, headers and libraries come as wheels, and .venv/cuda
# is one folder of links to them, which engines and trainers compile their kernels with.  It compiles
# the torch part of Transformer Engine, which has no wheel, for the torch that was just installed (30
# minutes on one core), keeps that wheel in build/wheels or $MOERL_WHEELS, and builds our kernels.
#
# .venv/.moerl-stamp holds the fingerprint of the inputs of a finished installation.  It is written
# last.  While packages are unpacked it says `incomplete`, and an environment found so is rebuilt
# from scratch: pip cannot tell a half unpacked package from a whole one.  Then `packages`, until
# this project is installed and checked.
#
# Packages are installed without dependency resolution: the locks are complete, and nothing that
# they do not name can enter; each file has the hash that its line names (tools/lock_hashes.py).
# Where wheels come from is pip's own configuration; no index is named here.  Rejected: a resolver
# run per machine (slow, not repeatable, draws in CUDA through sglang).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
profile=cpu
version=3.11
locks=(requirements/cpu.lock requirements/cpu-nodeps.lock)
if [[ ${1:-} == --gpu ]]; then
  profile=gpu
  version=3.12
  locks=(requirements/gpu.lock)
  venv=${2:-$venv}
elif (($#)); then
  echo "setup: unknown argument $1; use --gpu, or none for the CPU profile" >&2
  exit 2
fi
if [[ $venv != /* ]]; then venv=$PWD/$venv; fi
stamp=$venv/.moerl-stamp
log=build/setup.log
site=$venv/lib/python$version/site-packages
source_package=transformer-engine-torch
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
  echo "$profile $({ pwd -P; cat "${locks[@]}" pyproject.toml tools/setup.sh "$venv/pyvenv.cfg"; } |
    sha256sum)"
}

fresh() {
  [[ -x "$venv/bin/python" && -f $stamp && $(<"$stamp") == "$(fingerprint)" ]]
}

# An environment of the GPU profile, made by this script or by hand, is no CPU profile to repair.
own_cuda_environment() {
  [[ $profile == cpu ]] && [[ ! -f $stamp || $(<"$stamp") == gpu\ * ]] &&
    grep -qs "^cuda.* = '" "$venv"/lib/python3.*/site-packages/torch/version.py
}

# Whether packages may be installed over what is there: right Python, whole, not moved here.
reusable() {
  [[ -x "$venv/bin/python" && -d $site ]] &&
    [[ ! -f $stamp || $(<"$stamp") != incomplete ]] &&
    grep -qsF "$venv" "$venv/bin/activate"
}

install() {
  compiler_present
  if reusable; then
    say "updating ${venv#"$PWD/"} (log: $log)"
    echo incomplete >"$stamp"
  else
    local python
    python=$(find_python)
    say "creating ${venv#"$PWD/"} with $python, about $([[ $profile == gpu ]] && echo 12 || echo 3) GB" \
      "(log: $log)"
    "$python" -m venv --clear "$venv" >>"$log" 2>&1 || fail "$python could not create $venv"
    echo incomplete >"$stamp"
  fi
  "packages_$profile"
  echo packages >"$stamp"
  run_pip "this project" --no-build-isolation --editable .
  "finish_$profile"
  fingerprint >"$stamp"
  say "environment ready"
}

packages_cpu() {
  run_pip "$(cat "${locks[@]}" | grep -c ==) pinned packages" --require-hashes \
    "${locks[@]/#/--requirement=}"
}

finish_cpu() {
  # transformers imports torchvision, whose packaged build expects CUDA (moerl/engine/torchvision_fix.py)
  echo "import moerl.engine.torchvision_fix as fix; fix.arm()" >"$site/moerl-torchvision.pth"
  verify
  "$venv/bin/python" -m moerl.kernels.build
}

packages_gpu() {
  local wheels=build/gpu-wheels.txt source=build/gpu-source.txt
  pinned torch >>"$log"
  pinned "$source_package" >>"$log"
  grep -v "^$source_package==" requirements/gpu.lock >"$wheels"
  grep "^$source_package==" requirements/gpu.lock >"$source"
  run_pip "$(grep -c == "$wheels") pinned packages" --require-hashes "--requirement=$wheels"
  link_cuda
  use_packaged_cuda
  local folder made
  folder=${MOERL_WHEELS:-build/wheels}/torch-$(pinned torch)
  made=$(compiled "$folder")
  if [[ -z $made ]]; then
    mkdir -p "$folder"
    say "compiling Transformer Engine for torch $(pinned torch), once (log: $log)"
    # without FORCE_BUILD its build asks a release page for a wheel of another torch
    NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_FRAMEWORK=pytorch "$venv/bin/python" -m pip wheel --no-deps \
      --no-build-isolation --no-input --wheel-dir "$folder" --require-hashes \
      "--requirement=$source" >>"$log" 2>&1 </dev/null || {
      tail -n 15 "$log" >&2
      fail "Transformer Engine did not compile; the whole log is $log"
    }
    made=$(compiled "$folder")
  fi
  run_pip "Transformer Engine" "$made"
}

# .venv/cuda: the compiler of the wheels in the folders where programs look for it.  The wheels have
# `lib` in place of `lib64`, libraries under their full version alone, and none of the driver, which
# some kernels are linked with: an empty one of its name serves the linker.
link_cuda() {
  local packaged=$site/nvidia/cu13 home=$venv/cuda part library name
  [[ -x $packaged/bin/nvcc ]] ||
    fail "$packaged/bin/nvcc is missing: requirements/gpu.lock needs nvidia-cuda-nvcc"
  rm -rf "${home:?}/lib64"
  mkdir -p "$home/lib64/stubs"
  for part in "$packaged"/*; do  # nvcc.profile may name any, such as `targets`
    [[ ${part##*/} == lib ]] || ln -sfnr "$part" "$home/${part##*/}"
  done
  for library in "$packaged"/lib/lib*.so.*; do
    name=$(basename "$library")
    ln -sr "$library" "$home/lib64/$name"
    ln -sfr "$library" "$home/lib64/${name%%.so.*}.so"
  done
  cc -shared -x c /dev/null -Wl,-soname,libcuda.so.1 -o "$home/lib64/stubs/libcuda.so"
}

# What Transformer Engine is compiled with.
use_packaged_cuda() {
  local part
  export CUDA_HOME=$venv/cuda PATH=$venv/cuda/bin:$PATH
  for part in cu13 cudnn nccl; do
    CPATH=$site/nvidia/$part/include${CPATH:+:$CPATH}
    LIBRARY_PATH=$site/nvidia/$part/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
  done
  export CPATH LIBRARY_PATH
}

# pinned NAME: its version in the lock of the GPU profile.
pinned() {
  local line
  line=$(grep "^$1==" requirements/gpu.lock) || fail "requirements/gpu.lock does not name $1"
  line=${line#*==}
  echo "${line%% *}"
}

# compiled FOLDER: the wheel of Transformer Engine's torch part there, if there is one.
compiled() {
  find "$1" -name "${source_package//-/_}-$(pinned "$source_package")-*.whl" 2>/dev/null || true
}

finish_gpu() {
  verify_gpu
  "$venv/bin/python" -m moerl.kernels.build
}

compiler_present() {
  local name
  for name in cc gcc clang; do
    if command -v "$name" >/dev/null; then return; fi
  done
  fail "no C compiler (cc, gcc or clang) is on PATH and some packages come as source:" \
    "install one, for example Debian's package build-essential"
}

# Prints the first Python of the profile's version on PATH that can make an environment with pip.
find_python() {
  local candidate met="none was found" has
  for candidate in $(type -ap "python$version" python3 python); do
    has=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
      continue
    if [[ $has != "$version" ]]; then
      met="$candidate is $has"
    elif [[ $profile == gpu ]] && ! "$candidate" -c 'import os, sysconfig as s, sys
sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))'; then
      met="$candidate lacks Python.h, which Triton compiles with (on Debian: python$version-dev)"
    elif ! "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
      met="$candidate lacks the modules venv and ensurepip (on Debian: the package python$version-venv)"
    else
      echo "$candidate"
      return
    fi
  done
  fail "Python $version with venv is needed on PATH: $met"
}

# run_pip WHAT ARGUMENT...: install without dependencies, with a sign of life every ten seconds.
run_pip() {
  local what=$1
  shift
  say "installing $what"
  # The wheel of megatron-core for Python 3.11 declares 3.12 and works on both.
  "$venv/bin/python" -m pip install --no-deps --ignore-requires-python --no-input \
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
  "$venv/bin/python" - <<'PYTHON' || exit 1
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

verify_gpu() {
  "$venv/bin/python" - <<'PYTHON' || exit 1
import sys
import torch

if not (torch.version.cuda or "").startswith("13."):
    sys.exit(f"setup: torch {torch.__version__} is for CUDA {torch.version.cuda}, the GPU profile "
             "needs one for CUDA 13: remove its folder and check which indexes pip is configured "
             "with")
try:
    import megatron.core
    import transformer_engine.pytorch
except Exception as error:
    sys.exit(f"setup: Transformer Engine was installed and does not import: {error!r}")
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
