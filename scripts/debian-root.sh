# Sourced by scripts that need a bare Debian: makes its files and devices, and removes them. Expects `say` and `stop`.
# shellcheck shell=bash

suite=bookworm

# The archives this machine's apt uses, as lines for sources.list.
archives() {
    # shellcheck disable=SC2016 # apt-get replaces these
    apt-get indextargets --format 'deb $(REPO_URI) $(CODENAME) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
        grep -E " $suite(-updates|-security)? main$" | sort -u || true
}

# bootstrap_debian DIR PACKAGES LOG: a Debian with the packages, a list with commas. Ends the run with status 77 if the
# mirror cannot be reached.
bootstrap_debian() {
    local mirror
    mirror=$(archives | awk -v suite="$suite" '$3 == suite { print $2; exit }')
    mirror=${mirror:-http://deb.debian.org/debian}
    curl -sSf -o /dev/null --retry 2 --max-time 60 "${mirror%/}/dists/$suite/Release" ||
        stop "the Debian mirror $mirror cannot be reached" 77
    say "bootstrapping Debian $suite from $mirror"
    debootstrap --variant=minbase --include="$2" "$suite" "$1" "$mirror" >"$3" 2>&1 || {
        tail -n 20 "$3" >&2
        return 1
    }
}

# make_devices DIR: a file system with the devices of a container.
make_devices() {
    mount -t tmpfs -o mode=755 tmpfs "$1"
    mkdir "$1/pts" "$1/shm" "$1/net"
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$1/pts"
    mount -t tmpfs -o mode=1777 tmpfs "$1/shm"
    ln -s pts/ptmx "$1/ptmx"
    ln -s /proc/self/fd "$1/fd"
    local name major minor
    while read -r name major minor; do
        mknod -m 666 "$1/$name" c "$major" "$minor"
    done <<'TEXT'
null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
net/tun 10 200
TEXT
}

# remove DIR: a process that was just killed may hold its files a moment longer.
remove() {
    local try
    for try in 1 2 3 4 5; do
        rm -rf --one-file-system "$1" 2>/dev/null && return 0
        sleep "$try"
    done
    rm -rf --one-file-system "$1"
}

# remove_stale DIR...: folders of earlier runs that were killed, which have the number of their process in the file `pid`.
remove_stale() {
    local old
    for old in "$@"; do
        [[ -r $old/pid ]] || continue
        kill -0 "$(<"$old/pid")" 2>/dev/null && continue
        say "removing $old, left by a run that was killed"
        remove "$old"
    done
}
