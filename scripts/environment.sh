# Sourced by the other scripts: creates .venv and installs Longshore into it, in editable form.
#
# Does nothing if .venv was installed from the current pyproject.toml, setup.py, constraints.txt, locks and
# C++ sources. PYTHON selects the interpreter for a new .venv.
#
# All packages have the versions of locks/, which `scripts/lock` writes, and pip compares their hashes.
# torch comes after them, by its version in constraints.txt: the hashes of its CPU and CUDA builds differ.

find_python() {
  local candidate candidates=${PYTHON:-python3 python3.12 python3.11}
  for candidate in $candidates; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "Longshore needs Python 3.11 or newer; set PYTHON to one (tried: $candidates)" >&2
  return 1
}

pip_install() {
  .venv/bin/python -m pip install --disable-pip-version-check "$@" >&2
}

# warn_of_cuda_build DEVICE: the default index has the CUDA build of torch, which is of no use without DEVICE.
warn_of_cuda_build() {
  if [[ ! -e $1 ]] && ! { env; .venv/bin/python -m pip config list; } | grep -qi 'index[-_]url=.*cpu'; then
    echo "warning: this machine has no NVIDIA GPU, but pip will download the CUDA build of torch, which has several GB." \
      "For the CPU build, press Ctrl-C and set PIP_EXTRA_INDEX_URL to the URL that PyTorch's install page gives for CPU" >&2
  fi
}

# install_locked NAME: what locks/NAME.txt lists; it lists all dependencies.
install_locked() {
  pip_install --no-deps --require-hashes --requirement "locks/$1.txt"
}

# ensure_environment [dev]: an installation with the dev extra is also sufficient without the extra.
ensure_environment() {
  local extra=${1:-} python wanted stamp
  stamp=.venv/installed${extra:+-$extra}
  if [[ ! -x .venv/bin/python ]]; then
    python=$(find_python) || return
    echo "creating .venv with $("$python" --version)" >&2
    "$python" -m venv .venv || return
  fi
  wanted=$(cat pyproject.toml setup.py constraints.txt locks/* worker/kernels/native/* | sha256sum)
  if [[ $(cat "$stamp" .venv/installed-dev 2>/dev/null) == *"$wanted"* ]]; then
    return
  fi
  echo "installing Longshore${extra:+ with the $extra extra} into .venv; this takes a few minutes, mostly for torch" >&2
  warn_of_cuda_build /dev/nvidiactl
  install_locked "${extra:-runtime}" || return
  pip_install --constraint constraints.txt torch || return
  .venv/bin/python -m pip uninstall -qq --yes longshore # the name of the distribution until 0.1.0
  pip_install --no-deps --no-build-isolation --editable . || return
  echo "$wanted" >"$stamp"
}
