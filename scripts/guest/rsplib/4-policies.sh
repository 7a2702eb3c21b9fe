# Policies of rsplib's elements: one element of each pool at our registrar, one at rsplib's; with LU-DPF both at ours.
# shellcheck shell=bash
# shellcheck source=scripts/guest/rsplib/scope.sh
source "$here/scope.sh"

# What selections add up begins anew with each re-registration.
reregistration_ms=600000

# Our name, what the element at ours says, what the one at rsplib's says.
policies=(
    "RR RoundRobin RoundRobin"
    "WRR WeightedRoundRobin:3 WeightedRoundRobin:1"
    "RAND Random Random"
    "WRAND WeightedRandom:3 WeightedRandom:1"
    "LU LeastUsed LeastUsed"
    "LUD LeastUsedDegradation:0.1 LeastUsedDegradation:0.9"
    "PLU PriorityLeastUsed:0.1 PriorityLeastUsed:0.9"
    "RLU RandomizedLeastUsed RandomizedLeastUsed"
    "LU-DPF LeastUsedDPF:0.005 LeastUsedDPF:0.005"
)

scenario() {
    local line
    id_of=([r1]=00000001 [p1]=00000002)
    ours=(r1)
    theirs=(p1)
    host r1 1
    host p1 2
    host near 11
    host far 12
    host u1 21
    # The guest's kernel counts in 10 ms, and a round trip that it once took for 70 ms, as when its clock catches up, stays that. So
    # half of that is nothing yet, and the far element is farther.
    tc -n far qdisc add dev eth0 root netem delay 400ms
    our_registrar r1 1 00000001 "distance_step_ms = 100"
    within 30 "our registrar serves" is_ready r1
    rsplib_registrar p1 2 00000002
    within 60 "rsplib's registrar is connected" connected
    begin_elements
    within 120 "both registrars know all elements" synchronised $((2 * ${#policies[@]}))
    for line in "${policies[@]}"; do
        # shellcheck disable=SC2086
        set -- $line
        at_once "$1: our registrar knows the pool" eval "pool r1 list --json | jq -e --arg name $1 'any(.pools[]; .handle == \$name and .policy == \$name and .elements == 2)'"
        at_once "$1: a user finds an element at rsplib's registrar" answers u1 "$1" 10.0.0.2 "$(near_of "$1")" "$(far_of "$1")"
    done
    selections
    at_once "no message was malformed" healthy
}

index_of() {
    local i
    for i in "${!policies[@]}"; do
        [[ ${policies[$i]%% *} == "$1" ]] && echo "$i"
    done
}
near_of() { printf '%08x' $((0x100 + $(index_of "$1"))); }
far_of() { printf '%08x' $((0x200 + $(index_of "$1"))); }

begin_elements() {
    local line registrar=10.0.0.2
    for line in "${policies[@]}"; do
        # shellcheck disable=SC2086
        set -- $line
        # What rsplib measures has the wrong unit: see docs/rsplib.md.
        [[ $1 == LU-DPF ]] && registrar=10.0.0.1
        rsplib_element "near-$1" near "$(near_of "$1")" "$1" "$2" 10.0.0.1
        rsplib_element "far-$1" far "$(far_of "$1")" "$1" "$3" "$registrar"
    done
}

# picks POOL COUNT REGISTRAR: so many users ask it one after the other; prints how many came to the near and the far element.
picks() {
    local near=0 far=0 i id
    for ((i = 0; i < $2; i++)); do
        id=$(ask u1 "$1" "$3")
        case $id in
        "$(near_of "$1")") near=$((near + 1)) ;;
        "$(far_of "$1")") far=$((far + 1)) ;;
        *) echo "no answer" && return ;;
        esac
    done
    echo "$near $far"
}

# picked POOL COUNT "NEAR FAR" [REGISTRAR]
picked() {
    local got
    got=$(picks "$1" "$2" "${4:-10.0.0.1}")
    echo "$1: $got of $2 (near far)"
    [[ $got == "$3" ]]
}

# both POOL COUNT: both elements are chosen before so many users have asked.
both() {
    local seen='' i
    for ((i = 0; i < $2; i++)); do
        seen+=" $(ask u1 "$1" 10.0.0.1)"
        [[ $seen == *"$(near_of "$1")"* && $seen == *"$(far_of "$1")"* ]] && return
    done
    echo "$1: $seen"
    return 1
}

# distances LIST: those of the near and the far element in milliseconds, rounded to the registrar's step: the table has them as they
# were measured, and a busy guest measures some milliseconds more.
distances() {
    local answer
    answer=$(api r1 pools/LU-DPF)
    echo "$answer"
    [[ $(jq -c '[.elements[].policy.distance_ms | (. / 100 | round) * 100]' <<<"$answer") == "$1" ]]
}

selections() {
    at_once "RR takes turns" picked RR 4 "2 2"
    at_once "WRR takes turns by weight" picked WRR 8 "6 2"
    at_once "RAND chooses both" both RAND 40
    at_once "WRAND chooses both" both WRAND 80
    at_once "LU takes turns among equally used ones" picked LU 4 "2 2"
    at_once "LUD adds the load of a session" picked LUD 6 "5 1"
    at_once "PLU anticipates the load of a session" picked PLU 4 "4 0"
    at_once "RLU chooses both" both RLU 40
    within 60 "LU-DPF: the far element's distance is known" distances "[0,200]"
    at_once "LU-DPF chooses the near element" picked LU-DPF 4 "4 0"
    at_once "rsplib's registrar chooses the near element by our registrar's distance" picked LU-DPF 4 "4 0" 10.0.0.2
}
