# Sourced by scripts/test: installs what the tests marked `services` need in addition to .venv.
#
# The programs are system packages, so the installation needs root. litellm pins an older version of
# openai than Longshore's tests need, so it has its own environment.

ensure_services() {
  local package program missing=()
  for program in chromium chromedriver:chromium-driver promtool:prometheus; do
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
  if [[ ! -x .venv-litellm/bin/litellm ]]; then
    .venv/bin/python -m venv .venv-litellm || return
    .venv-litellm/bin/python -m pip install --quiet --disable-pip-version-check 'litellm>=1.60' || return
  fi
}
