# Sourced by ./x: what the machine must have, and how it gets it.
# shellcheck shell=bash

build_packages=(gcc libc6-dev ca-certificates clang make pkg-config libelf-dev zlib1g-dev libbpf-dev)
lab_packages=(curl ethtool iproute2 iputils-ping nftables procps tcpdump util-linux)
test_packages=(tshark bind9-dnsutils)
pool_packages=(nginx)
store_packages=(etcd-server)
proof_packages=(debootstrap)
package_packages=(dpkg-dev)
guest_packages=(kmod iproute2 jq)
# Unpacked, not installed: openarena-server depends on 420 MB of pictures and sounds, and is started when it is installed. A server
# whose game is machine code needs the engine, that game and the maps (41 MB).
game_packages=(openarena-server ioquake3-server openarena-081-maps)

database_packages=(mariadb-server-core)
# With nginx of the group `pool`.
drain_packages=(redis-server memcached nodejs node-ws)
# Go is the largest of them, 450 MB.
program_packages=(redis-server redis-tools nginx wrk mosquitto mosquitto-clients memcached python3 nodejs node-ws
    openjdk-17-jre-headless openjdk-17-jdk-headless golang-go haproxy postgresql php-fpm)

declare -A package_reason=(
    [build]="to build: C compiler, clang and headers for the eBPF programs"
    [lab]="for the lab: namespaces, links, captures"
    [test]="for the tests: a second opinion on captured packets and on DNS answers"
    [guest]="for the tests over a kernel's SCTP: modules of User-mode Linux, answers in JSON"
    [pool]="for the demonstration of pools, stock servers; installed without being started"
    [game]="for OpenArena's dedicated server as a load, the one of paper 002; unpacked beside the build, not installed"
    [database]="for the database of the zone server, the load of paper 002; nothing of it is started"
    [store]="for groups whose views are in etcd; installed without being started"
    [drain]="for the demonstration of drains, stock servers; installed without being started"
    [program]="for the real programs that are put under load; installed without being started"
    [package]="to make Debian packages"
    [proof]="for the bare Debian in which ./x proves itself"
)

kernel_min=6.12
rust_min=1.88
# Installed where Rust is missing: the release whose lints the checkout is clean under.
rust_install=1.95.0
# The newest that builds with `rust_min`.
nextest_version=0.9.114

stop() {
    printf 'x: %s\n' "$*" >&2
    exit 1
}

say() { printf 'x: %s\n' "$*"; }

# at_least HAVE WANT: compares dotted versions.
at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

# Builds are cached outside the checkout, in a folder of this checkout's own.
set_target_dir() {
    : "${HOME:=$(cd ~ 2>/dev/null && pwd || echo /)}"
    export HOME
    local key
    key=$(basename "$root")-$(printf '%s' "$root" | cksum | cut -d ' ' -f 1)
    export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/holdfast/target/$key}
}

