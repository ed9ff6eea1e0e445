# Sourced by scripts/test: installs what the tests marked `services` need in addition to .venv.
#
# The programs are system packages, so the installation needs root. litellm pins an older version of
# openai than Longshore's tests need, so it has its own environment. LMCache and NIXL are installed into
# .venv without their dependencies: LMCache's are mostly for its server, NIXL's are two CUDA builds. Those
# of xgrammar are torch, which is there, and triton, which is for GPUs.

ensure_services() {
  local package program missing=()
  for program in chromium chromedriver:chromium-driver promtool:prometheus redis-server; do
    package=${program#*:}
    command -v "${program%%:*}" >/dev/null || missing+=("$package")
  done
  if ((${#missing[@]})); then
    echo "installing ${missing[*]}" >&2
    apt-get update --quiet=2 && DEBIAN_FRONTEND=noninteractive \
      apt-get install --quiet=2 --no-install-recommends "${missing[@]}" >&2 || {
      echo "scripts/test --all needs ${missing[*]}; install them as root" >&2
      return 1
    }
  fi
  if ! .venv/bin/python -c 'import nixl._api' 2>/dev/null; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
      'nixl>=1.5' 'nixl-cu13>=1.5' || return
  fi
  if ! .venv/bin/python -c 'import xgrammar' 2>/dev/null; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
      'xgrammar>=0.2.8,<0.3' 'apache-tvm-ffi>=0.1.11' || return
  fi
  if [[ ! -x .venv-litellm/bin/litellm ]]; then
    .venv/bin/python -m venv .venv-litellm || return
    .venv-litellm/bin/python -m pip install --quiet --disable-pip-version-check 'litellm>=1.60' || return
  fi
  ensure_lmcache
}

ensure_lmcache() {
  local version
  .venv/bin/python -c 'import longshore.connectors.lmcache.storage' 2>/dev/null && return
  version=$(.venv/bin/python -c 'from longshore.connectors.lmcache.options import *; print(LMCACHE_VERSION)') || return
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --editable '.[lmcache]' || return
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "lmcache==$version" || return
  .venv/bin/python -c 'import longshore.connectors.lmcache.storage'
}
