# Sourced by the other scripts: creates .venv and installs Longshore into it, in editable form.
#
# Does nothing if .venv was installed from the current pyproject.toml, setup.py, constraints.txt and
# C++ sources. PYTHON selects the interpreter for a new .venv.

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

# ensure_environment [EXTRA]: an installation with the dev extra is also sufficient without the extra.
ensure_environment() {
  local extra=${1:-} python wanted stamp
  stamp=.venv/installed${extra:+-$extra}
  if [[ ! -x .venv/bin/python ]]; then
    python=$(find_python) || return
    echo "creating .venv with $("$python" --version)" >&2
    "$python" -m venv .venv || return
  fi
  wanted=$(cat pyproject.toml setup.py constraints.txt worker/kernels/native/* | sha256sum)
  if [[ $(cat "$stamp" .venv/installed-dev 2>/dev/null) == *"$wanted"* ]]; then
    return
  fi
  echo "installing Longshore${extra:+ with the $extra extra} into .venv; this takes a few minutes, mostly for torch" >&2
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --editable ".${extra:+[$extra]}" || return
  echo "$wanted" >"$stamp"
}
