# Sourced by the scenarios with several registrars: who they are, and whether they agree.
# shellcheck shell=bash

# Numbers of all registrars by name, and the names of those that run, by kind.
declare -A id_of=()
ours=()
theirs=()

# checksum_of NAME: what the registrar itself says of its elements.
checksum_of() {
    local name=$1 one
    if [[ " ${ours[*]} " == *" $name "* ]]; then
        api "$name" registrar | jq .checksum
    else
        one=${ours[0]}
        api "$one" peers | jq --arg id "${id_of[$name]}" '.peers[] | select(.id == $id) | .announced_checksum'
    fi
}

# rsplib_peers NAME: how many peers it has.
rsplib_peers() { sed -n 's/^PeerList of .* (\([0-9]*\) peers).*/\1/p' "$logs/$1.log" | tail -n 1; }

# rsplib_checksum NAME PEER: what it knows of the peer's elements. It prints the sum with its bytes as they lie in memory.
rsplib_checksum() {
    local line
    line=$(grep -a "#[0-9]*: \$${id_of[$2]} upd=" "$logs/$1.log" | tail -n 1)
    line=${line#*chsum=\$}
    [[ -n $line ]] && echo $((16#${line:6:2}${line:4:2}))
}

# connected: every registrar of ours has an association with every other, and rsplib's know as many peers.
connected() {
    local count=$((${#ours[@]} + ${#theirs[@]} - 1)) name
    for name in "${ours[@]}"; do
        api "$name" peers | jq -e --argjson count "$count" \
            '[.peers[] | select(.connected and .active)] | length == $count' || return 1
        [[ $(api "$name" peers | jq '.peers | length') == "$count" ]] || return 1
    done
    for name in "${theirs[@]}"; do
        echo "$name: $(rsplib_peers "$name") peers"
        [[ $(rsplib_peers "$name") == "$count" ]] || return 1
    done
}

# synchronised COUNT: all know COUNT elements, and each one's checksum of each other's elements is what that one says.
synchronised() {
    local wanted=$1 name other own
    for name in "${ours[@]}"; do
        echo "$name knows $(api "$name" registrar | jq .elements) elements"
        [[ $(api "$name" registrar | jq .elements) == "$wanted" ]] || return 1
    done
    for other in "${ours[@]}" "${theirs[@]}"; do
        own=$(checksum_of "$other")
        echo "$other says $own"
        for name in "${ours[@]}"; do
            [[ $name == "$other" ]] || agrees_ours "$name" "$other" "$own" || return 1
        done
        for name in "${theirs[@]}"; do
            [[ $name == "$other" ]] && continue
            echo "$name of $other: $(rsplib_checksum "$name" "$other")"
            [[ $(rsplib_checksum "$name" "$other") == "$own" ]] || return 1
        done
    done
}

agrees_ours() {
    local name=$1 other=$2 own=$3 seen
    seen=$(api "$name" peers | jq --arg id "${id_of[$other]}" '.peers[] | select(.id == $id) | .checksum')
    echo "$name of $other: $seen"
    [[ $seen == "$own" ]]
}

# homes_are REGISTRAR POOL "ELEMENT HOME"...
homes_are() {
    local registrar=$1 handle=$2
    shift 2
    homes "$registrar" "$handle"
    [[ $(homes "$registrar" "$handle") == "$(printf '%s\n' "$@")" ]]
}

# taken_over REGISTRAR POOL ELEMENT ID...: the element has one of these homes.
taken_over() {
    local registrar=$1 handle=$2 element=$3 home
    shift 3
    home=$(homes "$registrar" "$handle" | sed -n "s/^$element //p")
    echo "$element: ${home:-gone}"
    [[ -n $home && " $* " == *" $home "* ]]
}

# healthy: none of ours met a message it could not read, and rsplib's complained of none.
healthy() {
    local name
    for name in "${ours[@]}"; do
        api "$name" registrar | jq -e '.counters.malformed == 0' || return 1
    done
    ! grep -a -A3 -E 'Sending (ASAP|ENRP) Error message|unsupported message type' "$logs"/*.log
}
