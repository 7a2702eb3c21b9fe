# SCTP inside UDP (RFC 6951): registrars of both kinds, elements, and a user.
# shellcheck shell=bash
# shellcheck source=scripts/guest/rsplib/scope.sh
source "$here/scope.sh"

scenario() {
    id_of=([r1]=00000001 [p1]=00000002)
    ours=(r1)
    theirs=(p1)
    host r1 1 9899
    host p1 2 9899
    host e1 11 9899
    host e2 12 9899
    host u1 21 9899
    our_registrar r1 1 00000001 "remote_encapsulation_port = 9899"
    within 30 "our registrar serves" is_ready r1
    at_once "our registrar uses its UDP port" eval 'api r1 registrar | jq -e ".encapsulation_port == 9899"'
    rsplib_registrar p1 2 00000002
    within 60 "rsplib's registrar is connected" connected
    rsplib_element e1 e1 00000011 EchoPool RoundRobin 10.0.0.1
    rsplib_element e2 e2 00000012 EchoPool RoundRobin 10.0.0.2
    within 60 "an element registers at each" homes_are r1 EchoPool "00000011 00000001" "00000012 00000002"
    within 60 "all checksums are equal" synchronised 2
    at_once "a user finds an element at ours" answers u1 EchoPool 10.0.0.1 00000011 00000012
    at_once "a user finds an element at rsplib's" answers u1 EchoPool 10.0.0.2 00000011 00000012
    theirs=()
    end p1
    within 60 "rsplib's registrar died, its element is taken over" homes_are r1 EchoPool "00000011 00000001" "00000012 00000001"
    end e1
    within 60 "an element died" has_elements r1 EchoPool 00000012
    end capture TERM
    at_once "no packets directly over IP, many inside UDP" inside_udp
    at_once "no message was malformed" healthy
}

inside_udp() {
    local raw udp
    raw=$(tcpdump -nr "$logs/traffic.pcap" 'ip proto 132' | wc -l)
    udp=$(tcpdump -nr "$logs/traffic.pcap" 'udp port 9899' | wc -l)
    echo "$raw packets over IP, $udp inside UDP"
    ((raw == 0 && udp > 100))
}
