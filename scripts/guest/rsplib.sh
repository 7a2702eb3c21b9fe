#!/usr/bin/env bash
# Holdfast beside rsplib, the other implementation of Reliable Server Pooling, over a kernel's SCTP: both run in network
# namespaces of the guest (guest.sh). Needs root, kmod, jq, curl, tcpdump, tshark, and cargo. Debian's packages of rsplib are
# fetched and unpacked beside the guest; nothing of them is installed.
#
#   rsplib.sh [-d DIR] [SCENARIO...]   SCENARIO: a file of rsplib/ with a number before its name (default: all of them).
#                                      DIR keeps the guest's folder and the logs (default: below the build folder)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
: "${CARGO_TARGET_DIR:=$root/target}"
export CARGO_TARGET_DIR
dir=$CARGO_TARGET_DIR/guest
[[ ${1:-} == -d ]] && { dir=$2; shift 2; }
seconds_max=900
packages=(rsplib-registrar rsplib-tools librsplib3 libcpprspserver3 libsctp1)

(cd "$root" && cargo build --locked -p holdfast-cli -p holdfast-node --bins && cargo build --locked -p holdfast-sys --example sctp_echo)
"$here/guest.sh" prepare "$dir"
dir=$(cd "$dir" && pwd)
if [[ ! -x $dir/rsplib/usr/bin/rspregistrar ]]; then
    echo "rsplib.sh: fetching Debian's packages ${packages[*]}, into $dir only"
    rm -rf "$dir/rsplib"
    mkdir -p "$dir/rsplib"
    fetch() { (cd "$dir/rsplib" && apt-get -q -o APT::Sandbox::User=root download "${packages[@]}"); }
    # Package lists may be older than the packages.
    fetch || { apt-get -q update && fetch; }
    for package in "$dir"/rsplib/*.deb; do
        dpkg -x "$package" "$dir/rsplib"
    done
fi

# The guest has a /tmp of its own, so what it runs is put where it sees it.
mkdir -p "$dir/bin"
for program in holdfast holdfastd examples/sctp_echo; do
    cp -u "$CARGO_TARGET_DIR/debug/$program" "$dir/bin/"
done
rm -rf "$dir/rsplib-logs" "$dir/rsplib-test" "$dir/rsplib.txt"
cp -r "$here/rsplib" "$dir/rsplib-test"
mkdir -p "$dir/rsplib-logs"
: >"$dir/rsplib.txt"
scenarios=("$@")
((${#scenarios[@]})) || for file in "$here"/rsplib/[0-9]*.sh; do scenarios+=("$(basename "$file" .sh)"); done
printf '/bin/bash /mnt/rsplib-test/inside.sh %s >>/mnt/rsplib.txt 2>&1\n' "${scenarios[*]}" >"$dir/rsplib-inside.sh"

timeout "$seconds_max" "$here/guest.sh" run "$dir" "$dir/rsplib-inside.sh" >"$dir/rsplib-console.txt" 2>&1 &
guest=$!
tail -n +1 -f --pid="$guest" "$dir/rsplib.txt" &
shown=$!
status=0
wait "$guest" || status=$?
wait "$shown" || true
if [[ ! -s $dir/rsplib.txt ]]; then
    echo "rsplib.sh: the guest did not start on this machine:" >&2
    tail -n 20 "$dir/rsplib-console.txt" >&2
    exit 77 # skipped
fi
if ! grep -q '^test result: ' "$dir/rsplib.txt"; then
    echo "rsplib.sh: the guest ended before its tests did (status $status, at most $seconds_max s)" >&2
    echo "test result: FAILED. 0 passed; 1 failed; the guest's console: $dir/rsplib-console.txt"
    exit 1
fi
# A second opinion on every packet of every scenario.
malformed=0
for capture in "$dir"/rsplib-logs/*/traffic.pcap; do
    spoken=$(tshark -r "$capture" -Y 'asap or enrp' 2>/dev/null | wc -l)
    wrong=$(tshark -r "$capture" -Y '_ws.malformed' 2>/dev/null)
    if ((spoken < 20)) || [[ -n $wrong ]]; then
        printf 'test %s: of %d messages tshark finds none malformed ... FAILED\n%s\n' "$capture" "$spoken" "$wrong"
        malformed=1
    fi
done
if ((malformed)); then
    echo "test result: FAILED. 0 passed; 1 failed; captures"
else
    echo "test result: ok. 1 passed; 0 failed; tshark finds no malformed message in the captures"
fi
((!malformed)) && grep -q '^test result: ok' "$dir/rsplib.txt" || {
    echo "rsplib.sh: logs are in $dir/rsplib-logs" >&2
    exit 1
}
