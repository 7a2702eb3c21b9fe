#!/usr/bin/env bash
# The transport over a kernel's SCTP: its tests inside the guest (guest.sh), then libusrsctp here against the guest's
# kernel, each side asking once, raw and inside UDP. Needs root, kmod, and cargo.
#
#   transport.sh [DIR]    the guest's folder is kept in DIR (default: below the build folder)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
: "${CARGO_TARGET_DIR:=$root/target}"
export CARGO_TARGET_DIR
dir=${1:-$CARGO_TARGET_DIR/guest}

if [[ -z ${HOLDFAST_IN_NAMESPACE:-} ]]; then
    # As other builds of the workspace, whose libraries have the features of its tests.
    (cd "$root" && cargo build --locked --workspace --bins --example sctp_echo --test transport --message-format=json) |
        sed -n 's/.*"executable":"\([^"]*transport-[^"]*\)".*/\1/p' >"$CARGO_TARGET_DIR/transport.path"
    "$here/guest.sh" prepare "$dir"
    # The link to the guest is a tap device in a network namespace of its own.
    HOLDFAST_IN_NAMESPACE=1 exec unshare --net "${BASH_SOURCE[0]}" "$dir"
fi

tests=$(tail -n 1 "$CARGO_TARGET_DIR/transport.path")
echo=$CARGO_TARGET_DIR/debug/examples/sctp_echo
ip link set lo up
ip tuntap add tap0 mode tap
ip address add 10.77.0.1/24 dev tap0
ip link set tap0 up

rm -f "$dir"/{tests,asked,served}.txt
cat >"$dir/transport-inside.sh" <<INSIDE
ip address add 10.77.0.2/24 dev vec0
ip link set vec0 up
"$tests" --test-threads 1 >/mnt/tests.txt 2>&1
timeout 90 "$echo" serve 10.77.0.2:3863 9899 >/mnt/served.txt 2>&1 &
for encapsulation in 0 9899; do
    timeout 60 "$echo" ask 10.77.0.2:0 10.77.0.1:3863 \$encapsulation
done >/mnt/asked.txt 2>&1
wait
INSIDE
"$echo" serve 10.77.0.1:3863 9899 &
server=$!
timeout 180 "$here/guest.sh" run "$dir" "$dir/transport-inside.sh" tap0 >"$dir/console.txt" 2>&1 &
guest=$!
trap 'kill $server 2>/dev/null || true; wait $guest 2>/dev/null || true' EXIT

status=0
for encapsulation in 0 9899; do
    timeout 90 "$echo" ask 10.77.0.1:0 10.77.0.2:3863 $encapsulation || status=1
done
wait $guest || true
if [[ ! -s $dir/tests.txt ]]; then
    echo "transport.sh: the guest did not start on this machine:" >&2
    tail -n 20 "$dir/console.txt" >&2
    exit 77 # skipped
fi
cat "$dir/tests.txt" "$dir/asked.txt"
grep -q '^test result: ok' "$dir/tests.txt" || status=1
[[ $(grep -c '^provider Kernel' "$dir/asked.txt") == 2 && $(grep -c 'answers' "$dir/asked.txt") == 2 ]] || status=1
exit $status
