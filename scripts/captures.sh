#!/usr/bin/env bash
# Our own traffic under other eyes: tests that speak SCTP run in a network namespace of their own under tcpdump, and tshark
# reads what they said.
#
#   captures.sh run PROGRAM ARGUMENTS...   what cargo runs a test program by: captures it if it is one of those below and
#                                          HOLDFAST_CAPTURES names a folder
#   captures.sh check FOLDER               fails unless the captures there have ASAP and ENRP messages, and nothing malformed
set -euo pipefail

# Package folder and test program. Others speak no SCTP, or speak nonsense on purpose.
captured=(node/registrar node/pool)
# Seconds until the capture has to have begun.
patience=60
# `_ws.expert.severity` of an error; notes tell of retransmissions.
severity_error=8388608
# SCTP is inside UDP at any port but those of the announces.
decode=(-d udp.port==1-3862,sctp -d udp.port==3864-9900,sctp -d udp.port==9902-65535,sctp)

run() {
    local program=$1 name
    name=$(basename "$program")
    # Cargo adds a hyphen and a hash.
    name=$(basename "$PWD")/${name%-*}
    if [[ -z ${HOLDFAST_CAPTURES:-} || " ${captured[*]} " != *" $name "* ]]; then
        exec "$@"
    fi
    exec unshare --net "$0" inside "$HOLDFAST_CAPTURES/${name//\//-}.pcap" "$@"
}

inside() {
    local file=$1 capture status=0 begun=$SECONDS
    shift
    ip link set lo up
    # The kernel would show dozens of packets as one.
    ethtool -K lo tx-udp-segmentation off
    tcpdump -i lo -U -B 65536 -Z root -w "$file" 'udp or ip proto 132 or ip6 proto 132' &
    capture=$!
    until [[ -s $file ]]; do
        if ! kill -0 "$capture" || ((SECONDS - begun > patience)); then
            echo "captures: tcpdump does not begin" >&2
            exit 1
        fi
        sleep 0.1
    done
    "$@" || status=$?
    # Time for what is still in its buffer.
    sleep 1
    kill -INT "$capture"
    wait "$capture" || status=1
    exit "$status"
}

check() {
    local folder=$1 file
    local files=("$folder"/*.pcap)
    if [[ ! -e ${files[0]} ]]; then
        echo "captures: there is none in $folder" >&2
        exit 1
    fi
    for file in "${files[@]}"; do
        tshark -n -o sctp.checksum:CRC-32C "${decode[@]}" -r "$file" -T fields -E separator=/t \
            -e frame.number -e asap.message_type -e enrp.message_type \
            -e _ws.malformed -e _ws.expert.severity -e _ws.expert.message |
            sed "s|^|$(basename "$file")\t|"
    done | awk -F '\t' -v error="$severity_error" '
        function count(list, parts) { return list == "" ? 0 : split(list, parts, ",") }
        {
            packets++
            asap += count($3)
            enrp += count($4)
            bad = $5 != ""
            for (i = split($6, severities, ","); i > 0; i--) {
                if (severities[i] + 0 >= error) bad = 1
            }
            if (bad) {
                if (++malformed <= 20) printf "captures: %s, packet %s: %s %s\n", $1, $2, $5, $7
            }
        }
        END {
            printf "captures: %d packets, %d ASAP and %d ENRP messages, %d packets malformed\n", packets, asap, enrp, malformed
            exit !(asap > 0 && enrp > 0 && malformed == 0)
        }'
}

command=$1
shift
case $command in
    run | inside | check) "$command" "$@" ;;
    *)
        echo "captures.sh: no command $command" >&2
        exit 2
        ;;
esac
