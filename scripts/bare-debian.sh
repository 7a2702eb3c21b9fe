#!/usr/bin/env bash
# Proves that ./x works on a fresh Debian 12 that has only bash, git and curl: makes one with debootstrap in a
# temporary folder, puts a clean clone of the last commit there, and runs ./x commands in it. Leaves nothing behind.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/bare-debian.sh [X_COMMAND...]        (default: build test demo)
       scripts/bare-debian.sh --run 'SHELL COMMAND'

Runs each X_COMMAND as `./x X_COMMAND`, or one shell command, in a bare Debian 12
(debootstrap, variant minbase, with git and curl). Needs root, debootstrap, some
8 GB below ${TMPDIR:-/var/tmp}, and a Debian mirror: the one this machine's apt uses,
through its proxies, trusting the authorities in /usr/local/share/ca-certificates.
Nothing is taken from this machine's caches.

Exit status: 0 when every command succeeded, 77 when the mirror cannot be reached.
TEXT
}

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=scripts/debian-root.sh
source "$root/scripts/debian-root.sh"

say() { printf 'bare-debian: [%2d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }
stop() {
    say "$1" >&2
    exit "${2:-1}"
}

# --- Outside: the folder, and namespaces whose mounts and processes vanish with them. ---

outside() {
    case ${1:-} in
        -h | --help) usage && exit ;;
    esac
    ((EUID == 0)) || stop "needs root (mounts, namespaces)"
    command -v debootstrap >/dev/null || stop "needs the Debian package debootstrap"
    local base=${TMPDIR:-/var/tmp}
    remove_stale "$base"/holdfast-bare.*
    folder=$(mktemp -d "$base/holdfast-bare.XXXXXX")
    echo $$ >"$folder/pid"
    # A control group of its own, which is the whole hierarchy inside: labs there and on this machine do not meet.
    group=$(findmnt --noheadings --first-only --output TARGET --types cgroup2) || stop "needs a cgroup2 mount"
    group=$group/$(basename "$folder")
    mkdir "$group"
    worker=
    trap cleanup EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    # In the background, so that a signal is handled at once. If this shell is killed, so is everything inside.
    # shellcheck disable=SC2016 # expanded by the shell that joins the group
    setpriv --pdeathsig KILL bash -c 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"' bash "$group" \
        unshare --mount --propagation private --pid --cgroup --fork --kill-child \
        "$root/scripts/bare-debian.sh" --inside "$folder" "$@" &
    worker=$!
    local status=0
    wait "$worker" || status=$?
    worker=
    exit "$status"
}

cleanup() {
    trap - EXIT
    if [[ -n $worker ]]; then
        kill -KILL "$worker" 2>/dev/null || true
        wait "$worker" 2>/dev/null || true
    fi
    # The mounts went with their namespace; should one be left, it is not followed.
    remove "$folder"
    find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
    say "removed $folder"
}

# --- Inside the namespaces. ---

inside() {
    folder=$1
    shift
    system=$folder/debian
    bootstrap_debian "$system" bash,git,curl "$folder/debootstrap.log" || stop "debootstrap failed"
    take_network_settings
    mount_all
    clone
    if [[ ${1:-} == --run ]]; then
        run_inside "$2"
        return
    fi
    (($#)) || set -- build test demo
    local command
    for command in "$@"; do
        run_inside "./x $command"
    done
}

take_network_settings() {
    cp -L /etc/resolv.conf /etc/hosts "$system/etc/"
    archives >"$folder/sources.list"
    if [[ -s $folder/sources.list ]]; then
        cp "$folder/sources.list" "$system/etc/apt/sources.list"
    fi
    apt-config dump | grep -E '^Acquire::https?::(Proxy|CaInfo)' >"$system/etc/apt/apt.conf.d/00-this-machine" || true
    # Trusted once ca-certificates is installed, which is up to ./x.
    mkdir -p "$system/usr/local/share/ca-certificates"
    find /usr/local/share/ca-certificates -name '*.crt' -exec cp -L {} "$system/usr/local/share/ca-certificates/" \;
}

mount_all() {
    # The new root becomes a mount point, as a system's own root is: a lab's hosts change how it propagates.
    mount --bind "$system" "$system"
    mount -t proc proc "$system/proc"
    mount -t sysfs sysfs "$system/sys"
    mount -t bpf bpf "$system/sys/fs/bpf"
    mount -t cgroup2 cgroup2 "$system/sys/fs/cgroup"
    mount -t tmpfs -o mode=755 tmpfs "$system/run"
    make_devices "$system/dev"
}

clone() {
    say "cloning the last commit: $(git -c safe.directory='*' -C "$root" log -1 --format='%h %s')"
    # The checkout may belong to another user than root.
    GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*' \
        git clone --quiet --no-hardlinks "$root" "$system/srv/holdfast"
}

# run_inside COMMAND: in the clone, with a login's environment and the proxies of this machine.
run_inside() {
    local pass=() name
    for name in TERM http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
        [[ -n ${!name:-} ]] && pass+=("$name=${!name}")
    done
    say "running in the bare Debian: $1"
    local status=0
    # The root of the mount namespace changes, not only this process's: a lab's hosts are entered by their mount
    # namespaces, which would lead out of a chroot. "~" is root's home inside.
    # shellcheck disable=SC2016 # expanded inside
    env -i "${pass[@]+"${pass[@]}"}" LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        unshare --mount --propagation private /bin/bash -c '
            cd "$1" && pivot_root . mnt && umount --lazy /mnt && export HOME=~ &&
                exec chroot . /bin/bash -c "cd /srv/holdfast && eval \"\$1\"" bash "$2"
        ' bash "$system" "$1" </dev/null || status=$?
    ((status == 0)) || stop "failed with status $status: $1" 1
    say "succeeded: $1"
}

if [[ ${1:-} == --inside ]]; then
    shift
    inside "$@"
else
    outside "$@"
fi
