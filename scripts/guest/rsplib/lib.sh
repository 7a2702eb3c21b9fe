# Sourced in the guest: hosts, programs, checks. A scenario is a file with a function `scenario`; its first failed check ends
# it. What it starts is ended after it, its logs stay.
# shellcheck shell=bash

passed_file=/tmp/passed failed_file=/tmp/failed
: >$passed_file
: >$failed_file

make_bridge() {
    ip link add br0 type bridge
    # Announces go to every host without anybody having asked.
    echo 0 >/sys/class/net/br0/bridge/multicast_snooping
    ip link set br0 up
}

# run_scenario NAME
run_scenario() {
    local name=$1 since=$SECONDS
    scenario_name=$name
    logs=$logs_root/$name
    mkdir -p "$logs"
    echo "== $name"
    (
        trap end_all EXIT
        # shellcheck disable=SC1090
        source "$here/$name.sh"
        capture
        scenario
    ) || {
        echo "$name" >>$failed_file
        tails
    }
    echo "   $name took $((SECONDS - since)) s"
}

result() {
    local passed failed word=ok
    passed=$(wc -l <$passed_file)
    failed=$(wc -l <$failed_file)
    ((failed)) && word=FAILED
    echo "test result: $word. $passed passed; $failed failed; rsplib interoperation"
}

declare -A pid_of=()
hosts=()

# All packets of a scenario, for a second opinion on what they say (../rsplib.sh).
capture() {
    tcpdump -i br0 -U -w "$logs/traffic.pcap" '(udp port 9899) or (ip proto 132)' 2>"$logs/tcpdump.log" &
    pid_of[capture]=$!
    until grep -q 'listening on' "$logs/tcpdump.log"; do
        kill -0 "$!" || failed "tcpdump starts"
        sleep 0.05
    done
}

end_all() {
    local name
    for name in "${!pid_of[@]}"; do
        kill -CONT "${pid_of[$name]}" 2>/dev/null
        kill -KILL "${pid_of[$name]}" 2>/dev/null
        wait "${pid_of[$name]}" 2>/dev/null
    done
    for name in "${hosts[@]}"; do
        # The link at once: the next scenario has one of the same name, and a namespace takes its time.
        ip link delete "v$name"
        ip netns delete "$name"
    done
}

tails() {
    local file
    for file in "$logs"/[rp][0-9].log; do
        echo "---- the end of ${file##*/}"
        tail -n 8 "$file"
    done
}

# host NAME NUMBER [UDP_PORT]: a network namespace with 10.0.0.NUMBER. With a port, all SCTP goes inside UDP.
host() {
    local name=$1 number=$2 port=${3:-}
    ip netns add "$name"
    hosts+=("$name")
    ip link add "v$name" type veth peer name eth0 netns "$name"
    ip link set "v$name" master br0 up
    ip -n "$name" link set lo up
    ip -n "$name" address add "10.0.0.$number/24" dev eth0
    ip -n "$name" link set eth0 up
    ip -n "$name" route add 224.0.0.0/4 dev eth0
    in_host "$name" sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.sctp.cookie_hmac_alg=none
    [[ -z $port ]] || in_host "$name" sysctl -qw "net.sctp.udp_port=$port" "net.sctp.encap_port=$port"
}

in_host() { ip netns exec "$@"; }

# start NAME HOST PROGRAM...
start() {
    local name=$1 host=$2
    shift 2
    ip netns exec "$host" "$@" >>"$logs/$name.log" 2>&1 </dev/null &
    pid_of[$name]=$!
}

# end NAME [SIGNAL]: and it is over when this returns.
end() {
    local pid=${pid_of[$1]}
    unset "pid_of[$1]"
    kill "-${2:-KILL}" "$pid"
    wait "$pid" 2>/dev/null
    return 0
}

ok() {
    echo "test $scenario_name: $* ... ok"
    echo "$*" >>$passed_file
}

failed() {
    echo "test $scenario_name: $* ... FAILED"
    exit 1
}

# within SECONDS WHAT CHECK...: the check holds before the time is over.
within() {
    local limit=$1 what=$2 until=$((SECONDS + $1)) since=$EPOCHREALTIME
    shift 2
    until "$@" >"$logs/last-check.txt" 2>&1; do
        if ((SECONDS >= until)); then
            echo "     not within $limit s: $*"
            sed 's/^/     /' "$logs/last-check.txt" | tail -n 40
            failed "$what"
        fi
        sleep 0.1
    done
    ok "$what ($(seconds_since "$since"))"
}

