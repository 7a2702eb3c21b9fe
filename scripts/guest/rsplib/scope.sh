# Sourced by the scenarios with several registrars: who they are, and whether they agree.
# shellcheck shell=bash

# Numbers of all registrars by name, and the names of those that run, by kind.
declare -A id_of=()
ours=()
theirs=()

# What the last look has found: the checksum that a registrar says its elements have, how many elements it knows and how many
# peers, by number; what a registrar knows of another's elements, by both numbers.
declare -A says=() elements=() peers=() sees=() linked=()

# look: asks all that run. Few processes: each costs a while in the guest.
look() {
    local what who other value rest name
    says=() elements=() peers=() sees=() linked=()
    ask_ours >/tmp/look || return 1
    for name in "${theirs[@]}"; do
        read_log "$name" >>/tmp/look
    done
    while read -r what who other value rest; do
        case $what in
        says) says[$who]=$other elements[$who]=$value peers[$who]=$rest ;;
        sees) sees[$who $other]=$value linked[$who $other]=$rest ;;
        announced) says[$who]=$other ;;
        peers) peers[$who]=$other ;;
        logged) sees[$who $other]=$((16#$value)) ;;
        esac
    done </tmp/look
}

ask_ours() {
    local name urls=(http://registrar/v1/registrar http://registrar/v1/peers)
    for name in "${ours[@]}"; do
        curl -sS --fail --max-time 10 --unix-socket "/run/$name/registrar.sock" "${urls[@]}" || return 1
    done | jq -rs 'range(0; length; 2) as $i | .[$i] as $own | .[$i + 1].peers as $peers
        | "says \($own.id) \($own.checksum) \($own.elements) \($peers | length)",
          ($peers[] | "sees \($own.id) \(.id) \(.checksum) \(.connected and .active)", "announced \(.id) \(.announced_checksum)")' |
        # What a registrar of ours says itself comes after what others heard of it.
        sort
}

# read_log NAME: what rsplib's registrar wrote last of its peers. It prints sums with their bytes as they lie in memory.
read_log() {
    tail -n 3000 "$logs/$1.log" | awk -v own="${id_of[$1]}" '
        /^PeerList of / { count = substr($4, 2) }
        /idx:#[0-9]*: \$[0-9a-f]* upd=/ {
            sub(/.*idx:#[0-9]*: \$/, "")
            id = substr($0, 1, 8)
            match($0, /chsum=\$[0-9a-f]*/)
            sum = substr($0, RSTART + 11, 4)
            last[id] = substr(sum, 3, 2) substr(sum, 1, 2)
        }
        END {
            print "peers", own, count
            for (id in last) print "logged", own, id, last[id]
        }'
}

# connected: every registrar of ours has an association with every other, and no registrar knows more.
connected() {
    local count=$((${#ours[@]} + ${#theirs[@]} - 1)) name other
    look || return 1
    for name in "${ours[@]}" "${theirs[@]}"; do
        echo "$name knows ${peers[${id_of[$name]}]} registrars"
        [[ ${peers[${id_of[$name]}]} == "$count" ]] || return 1
    done
    for name in "${ours[@]}"; do
        for other in "${ours[@]}" "${theirs[@]}"; do
            [[ $name == "$other" ]] && continue
            echo "$name has an association with $other: ${linked[${id_of[$name]} ${id_of[$other]}]}"
            [[ ${linked[${id_of[$name]} ${id_of[$other]}]} == true ]] || return 1
        done
    done
}

# synchronised COUNT: all know COUNT elements, and each one's checksum of each other's elements is what that one says.
synchronised() {
    local wanted=$1 name other own
    look || return 1
    for name in "${ours[@]}"; do
        echo "$name knows ${elements[${id_of[$name]}]} elements"
        [[ ${elements[${id_of[$name]}]} == "$wanted" ]] || return 1
    done
    for other in "${ours[@]}" "${theirs[@]}"; do
        own=${says[${id_of[$other]}]}
        echo "$other says $own"
        [[ -n $own ]] || return 1
        for name in "${ours[@]}" "${theirs[@]}"; do
            [[ $name == "$other" ]] && continue
            echo "$name of $other: ${sees[${id_of[$name]} ${id_of[$other]}]}"
            [[ ${sees[${id_of[$name]} ${id_of[$other]}]} == "$own" ]] || return 1
        done
    done
}

# homes_are REGISTRAR POOL "ELEMENT HOME"...
homes_are() {
    local registrar=$1 handle=$2 found
    shift 2
    found=$(homes "$registrar" "$handle")
    echo "$found"
    [[ $found == "$(printf '%s\n' "$@")" ]]
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
