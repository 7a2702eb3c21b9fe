#!/usr/bin/env bash
# Our own traffic under other eyes: tests that speak SCTP run in a network namespace of their own under tcpdump, or in a lab
# whose hosts are captured (crates/testbed/src/process_lab/captures.rs), and tshark reads what they said.
#
#   captures.sh run PROGRAM ARGUMENTS...   what cargo runs a test program by: captures it if it is one of those below and
#                                          HOLDFAST_CAPTURES names a folder
#   captures.sh check FOLDER               fails unless there are captures of all of them with SCTP and ASAP, of some with ENRP,
#                                          and nothing malformed
set -euo pipefail

# Package folder and test program. Others speak no SCTP, or speak nonsense on purpose.
captured=(rserpoold/registrar rserpoold/pool bench/registrar)
# The same, in labs.
labs=(bench/sessions bench/pool_commands bench/pool_distances)
# Seconds until the capture has to have begun.
patience=60
# `_ws.expert.severity` of an error; notes tell of retransmissions.
severity_error=8388608
# SCTP is inside UDP at any port but those of the announces; in labs at its own.
decode=(-d udp.port==1-3862,sctp -d udp.port==3864-9900,sctp -d udp.port==9902-65535,sctp)
decode_lab=(-d udp.port==9899,sctp)

run() {
    local program=$1 name
    name=$(basename "$program")
    # Cargo adds a hyphen and a hash.
    name=$(basename "$PWD")/${name%-*}
    # Tests are listed without any traffic.
    if [[ -z ${HOLDFAST_CAPTURES:-} || " $* " == *" --list "* ]]; then
        exec "$@"
    elif [[ " ${labs[*]} " == *" $name "* ]]; then
        HOLDFAST_CAPTURE=${name//\//-} exec "$@"
    elif [[ " ${captured[*]} " == *" $name "* ]]; then
        # Each test has a process and a capture of its own. Its name is the one argument that is no option.
        local test=all argument
        for argument in "${@:2}"; do
            [[ $argument == -* ]] || test=$argument
        done
        exec unshare --net "$0" inside "$HOLDFAST_CAPTURES/${name//\//-}%${test//[^a-z0-9_]/-}.pcap" "$@"
    fi
    exec "$@"
}

inside() {
    local file=$1 capture status=0 begun=$SECONDS
    shift
    ip link set lo up
    # The kernel would show dozens of packets as one.
    ethtool -K lo tx-udp-segmentation off
    tcpdump -i lo --immediate-mode -U -B 65536 -Z root -w "$file" 'udp or ip proto 132 or ip6 proto 132' &
    capture=$!
    until [[ -s $file ]]; do
        if ! kill -0 "$capture" || ((SECONDS - begun > patience)); then
            echo "captures: tcpdump does not start" >&2
            exit 1
        fi
        sleep 0.1
    done
    "$@" || status=$?
    # Time for what is still in its buffer.
    sleep 0.3
    kill -INT "$capture"
    wait "$capture" || status=1
    exit "$status"
}

check() {
    local folder=$1 file
    local names=("${captured[@]}" "${labs[@]}")
    for file in "$folder"/*.pcap; do
        # Called NAME%TEST.pcap, and in a lab NAME@LAB.HOST.pcap.
        local ports=("${decode[@]}")
        [[ $file == *@* ]] && ports=("${decode_lab[@]}")
        [[ -e $file ]] || continue
        tshark -n -o sctp.checksum:CRC-32C "${ports[@]}" -r "$file" -T fields -E separator=/t \
            -e frame.number -e asap.message_type -e enrp.message_type \
            -e _ws.malformed -e _ws.expert.severity -e _ws.expert.message -e sctp.verification_tag \
            -e sctp.data_payload_proto_id |
            sed "s|^|$(basename "$file" .pcap)\t|"
    done | awk -F '\t' -v error="$severity_error" -v names="${names[*]//\//-}" '
        function count(list, parts) { return list == "" ? 0 : split(list, parts, ",") }
        {
            name = $1
            sub(/[@%].*/, "", name)
            packets++
            sctp[name] += $8 != ""
            asap[name] += count($3)
            asap_all += count($3)
            enrp += count($4)
            bad = $5 != ""
            for (i = split($6, severities, ","); i > 0; i--) {
                if (severities[i] + 0 >= error) bad = 1
            }
            # Data of programs, which name no protocol, are whatever tshark takes their ports for.
            if ($5 != "" && $5 !~ /SCTP|ASAP|ENRP/ && $9 ~ /(^|,)0(,|$)/ && $3 == "" && $4 == "") bad = 0
            if (bad) {
                if (++malformed <= 20) printf "captures: %s, packet %s: %s %s\n", $1, $2, $5, $7
            }
        }
        END {
            for (i = split(names, all, " "); i > 0; i--) {
                if (!sctp[all[i]] || !asap[all[i]]) {
                    printf "captures: no SCTP packets with ASAP messages in the captures of %s\n", all[i]
                    missing++
                }
            }
            printf "captures: %d packets, %d ASAP and %d ENRP messages, %d packets malformed\n", packets, asap_all, enrp, malformed
            exit !(enrp > 0 && malformed == 0 && missing == 0)
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
