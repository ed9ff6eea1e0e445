# Sourced by scripts/test: installs what the tests marked `services` need in addition to .venv.
#
# The programs are system packages, so the installation needs root. It is sourced after environment.sh.

ensure_services() {
  local package program missing=()
  for program in ip:iproute2 chromium chromedriver:chromium-driver promtool:prometheus redis-server node:nodejs npm; do
    package=${program#*:}
    command -v "${program%%:*}" >/dev/null || missing+=("$package")
  done
  ldconfig -p | grep -q 'libibverbs\.so\.1' || missing+=(libibverbs1) # for Mooncake
  if ((${#missing[@]})); then
    echo "installing ${missing[*]}" >&2
    apt-get update --quiet=2 && DEBIAN_FRONTEND=noninteractive \
      apt-get install --quiet=2 --no-install-recommends "${missing[@]}" >&2 || {
      echo "scripts/test --all needs ${missing[*]}; install them as root" >&2
      return 1
    }
  fi
  ensure_locked_services || return
  ensure_clients
}

ensure_locked_services() {
  local modules='longshore.connectors.lmcache.storage, mooncake.engine, nixl._api, ray, xgrammar' wanted
  wanted=$(cat locks/* | sha256sum)
  if [[ $(cat .venv/installed-services 2>/dev/null) != "$wanted" ]]; then
    echo "installing ${modules//, / } into .venv" >&2
    install_locked services || return
    install_locked no-deps || return
    .venv/bin/python -c "import $modules" || return
    echo "$wanted" >.venv/installed-services
  fi
}

# Client libraries pin versions of packages that others, or Longshore's tests, need in another version. So
# each file of tests/clients/requirements has an environment, in which the packages of .venv can be imported
# unless it has its own version. That includes torch, of which no other version is installed. The versions
# of the clients are pinned there, what they need beside it is not.
ensure_clients() {
  local file env site
  site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return
  for file in tests/clients/requirements/*.txt; do
    env=.venv-clients/$(basename "$file" .txt)
    cmp --silent "$file" "$env/installed" && continue
    echo "installing $(xargs <"$file") into $env" >&2
    .venv/bin/python -m venv --clear --without-pip "$env" || return
    echo "$site" >"$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/longshore.pth"
    .venv/bin/python -m pip --python "$env/bin/python" install --quiet --disable-pip-version-check \
      --constraint constraints.txt --requirement "$file" || return
    cp "$file" "$env/installed"
  done
  ensure_node_clients
}

ensure_node_clients() {
  local folder=tests/clients/ai_sdk
  cmp --silent "$folder/package-lock.json" "$folder/node_modules/installed" && return
  echo "installing the AI SDK into $folder/node_modules" >&2
  npm ci --prefix "$folder" --ignore-scripts --no-audit --no-fund --loglevel=error >&2 || return
  cp "$folder/package-lock.json" "$folder/node_modules/installed"
}
