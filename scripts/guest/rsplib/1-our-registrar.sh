# Our registrar with rsplib's elements and users.
# shellcheck shell=bash

# How long an element may hang.
patience_ms=4000

scenario() {
    host r1 1
    host e1 11
    host e2 12
    host u1 21
    our_registrar r1 1 00000001
    within 30 "our registrar serves" is_ready r1
    at_once "our registrar uses the kernel's SCTP" eval 'api r1 registrar | jq -e ".sctp == \"kernel\" and .raw"'

    rsplib_element told e1 00000011 EchoPool RoundRobin 10.0.0.1
    within 30 "rspserver registers at a configured registrar" has_elements r1 EchoPool 00000011
    rsplib_element hearing e2 00000012 EchoPool RoundRobin
    within 30 "rspserver registers at an announced registrar" has_elements r1 EchoPool 00000011 00000012
    at_once "holdfast pool list --json shows the pool" eval \
        'pool r1 list --json | jq -e ".pools == [{\"handle\": \"EchoPool\", \"policy\": \"RR\", \"elements\": 2}]"'
    within 30 "an element registers again" eval 'api r1 registrar | jq -e ".counters.reregistrations >= 2"'
    within 30 "elements answer keep-alives" eval 'api r1 registrar | jq -e ".counters.keep_alives >= 2 and .own_elements == 2"'
    at_once "rspterminal resolves the pool and gets an answer" answers u1 EchoPool 10.0.0.1 00000011 00000012
    at_once "hsdump gets our peer list and handlespace" dumped

    end told
    within 30 "a killed element is removed" has_elements r1 EchoPool 00000012
    at_once "rspterminal finds the other element" answers u1 EchoPool 10.0.0.1 00000012
    kill -STOP "${pid_of[hearing]}"
    within 30 "a hanging element is removed" has_no_pool r1 EchoPool
    kill -CONT "${pid_of[hearing]}"
    within 30 "the element registers again when it resumes" has_elements r1 EchoPool 00000012
    end hearing INT
    within 30 "an element that leaves is removed" has_no_pool r1 EchoPool
    within 10 "the element deregistered" eval 'api r1 registrar | jq -e ".counters.deregistrations == 1"'
    at_once "no message was malformed" eval 'api r1 registrar | jq -e ".counters.malformed == 0"'
}

dumped() {
    timeout 30 ip netns exec u1 hsdump 10.0.0.1:9901 -logcolor=off >"$logs/hsdump.log" 2>&1
    cat "$logs/hsdump.log"
    grep -q 'now having 1 pools, 2 PEs' "$logs/hsdump.log"
}
