# Both registrars, one after the other, under the same generator.
# shellcheck shell=bash

scenario() {
    host r1 1
    host p1 2
    host g1 21
    # Nothing but the registrar is to be measured.
    end capture
    our_log=warn our_items=3 interval_ms=300000
    our_registrar r1 1 00000001
    within 60 "our registrar serves" is_ready r1
    generate ours 1 "${pid_of[r1]}"
    end r1 TERM
    rsplib_registrar p1 2 00000002 -maxhresitems=3 -loglevel=3
    within 60 "rsplib's registrar serves" grep -q 'registrar is ready' "$logs/p1.log"
    generate rsplib 2 "${pid_of[p1]}"
    for load in elements users; do
        at_once "$load: an operation costs ours at most half of what it costs rsplib's" compare "$load"
    done
}

# generate NAME NUMBER PID
generate() {
    ip netns exec g1 holdfast bench registrar --external "10.0.0.$2:3863" --pid "$3" --load reregistrations,resolutions \
        --associations 64 --divide 5 --milliseconds 4000 --rounds 3 --json "$logs/$1.json" 2>&1 | sed "s/^/$1: /"
    [[ -s $logs/$1.json ]] || failed "the generator at $1's registrar"
}

# cost NAME LOAD: nanoseconds of the registrar's processor for an operation.
cost() {
    local count=reregistrations_per_s
    [[ $2 == users ]] && count=resolutions_per_s
    jq --arg count "$count" '[.rows[] | select(.[$count] > 0) | .cpu_ns_per_operation] | first | round' "$logs/$1.json"
}

compare() {
    local ours theirs
    ours=$(cost ours "$1")
    theirs=$(cost rsplib "$1")
    echo "$1: $ours ns an operation, rsplib's $theirs ns: $(awk -v a="$ours" -v b="$theirs" 'BEGIN { printf "%.2f", a / b }') of it" | tee -a /mnt/rsplib.txt
    ((2 * ours <= theirs))
}
