# Sourced by scripts/test: installs what the tests marked `services` need in addition to .venv.
#
# The programs are system packages, so the installation needs root. It is sourced after environment.sh.

# ensure_services [--long]: with --long, also what builds an image, and a compiler for arm64.
ensure_services() {
  local package program missing=()
  local programs=(ip:iproute2 chromium chromedriver:chromium-driver promtool:prometheus redis-server node:nodejs npm valgrind nginx:nginx-light)
  [[ " $* " != *" --long "* ]] || programs+=(buildah debootstrap aarch64-linux-gnu-g++:g++-aarch64-linux-gnu)
  for program in "${programs[@]}"; do
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
  ensure_locked_services
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
# of the clients are pinned there, what they need beside it is not. The environment openai has the clients
# that work with its newest version, and the Node that agents from npm need. The tools that check what deploy/ has
# for Kubernetes and Docker have one, too.
ensure_clients() {
  local file env pid site jobs=()
  site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return
  for file in tests/clients/requirements/*.txt tests/deploy/deployment_tools.txt; do
    env=.venv-clients/$(basename "$file" .txt)
    cmp --silent "$file" "$env/installed" && continue
    install_client "$file" "$env" "$site" &
    jobs+=($!)
  done
  for pid in "${jobs[@]}"; do
    wait "$pid" || return
  done
  ensure_node_clients
}

# The newest versions of all clients, in .venv-clients/newest, for `scripts/compatibility --newest`. Clients
# that share an environment get the newest ones that go together.
install_newest_clients() {
  local folder=.venv-clients/newest file name site
  site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return
  for file in tests/clients/requirements/*.txt; do
    name=$(basename "$file" .txt)
    mkdir -p "$folder"
    sed 's/==.*//' "$file" >"$folder/$name.txt"
    install_client "$folder/$name.txt" "$folder/$name" "$site" || return
  done
  for name in node agents; do
    rm -rf "${folder:?}/$name"
    mkdir "$folder/$name"
    sed -E 's/": "[0-9][^"]*"/": "latest"/' "tests/clients/$name/package.json" >"$folder/$name/package.json"
    ensure_node_packages "$folder/$name" package.json install --no-package-lock || return
  done
  cp tests/clients/node/*.mjs "$folder/node"
}

install_client() {
  local file=$1 env=$2 site=$3
  echo "installing $(xargs <"$file") into $env" >&2
  .venv/bin/python -m venv --clear --without-pip "$env" || return
  echo "$site" >"$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/longshore.pth"
  .venv/bin/python -m pip --python "$env/bin/python" install --quiet --disable-pip-version-check \
    --constraint constraints.txt --requirement "$file" || return
  cp "$file" "$env/installed"
}

# The agents have no lock: they contain what they need, except optional packages, which some mirrors lack.
ensure_node_clients() {
  ensure_node_packages tests/clients/node package-lock.json ci &&
    ensure_node_packages tests/clients/agents package.json install --no-package-lock
}

ensure_node_packages() {
  local folder=$1 pinned=$1/$2
  cmp --silent "$pinned" "$folder/node_modules/installed" && return
  echo "installing the packages of $folder/package.json" >&2
  npm "${@:3}" --prefix "$folder" --ignore-scripts --no-audit --no-fund --loglevel=error >&2 || return
  cp "$pinned" "$folder/node_modules/installed"
}