seconds_since() { awk -v a="$1" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f s", b - a }'; }

# at_once WHAT CHECK...: it holds now.
at_once() {
    local what=$1 since=$EPOCHREALTIME
    shift
    "$@" >"$logs/last-check.txt" 2>&1 || { sed 's/^/     /' "$logs/last-check.txt" | tail -n 40; failed "$what"; }
    ok "$what ($(seconds_since "$since"))"
}

# The guest may stand still for seconds on a busy machine, and what waits then is not dead. Who is killed closes its
# associations, so that this costs no time.

# our_registrar NAME NUMBER ID [LINE...]: ours at 10.0.0.NUMBER; lines are added to [registrar].
our_registrar() {
    local name=$1 number=$2 id=$3
    shift 3
    {
        cat <<TOML
[registrar]
id = 0x$id
listen = ["10.0.0.$number"]
run_dir = "/run/$name"
resolution_items = ${our_items:-1}
keep_alive_interval_ms = ${interval_ms:-1000}
keep_alive_timeout_ms = ${patience_ms:-10000}
heartbeat_cycle_ms = 1000
last_heard_max_ms = 10000
no_response_max_ms = 5000
retry_ms = 500
TOML
        printf '%s\n' "$@"
        cat <<TOML
[access]
registrar = ["10.0.0.0/24"]
[multicast]
announce_ms = 500
enrp = true
mentor_hunt_ms = 3000
interfaces = ["eth0"]
[sctp]
rto_min_ms = 500
rto_max_ms = 5000
association_retransmissions = 10
path_retransmissions = 10
[log]
filter = "${our_log:-debug}"
TOML
    } >"$logs/$name.toml"
    # A killed one leaves its socket; one that returns takes it over.
    start "$name" "$name" holdfast registrar --config "$logs/$name.toml"
}

# rsplib_registrar NAME NUMBER ID [OPTION...]: at level 7 its log has its peers with checksums.
rsplib_registrar() {
    local name=$1 number=$2 id=$3
    shift 3
    start "$name" "$name" rspregistrar "-identifier=0x$id" "-asap=10.0.0.$number:3863" "-enrp=10.0.0.$number:9901" -disable-ipv6 \
        -asapannounce=239.0.0.50:3863 -enrpannounce=239.0.0.51:9901 -serverannouncecycle=500 \
        "-endpointkeepalivetransmissioninterval=${interval_ms:-1000}" "-endpointkeepalivetimeoutinterval=${patience_ms:-10000}" -maxhresitems=1 \
        -peerheartbeatcycle=1000 -peermaxtimelastheard=6000 -peermaxtimenoresponse=3000 -takeoverexpiryinterval=10000 \
        -mentordiscoverytimeout=2000 -loglevel=7 -logcolor=off "$@"
}

# rsplib_element NAME HOST ID POOL POLICY REGISTRAR...: addresses of registrars; none: it listens for announces.
rsplib_element() {
    local name=$1 host=$2 id=$3 pool=$4 policy=$5 registrar options=()
    shift 5
    for registrar in "$@"; do
        options+=("-registrar=$registrar:3863")
    done
    (($#)) && options+=(-asapannounce=off)
    start "$name" "$host" rspserver -echo "-poolhandle=$pool" "-policy=$policy" "-identifier=0x$id" "-rereginterval=${reregistration_ms:-2000}" \
        "-loglevel=${element_log:-4}" -logcolor=off "${options[@]}"
}

api() { curl -sS --fail --max-time 10 --unix-socket "/run/$1/registrar.sock" "http://registrar/v1/$2"; }

pool() {
    local registrar=$1
    shift
    holdfast pool "$@" --socket "/run/$registrar/registrar.sock"
}

is_ready() { api "$1" registrar | jq -e .ready; }

# has_elements REGISTRAR POOL ID...: exactly these.
has_elements() {
    local registrar=$1 handle=$2 wanted
    shift 2
    wanted=$(printf '%s\n' "$@" | sort)
    [[ $(api "$registrar" "pools/$handle" | tee /dev/stderr | jq -r '.elements[].id' | sort) == "$wanted" ]]
}

# has_no_pool REGISTRAR POOL
has_no_pool() { api "$1" pools | tee /dev/stderr | jq -e --arg pool "$2" 'all(.pools[]; .handle != $pool)'; }

# homes REGISTRAR POOL: "element home" lines.
homes() { api "$1" "pools/$2" | jq -r '.elements[] | "\(.id) \(.home)"'; }

asked=0
# ask HOST POOL REGISTRAR: rsplib's terminal says a word to the pool; prints the number of the element that echoed it.
ask() {
    local host=$1 pool=$2 registrar=$3 log words until=$((SECONDS + 30)) pid
    asked=$((asked + 1))
    log=$logs/user-$BASHPID-$asked.log
    words=/tmp/words-$BASHPID-$asked
    : >"$log"
    mkfifo "$words"
    ip netns exec "$host" rspterminal "-poolhandle=$pool" "-registrar=$registrar:3863" -asapannounce=off \
        -loglevel=3 -logcolor=off <"$words" >"$log" 2>&1 &
    pid=$!
    # Its input stays open: at the end of it, the terminal waits for ever.
    exec 9>"$words"
    echo hello >&9
    until grep -q 'from PE' "$log" || ((SECONDS >= until)); do sleep 0.05; done
    kill -KILL "$pid"
    wait "$pid" 2>/dev/null
    exec 9>&-
    rm -f "$words"
    sed -n 's/.*from PE \$\([0-9a-f]*\)> hello.*/\1/p' "$log" | head -n 1
}

# answers HOST POOL REGISTRAR ID...: one of these elements echoes.
answers() {
    local host=$1 pool=$2 registrar=$3 id
    shift 3
    id=$(ask "$host" "$pool" "$registrar")
    echo "asked $pool at $registrar: ${id:-no answer}"
    [[ -n $id && " $* " == *" $id "* ]]
}
