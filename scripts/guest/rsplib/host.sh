# Sourced outside of the guest, by what runs rsplib inside: its programs, ours, and the way in.
# shellcheck shell=bash

rsplib_packages=(rsplib-registrar rsplib-tools librsplib3 libcpprspserver3 libsctp1)

# prepare_guest DIR PROFILE PROGRAM...: the guest's folder with rsplib, our programs of that profile, and these scripts.
prepare_guest() {
    local dir=$1 profile=$2 program package
    shift 2
    "$here/guest.sh" prepare "$dir"
    if [[ ! -x $dir/rsplib/usr/bin/rspregistrar ]]; then
        echo "fetching Debian's packages ${rsplib_packages[*]}, into $dir only"
        rm -rf "$dir/rsplib"
        mkdir -p "$dir/rsplib"
        # Package lists may be older than the packages.
        fetch_rsplib "$dir" || { apt-get -q update && fetch_rsplib "$dir"; }
        for package in "$dir"/rsplib/*.deb; do
            dpkg -x "$package" "$dir/rsplib"
        done
    fi
    # The guest has a /tmp of its own, so what it runs is put where it sees it.
    mkdir -p "$dir/bin"
    for program in "$@"; do
        rm -f "$dir/bin/$(basename "$program")"
        cp "$CARGO_TARGET_DIR/$profile/$program" "$dir/bin/"
    done
    rm -rf "$dir/rsplib-logs" "$dir/rsplib-test" "$dir/rsplib.txt"
    cp -r "$here/rsplib" "$dir/rsplib-test"
    mkdir -p "$dir/rsplib-logs"
    : >"$dir/rsplib.txt"
}

fetch_rsplib() { (cd "$1/rsplib" && apt-get -q -o APT::Sandbox::User=root download "${rsplib_packages[@]}"); }

# run_scenarios DIR SECONDS_MAX SCENARIO...: shows what they say as they say it. 77: the guest does not start here.
run_scenarios() {
    local dir=$1 seconds_max=$2 guest shown status=0
    shift 2
    printf '/bin/bash /mnt/rsplib-test/inside.sh %s >>/mnt/rsplib.txt 2>&1\n' "$*" >"$dir/rsplib-inside.sh"
    timeout -k 10 "$seconds_max" "$here/guest.sh" run "$dir" "$dir/rsplib-inside.sh" >"$dir/rsplib-console.txt" 2>&1 &
    guest=$!
    tail -n +1 -f --pid="$guest" "$dir/rsplib.txt" &
    shown=$!
    wait "$guest" || status=$?
    wait "$shown" || true
    if [[ ! -s $dir/rsplib.txt ]]; then
        echo "the guest did not start on this machine:" >&2
        tail -n 20 "$dir/rsplib-console.txt" >&2
        return 77 # skipped
    fi
    if ! grep -q '^test result: ' "$dir/rsplib.txt"; then
        echo "the guest ended before its tests did (status $status, at most $seconds_max s); its console: $dir/rsplib-console.txt" >&2
        echo "test result: FAILED. 0 passed; 1 failed; the guest"
        return 1
    fi
    grep -q '^test result: ok' "$dir/rsplib.txt" || {
        echo "logs are in $dir/rsplib-logs" >&2
        return 1
    }
}
