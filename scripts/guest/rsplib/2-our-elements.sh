# rsplib's registrars with elements and users of ours.
# shellcheck shell=bash

# Ours register with these, one pool each; what a resolution then says of the element.
figures=(
    'RR|--policy RR|{"name":"RR"}'
    'WRR|--policy WRR --weight 3|{"name":"WRR","weight":3}'
    'RAND|--policy RAND|{"name":"RAND"}'
    'WRAND|--policy WRAND --weight 5|{"name":"WRAND","weight":5}'
    'LU|--policy LU --load 0.25|{"name":"LU","load":25}'
    'LUD|--policy LUD --load 0.25 --load-degradation 0.1|{"name":"LUD","load":25,"degradation":10}'
    'PLU|--policy PLU --load 0.5 --load-degradation 0.1|{"name":"PLU","load":50,"degradation":10}'
    'RLU|--policy RLU --load 0.75|{"name":"RLU","load":75}'
    'LU-DPF|--policy LU-DPF --load 0.25 --load-dpf 0.01|{"name":"LU-DPF","load":25,"delay_penalty":1,"distance_ms":0}'
)

scenario() {
    host p1 2
    host p2 4
    host e1 11
    host e2 12
    host u1 21
    rsplib_registrar p1 2 00000002
    within 60 "rsplib's registrar serves" grep -q 'registrar is ready' "$logs/p1.log"
    rsplib_registrar p2 4 00000004
    within 60 "rsplib's second registrar serves" grep -q 'registrar is ready' "$logs/p2.log"
    our_element
    our_user
    policies
    registrars_die
    elements_end
}

# ours NAME POOL OPTION... -- PROGRAM...: an element at both registrars.
ours() {
    local name=$1 pool=$2
    shift 2
    start "$name" e1 holdfast pool register --handle "$pool" --registrar 10.0.0.2 --registrar 10.0.0.4 "$@"
}

# resolve POOL NUMBER_OF_REGISTRAR
resolve() { timeout 30 ip netns exec u1 holdfast pool resolve "$1" --registrar "10.0.0.$2" --json; }

# resolves POOL NUMBER FILTER: true of the answer.
resolves() { resolve "$1" "$2" | tee /dev/stderr | jq -e "$3"; }

# unknown POOL NUMBER: the registrar answers that there is no such pool.
unknown() { ! resolve "$1" "$2" && grep -qi "$1" "$logs/last-check.txt"; }

our_element() {
    ours echo OurPool --transport sctp --port 7777 -- sctp_echo serve 10.0.0.11:7777 9899
    local there='.elements | length == 1 and .[0].transport == "sctp" and .[0].addresses == ["10.0.0.11:7777"]'
    within 60 "our element registers, our user resolves it" resolves OurPool 2 "$there"
    within 60 "our user resolves it at rsplib's other registrar" resolves OurPool 4 "$there"
    element=$(resolve OurPool 2 | jq -r '.elements[0].id')
    within 60 "our element answers keep-alives" grep -qa "Got EndpointKeepAliveAck for pool element \$$element" "$logs"/p[12].log
    within 60 "rspterminal gets an answer from our element" answers u1 OurPool 10.0.0.2 "$element"
}

our_user() {
    rsplib_element first e2 00000021 EchoPool RoundRobin 10.0.0.2
    rsplib_element second e2 00000022 EchoPool RoundRobin 10.0.0.2
    within 60 "our user resolves rspserver's pool" resolves EchoPool 2 \
        '.policy == "RR" and (.elements | length == 1) and .elements[0].transport == "sctp"'
    within 60 "holdfast pool connect gets an answer from rspserver" talks
    goes_on
}

talks() {
    echo hello | timeout 60 ip netns exec u1 holdfast pool connect EchoPool --registrar 10.0.0.2 --linger 5 | tee /dev/stderr | grep -qx hello
}

# A session that goes on at the other element when its own is killed.
goes_on() {
    local words=/tmp/session
    mkfifo $words
    ip netns exec u1 holdfast pool connect EchoPool --registrar 10.0.0.2 <$words >"$logs/session.log" 2>"$logs/session-err.log" &
    pid_of[session]=$!
    exec 8>$words
    echo one >&8
    within 60 "a session begins" grep -qx one "$logs/session.log"
    # Whichever it is at, it is at the other one in the end.
    end first
    echo two >&8
    within 60 "the session continues after one element is killed" grep -qx two "$logs/session.log"
    rsplib_element third e2 00000023 EchoPool RoundRobin 10.0.0.2
    within 60 "another element registers" grep -qa 'Successfully registered EchoPool/$00000023' "$logs/p1.log"
    end second
    echo three >&8
    within 60 "the session continues after the other element is killed" grep -qx three "$logs/session.log"
    exec 8>&-
}

policies() {
    local line name options wanted
    for line in "${figures[@]}"; do
        IFS='|' read -r name options wanted <<<"$line"
        # shellcheck disable=SC2086
        ours "own-$name" "$name" $options --transport udp --port 5000 --address 10.0.0.11 -- sleep 1000
    done
    for line in "${figures[@]}"; do
        IFS='|' read -r name options wanted <<<"$line"
        # Shares in percent: their 32 bits are no round numbers.
        within 60 "$name: rsplib's registrar takes our element and gives it back" resolves "$name" 4 \
            ".policy == \"$name\" and ([.elements[].policy | with_entries(select(.value != null))
            | (.load, .degradation, .delay_penalty | select(. != null)) |= (. * 1000 | round / 10)] == [$wanted])"
    done
    echo 10 >/tmp/load
    ours changing Changing --policy LU --load 'cmd:cat /tmp/load' --every 0.5 --transport udp --port 5000 --address 10.0.0.11 -- sleep 1000
    within 60 "the load is reported" resolves Changing 2 '.elements[0].policy.load * 100 | round == 10'
    echo 60 >/tmp/load
    within 60 "a changed load is reported" resolves Changing 2 '.elements[0].policy.load * 100 | round == 60'
}

registrars_die() {
    end p1
    within 60 "rsplib's registrar died, ours are still known" resolves OurPool 4 '.elements | length == 1'
    within 60 "our element's home is the other registrar" grep -qa "Successfully registered OurPool/\$$element" "$logs/p2.log"
    rsplib_registrar p1 2 00000002
    within 60 "the registrar returns and knows our element" resolves OurPool 2 '.elements | length == 1'
}

elements_end() {
    end own-RR TERM
    within 60 "our element that leaves is removed" unknown RR 4
    at_once "our element deregistered" grep -ahE 'Deregistration request for RR/' "$logs"/p1.log "$logs"/p2.log
    end echo
    within 60 "our killed element is removed" unknown OurPool 4
}
