#!/usr/bin/env bash
# Make build/reference: TRL and verl, the published implementations that tests/references compares
# with.  They are test oracles only; .venv stays exactly as it is.
#
# The environment sees the packages of .venv (torch, transformers, ray, ...) through one .pth line
# and holds only what .venv lacks, at pinned versions and without dependency resolution, so that
# neither package can move a version of the main environment.  verl declares transformers < 5.11;
# the two modules that the tests call import and run with the one in .venv.  About 150 MB.
#
# usage: tools/reference_env.sh        prints the path of its Python, does nothing when complete
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=build/reference
packages=(
  trl==1.16.0 verl==0.9.1
  accelerate==1.15.0 datasets==5.2.0 multiprocess==0.70.19 pandas==3.1.1 pyarrow==26.0.1
  tensordict==0.10.0 pyvers==0.2.3 codetiming==1.4.0 torchdata==0.11.0
  peft==0.21.2 pylatexenc==2.11 cloudpickle==3.1.2
)
wanted=$(printf '%s\n' "$PWD" "${packages[@]}")

if [[ -x $folder/bin/python && $(cat "$folder/.complete" 2>/dev/null) == "$wanted" ]]; then
  echo "$folder/bin/python"
  exit
fi
rm -rf "$folder"
mkdir -p build
.venv/bin/python -m venv "$folder" >&2
echo "$PWD/.venv/lib/python3.11/site-packages" >"$folder/lib/python3.11/site-packages/main.pth"
"$folder/bin/python" -m pip install --no-deps --no-input --progress-bar=off \
  --ignore-installed "${packages[@]}" >build/reference.log 2>&1 || {
  tail -n 5 build/reference.log >&2
  echo "reference_env: pip failed; the whole log is build/reference.log" >&2
  exit 1
}
printf '%s\n' "$wanted" >"$folder/.complete"
echo "$folder/bin/python"
