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
# shellcheck source=scripts/guest/rsplib/host.sh
source "$here/rsplib/host.sh"
# As other builds of the workspace, whose libraries have the features of its tests.
(cd "$root" && cargo build --locked --workspace --bins --example sctp_echo)
prepare_guest "$dir" debug holdfast rserpoold examples/sctp_echo
dir=$(cd "$dir" && pwd)
scenarios=("$@")
((${#scenarios[@]})) || for file in "$here"/rsplib/[0-9]*.sh; do scenarios+=("$(basename "$file" .sh)"); done
status=0
run_scenarios "$dir" 900 "${scenarios[@]}" || status=$?
((status != 77)) || exit 77

# A second opinion on every packet of every scenario. Programs' own data, which name no protocol, are whatever tshark takes their
# ports for.
malformed=0
for capture in "$dir"/rsplib-logs/*/traffic.pcap; do
    spoken=$(tshark -r "$capture" -Y 'asap or enrp' 2>/dev/null | wc -l)
    wrong=$(tshark -r "$capture" -Y '_ws.malformed and not sctp.data_payload_proto_id == 0' 2>/dev/null)
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
((status == 0 && !malformed))
