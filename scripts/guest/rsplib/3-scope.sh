# One scope with two registrars of each kind. Their numbers alternate, so that each kind wins a race for a takeover.
# shellcheck shell=bash
# shellcheck source=scripts/guest/rsplib/scope.sh
source "$here/scope.sh"

# rsplib forgets an element of another registrar when its life is over: three re-registrations.
reregistration_ms=12000

declare -A number_of=([r1]=1 [p1]=2 [r2]=3 [p2]=4)
id_of=([r1]=00000001 [p1]=00000002 [r2]=00000003 [p2]=00000004)

run_registrar() {
    case $1 in
    r*) our_registrar "$1" "${number_of[$1]}" "${id_of[$1]}" ;;
    p*) rsplib_registrar "$1" "${number_of[$1]}" "${id_of[$1]}" ;;
    esac
}

# element_of REGISTRAR: an element that knows this registrar alone.
element_of() { rsplib_element "e-$1" "e${number_of[$1]}" "0000001${number_of[$1]}" EchoPool RoundRobin "10.0.0.${number_of[$1]}"; }

scenario() {
    local name
    for name in r1 p1 r2 p2; do
        host "$name" "${number_of[$name]}"
        host "e${number_of[$name]}" "1${number_of[$name]}"
    done
    host u1 21
    start_scope
    an_element_dies
    their_registrar_dies
    our_registrar_dies
    only_theirs_are_left
    at_once "no message was malformed" healthy
}

start_scope() {
    local name
    ours=(r1 r2)
    theirs=(p1 p2)
    run_registrar r1
    within 30 "our first registrar serves" is_ready r1
    for name in p1 r2 p2; do
        run_registrar "$name"
    done
    within 60 "four registrars find each other" connected
    for name in r1 p1 r2 p2; do
        element_of "$name"
    done
    within 60 "an element registers at each" homes_are r1 EchoPool "00000011 00000001" "00000012 00000002" "00000013 00000003" "00000014 00000004"
    within 60 "all checksums are equal" synchronised 4
    at_once "a user finds an element at rsplib's registrar" answers u1 EchoPool 10.0.0.4 00000011 00000012 00000013 00000014
    at_once "a user finds an element at ours" answers u1 EchoPool 10.0.0.3 00000011 00000012 00000013 00000014
}

an_element_dies() {
    end e-r1
    within 60 "an element of ours died, all checksums are equal" synchronised 3
    end e-p1
    within 60 "an element of rsplib's died, all checksums are equal" synchronised 2
    element_of r1
    element_of p1
    within 60 "the elements return, all checksums are equal" synchronised 4
}

their_registrar_dies() {
    theirs=(p2)
    end p1
    within 60 "rsplib's registrar died, its element is taken over" taken_over r1 EchoPool 00000012 00000001 00000003 00000004
    within 60 "all checksums are equal" synchronised 4
    at_once "a user finds an element at rsplib's other registrar" answers u1 EchoPool 10.0.0.4 00000011 00000012 00000013 00000014
    run_registrar p1
    theirs=(p1 p2)
    within 60 "the registrar returns" connected
    within 60 "all checksums are equal" synchronised 4
}

our_registrar_dies() {
    ours=(r2)
    end r1
    within 60 "our registrar died, its element is taken over" taken_over r2 EchoPool 00000011 00000002 00000003 00000004
    within 60 "all checksums are equal" synchronised 4
    run_registrar r1
    ours=(r1 r2)
    within 60 "the registrar returns" connected
    within 60 "all checksums are equal" synchronised 4
}

takeovers_of_r1() { cat "$logs"/p?.log | grep -ac "Takeover of peer \$${id_of[r1]} completed"; }

only_theirs_are_left() {
    ours=(r1)
    end r2
    within 60 "our second registrar died, all checksums are equal" synchronised 4
    within 60 "rsplib has removed it from its peers" connected
    local before
    before=$(takeovers_of_r1)
    end r1
    within 60 "our first registrar died, rsplib takes its elements over" eval "((\$(takeovers_of_r1) > $before))"
    at_once "a user finds an element at rsplib's registrar" answers u1 EchoPool 10.0.0.2 00000011 00000012 00000013 00000014
    run_registrar r1
    run_registrar r2
    ours=(r1 r2)
    within 60 "our registrars return" connected
    within 60 "no element was lost, all checksums are equal" synchronised 4
}