# need_root COMMAND: ends the run before anything is done.
need_root() {
    ((EUID == 0)) && return
    cat >&2 <<TEXT
x: \`./x $1\` needs root: it makes network namespaces and links, loads eBPF programs,
x: and installs the Debian packages that are missing. Nothing has been done.
x: Run: sudo ./x $1
TEXT
    exit 1
}

need_kernel() {
    local release
    release=$(uname -r)
    [[ $(uname -s) == Linux ]] || stop "this is $(uname -s); Holdfast needs Linux $kernel_min or newer"
    at_least "${release%%-*}" "$kernel_min" ||
        stop "Linux $release is too old: Holdfast needs $kernel_min or newer (tcx, asynchronous write-protect, the request-socket kfunc)"
}

# need_features: tries what the lab and the daemon use, and names everything that is missing.
need_features() {
    local missing=()
    [[ -e /sys/kernel/btf/vmlinux ]] || missing+=("BTF of the kernel, /sys/kernel/btf/vmlinux (CONFIG_DEBUG_INFO_BTF)")
    grep -qw bpf /proc/filesystems || missing+=("bpffs (CONFIG_BPF_SYSCALL)")
    grep -qw cgroup2 /proc/filesystems || missing+=("cgroup v2 (CONFIG_CGROUPS)")
    # The kernel makes this file only together with TCP_REPAIR.
    [[ -e /proc/sys/kernel/ns_last_pid ]] || missing+=("socket repair (CONFIG_CHECKPOINT_RESTORE)")
    local error
    # Propagation stays: in a plain chroot, whose root is no mount, it cannot be changed.
    if ! error=$(unshare --net --mount --propagation unchanged --pid --ipc --uts --fork true 2>&1); then
        missing+=("namespaces: network, mount, PID, IPC, UTS (CONFIG_NAMESPACES, CAP_SYS_ADMIN): $error")
    else
        unshare --net ip link add hf0 type veth peer name hf1 2>/dev/null || missing+=("veth links (CONFIG_VETH)")
        unshare --net ip link add hf0 type bridge 2>/dev/null || missing+=("bridges (CONFIG_BRIDGE)")
        unshare --net ip tuntap add hf0 mode tun 2>/dev/null || missing+=("TUN, /dev/net/tun (CONFIG_TUN)")
    fi
    ((${#missing[@]})) || return 0
    printf 'x: this machine lacks: %s\n' "${missing[@]}" >&2
    exit 1
}

# need_bpffs: the tests of the eBPF programs pin maps where systemd mounts a file system for them at boot.
need_bpffs() {
    [[ $(stat -f -c %T /sys/fs/bpf) == bpf_fs ]] && return
    say "mounting a bpf file system at /sys/fs/bpf, where there is none"
    mount -t bpf bpf /sys/fs/bpf || stop "cannot mount it"
}

installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

# install_packages GROUP...: installs what is missing, after saying what and why.
install_packages() {
    command -v dpkg-query >/dev/null || stop "this is not Debian: install the packages named in scripts/setup.sh by hand"
    local group package list missing all=() lines=()
    for group in "$@"; do
        local -n list=${group}_packages
        missing=()
        for package in "${list[@]}"; do
            installed "$package" || missing+=("$package")
        done
        ((${#missing[@]})) || continue
        all+=("${missing[@]}")
        lines+=("${missing[*]} (${package_reason[$group]})")
    done
    ((${#all[@]})) || return 0
    section "Debian packages"
    say "these Debian packages are missing:"
    printf 'x:   %s\n' "${lines[@]}"
    ((EUID == 0)) || stop "installing them needs root; nothing has been done. Run: sudo apt-get install ${all[*]}"
    say "installing them with apt-get"
    apt_install "${all[@]}"
}

# unpack_packages GROUP DIR: fetches the group's packages and unpacks them into DIR, once; nothing is installed.
unpack_packages() {
    local -n list=${1}_packages
    local dir=$2
    [[ -e $dir/complete ]] && return
    section "Debian packages"
    say "fetching ${list[*]} (${package_reason[$1]})"
    say "into $dir"
    mkdir -p "$dir"
    (
        cd "$dir"
        apt-get -q download "${list[@]}" || { apt-get -q update && apt-get -q download "${list[@]}"; } || exit
        local file
        for file in *.deb; do
            dpkg -x "$file" . && rm "$file" || exit
        done
        touch complete
    )
}

# A server among the packages is not started: the policy that Debian asks (invoke-rc.d(8)) says no meanwhile.
apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    local policy=/usr/sbin/policy-rc.d own_policy=
    if [[ " $* " =~ " "(nginx|redis-server|mosquitto|memcached|haproxy|postgresql|php-fpm)" " && ! -e $policy ]]; then
        own_policy=$policy
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
    fi
    # shellcheck disable=SC2064 # Its name is known now.
    [[ -z $own_policy ]] || trap "rm -f '$own_policy'" EXIT
    local options=(-q -y -o DPkg::Lock::Timeout=300)
    apt-get "${options[@]}" update ||
        say "apt-get update reported an error; trying with the present package lists"
    apt-get "${options[@]}" install --no-install-recommends "$@" ||
        stop "apt-get could not install: $*"
    [[ -z $own_policy ]] || { rm -f "$own_policy" && trap - EXIT; }
}

# need_rust [COMPONENT...]: a cargo that is new enough, with the components, installed by rustup where missing.
need_rust() {
    local version
    # rustup's own folder comes first: a distribution's cargo is often too old.
    export PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
    version=$(cargo_version)
    if [[ -z $version ]]; then
        section "Rust"
        say "there is no cargo: installing Rust $rust_install with rustup into ${CARGO_HOME:-$HOME/.cargo}"
        say "(profile minimal, clippy, rustfmt; your shell's profile is left as it is)"
        install_rustup
    elif ! at_least "$version" "$rust_min"; then
        section "Rust"
        say "cargo $version at $(command -v cargo) is too old: Holdfast needs $rust_min or newer"
        replace_old_rust
    fi
    version=$(cargo_version)
    [[ -n $version ]] && at_least "$version" "$rust_min" || stop "no usable cargo after installation (found: ${version:-none})"
    need_components "$@"
}

cargo_version() {
    local line
    line=$(cargo --version 2>/dev/null) || return 0
    [[ $line =~ ^cargo\ ([0-9.]+) ]] && echo "${BASH_REMATCH[1]}"
}

replace_old_rust() {
    if command -v rustup >/dev/null; then
        say "installing Rust $rust_install with the installed rustup, for this checkout's builds only"
        rustup toolchain install "$rust_install" --profile minimal -c clippy -c rustfmt ||
            stop "rustup could not install Rust $rust_install"
        export RUSTUP_TOOLCHAIN=$rust_install
    else
        say "there is no rustup: installing it, with Rust $rust_install, into ${CARGO_HOME:-$HOME/.cargo}"
        install_rustup
    fi
}

# The official installer; the second address is the same script on the server that holds the toolchains.
install_rustup() {
    local url script
    script=$(mktemp)
    for url in https://sh.rustup.rs https://static.rust-lang.org/rustup/rustup-init.sh; do
        say "fetching $url"
        curl --proto '=https' --tlsv1.2 -sSf --retry 2 --connect-timeout 20 "$url" -o "$script" && break
        : >"$script"
    done
    if [[ ! -s $script ]]; then
        rm -f "$script"
        stop "cannot fetch rustup. Install Rust $rust_min or newer by other means (https://rust-lang.org/tools/install), then run this again"
    fi
    RUSTUP_INIT_SKIP_PATH_CHECK=yes sh "$script" -y --no-modify-path --profile minimal \
        --component clippy --component rustfmt --default-toolchain "$rust_install" ||
        { rm -f "$script"; stop "rustup could not install Rust $rust_install"; }
    rm -f "$script"
    hash -r
}

need_components() {
    local component tool
    for component in "$@"; do
        tool=${component/rustfmt/fmt}
        cargo "$tool" --version >/dev/null 2>&1 && continue
        say "installing the Rust component $component"
        rustup component add "$component" || stop "the Rust component $component is missing and rustup could not add it"
    done
}

# need_nextest: cargo-nextest runs the tests. Built once, without optimisation, and kept beside the builds of all checkouts.
need_nextest() {
    local folder=${XDG_CACHE_HOME:-$HOME/.cache}/holdfast/tools/nextest-$nextest_version
    export PATH=$folder/bin:$PATH
    [[ -x $folder/bin/cargo-nextest ]] && return
    say "building cargo-nextest $nextest_version, which runs the tests, into $folder"
    CARGO_TARGET_DIR=$folder/build CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0 \
        cargo install cargo-nextest --version "$nextest_version" --locked --quiet --no-default-features \
        --features default-no-update --profile dev --root "$folder" || return
    rm -rf "$folder/build"
}
