#!/usr/bin/env bash
# Follows docs/install.md on four bare Debian 12 hosts with systemd, and checks what the page promises. The commands are
# read out of the page: a block with commands begins with ```sh MACHINE NAME, and here are checks for some names. Hosts
# are namespaces with files of their own above a common Debian; nothing outside them is changed or left behind.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/install-test.sh --programs DIR [--cache DIR]

Makes packages of the programs in the folder of --programs (all programs of the
workspace, `./x build` and `cargo build --bins` make them), installs them on hosts
n1, n2, n3 and admin, and runs every command of docs/install.md there. The common
Debian is made by debootstrap, in the folder of --cache if one is named, where later
runs find it. Needs root, debootstrap, dpkg-dev, and a Debian mirror (the one this
machine's apt uses).

Exit status: 0 when every command and check succeeded, 77 when the mirror cannot be
reached.
TEXT
}

script=$(readlink -f "${BASH_SOURCE[0]}")
root=$(cd "$(dirname "$script")/.." && pwd)
page=$root/docs/install.md
# What the page expects of a host, or says to install: the hosts have no network for it.
base_packages=systemd,systemd-sysv,openssh-server,openssh-client,iproute2,procps,ca-certificates,curl,nginx
# shellcheck source=scripts/debian-root.sh
source "$root/scripts/debian-root.sh"

declare -A address_of=([admin]=10.0.0.10 [n1]=10.0.0.11 [n2]=10.0.0.12 [n3]=10.0.0.13)
nodes=(n1 n2 n3)
# Longest wait for a condition, seconds.
wait_max=60

say() { printf 'install-test: [%2d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }
stop() {
    say "$1" >&2
    exit "${2:-1}"
}

# --- Outside: folder, common Debian, packages; then namespaces whose processes and mounts vanish with them. ---

outside() {
    local programs='' cache=''
    while (($#)); do
        case $1 in
            --programs) programs=$2 ;;
            --cache) cache=$2 ;;
            -h | --help) usage && exit ;;
            *) usage >&2 && exit 2 ;;
        esac
        shift 2
    done
    [[ -n $programs ]] || { usage >&2 && exit 2; }
    ((EUID == 0)) || stop "needs root (mounts, namespaces)"
    command -v debootstrap >/dev/null || stop "needs the Debian package debootstrap"
    local base=${TMPDIR:-/var/tmp}
    remove_stale "$base"/holdfast-install.*
    folder=$(mktemp -d "$base/holdfast-install.XXXXXX")
    echo $$ >"$folder/pid"
    group=$(findmnt --noheadings --first-only --output TARGET --types cgroup2) || stop "needs a cgroup2 mount"
    group=$group/$(basename "$folder")
    mkdir "$group"
    worker=
    trap cleanup EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    cache=${cache:-$folder/cache}
    make_system "$cache"
    make_packages "$programs"
    run_worker unshare --mount --propagation private --net --pid --fork --kill-child \
        "$script" --inside "$folder" "$group" "$system"
}

# run_worker COMMAND...: in the background, so that a signal is handled at once. If this shell is killed, so is the command.
run_worker() {
    local status=0
    setpriv --pdeathsig KILL "$@" </dev/null &
    worker=$!
    wait "$worker" || status=$?
    worker=
    ((status == 0)) || exit "$status"
}

cleanup() {
    trap - EXIT
    if [[ -n $worker ]]; then
        kill -KILL "$worker" 2>/dev/null || true
        wait "$worker" 2>/dev/null || true
    fi
    remove "$folder"
    find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
}

# make_system CACHE: the common Debian, unless CACHE has it.
make_system() {
    local key
    key=$({ cat "$root/scripts/debian-root.sh" && declare -f bootstrap && echo "$base_packages"; } | cksum | cut -d ' ' -f 1)
    system=$1/debian-$key
    [[ -e $system/complete ]] && return
    rm -rf --one-file-system "$1"
    mkdir -p "$1"
    run_worker unshare --mount --propagation private --pid --fork --kill-child "$script" --bootstrap "$system"
}

bootstrap() {
    local tree=$1/root unit
    mkdir "$1"
    bootstrap_debian "$tree" "$base_packages" "$1/debootstrap.log" || stop "debootstrap failed"
    rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree/etc/machine-id"
    for unit in console-getty.service apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer; do
        ln -s /dev/null "$tree/etc/systemd/system/$unit"
    done
    # The page starts it.
    rm "$tree/etc/systemd/system/multi-user.target.wants/nginx.service"
    local name
    printf '127.0.0.1 localhost\n' >"$tree/etc/hosts"
    for name in "${!address_of[@]}"; do
        printf '%s %s\n' "${address_of[$name]}" "$name"
    done >>"$tree/etc/hosts"
    local home
    home=$tree$(awk -F : '$1 == "root" { print $6 }' "$tree/etc/passwd")
    mkdir -p "$home/.ssh"
    chmod 700 "$home/.ssh"
    ssh-keygen -q -t ed25519 -N '' -f "$home/.ssh/id_ed25519"
    cp "$home/.ssh/id_ed25519.pub" "$home/.ssh/authorized_keys"
    printf 'StrictHostKeyChecking no\nLogLevel ERROR\n' >"$tree/etc/ssh/ssh_config.d/install-test.conf"
    touch "$1/complete"
}

# The packages get the names that the page gives them; inside, the second one is a later version of this checkout.
make_packages() {
    local names version
    mapfile -t names < <(grep -oE 'holdfast_[0-9][^ ]*\.deb' "$page" | sort -uV)
    ((${#names[@]} == 2)) || stop "$page names ${#names[@]} packages, not 2"
    version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/Cargo.toml" | head -n 1)
    local make=("$root/scripts/package.sh" --programs "$1" --compression none)
    "${make[@]}" --version "$version-1" --out "$folder/old" || stop "cannot make packages"
    "${make[@]}" --version "$version-1" --out "$folder/again" || stop "cannot make packages"
    diff -r "$folder/old" "$folder/again" || stop "the same programs give other packages"
    "${make[@]}" --version "$version-2" --out "$folder/new" || stop "cannot make packages"
    mkdir "$folder/packages"
    mv "$folder"/old/holdfast_*.deb "$folder/packages/${names[0]}"
    mv "$folder"/new/holdfast_*.deb "$folder/packages/${names[1]}"
    new_version=$version-2
    rm -rf "$folder/old" "$folder/again" "$folder/new"
    say "made packages: $(cd "$folder/packages" && du --apparent-size -h -- * | tr '\n\t' ' ')"
    echo "$new_version" >"$folder/new-version"
    cp "$1/echo" "$folder/echo-server"
}

# --- Inside the namespaces. ---

inside() {
    folder=$1 group=$2 system=$3
    new_version=$(<"$folder/new-version")
    mount -t proc proc /proc
    mkdir "$folder/hosts" "$folder/blocks" "$folder/output"
    mount -t tmpfs -o mode=755 tmpfs "$folder/hosts"
    ip link add segment type bridge
    ip link set segment up
    declare -gA init_of
    local name
    for name in "${!address_of[@]}"; do
        start_host "$name"
    done
    for name in "${!address_of[@]}"; do
        wait_for "systemd on $name" is_booted "$name"
    done
    cp "$folder"/packages/*.deb "$folder/hosts/admin/root/$(home_of_root)/"
    say "the hosts are up"
    read_blocks
    run_blocks
    say "every command of the page succeeded"
}

# start_host NAME: as a container without CAP_SYS_RESOURCE, linked to the segment.
start_host() {
    local name=$1 tree=$folder/hosts/$1
    mkdir -p "$tree"/{upper,work,root} "$group/$name"
    mount -t overlay overlay -o "lowerdir=$system/root,upperdir=$tree/upper,workdir=$tree/work" "$tree/root"
    # shellcheck disable=SC2016 # expanded by the shell that joins the group
    bash -c 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"' bash "$group/$name" \
        setpriv --bounding-set=-sys_resource \
        unshare --mount --propagation private --net --pid --ipc --uts --cgroup --fork --kill-child \
        "$script" --host "$tree/root" "$name" >"$folder/$name.log" 2>&1 &
    local starter=$!
    wait_for "the first process of $name" has_child "$starter"
    init_of[$name]=$(pgrep --parent "$starter")
    ip link add "$name" type veth peer name eth0 netns "${init_of[$name]}"
    # As in a lab (crates/lab): a veth takes what XDP redirects only if it polls, which GRO makes it do, and a redirect
    # loses the mark of a missing checksum.
    ip link set "$name" gro_max_size 1 master segment up
    ethtool --features "$name" gro on >/dev/null
    nsenter --target "${init_of[$name]}" --net ethtool --features eth0 gro on tx off tso off >/dev/null
}

has_child() { pgrep --parent "$1" >/dev/null; }

# The first process of a host: it mounts a container's file systems, and becomes systemd.
host() {
    local tree=$1 name=$2 try
    hostname "$name"
    mount -t proc proc "$tree/proc"
    mount -t sysfs sysfs "$tree/sys"
    mount -t cgroup2 cgroup2 "$tree/sys/fs/cgroup"
    mount -t bpf bpf "$tree/sys/fs/bpf"
    mount -t tmpfs -o mode=755 tmpfs "$tree/run"
    make_devices "$tree/dev"
    echo "$name" >"$tree/etc/hostname"
    tr -d - </proc/sys/kernel/random/uuid >"$tree/etc/machine-id"
    for ((try = 0; try < wait_max * 10; try++)); do
        [[ -e $tree/sys/class/net/eth0 ]] && break
        sleep 0.1
    done
    ip link set lo up
    ip address add "${address_of[$name]}/24" dev eth0
    ip link set eth0 up
    cd "$tree"
    pivot_root . mnt
    umount --lazy /mnt
    exec env -i container=install-test PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 chroot . /lib/systemd/systemd
}

home_of_root() { awk -F : '$1 == "root" { print $6 }' "$system/root/etc/passwd"; }

# on HOST COMMANDS: runs the commands on the host, in the home directory of root, as a login would.
on() {
    nsenter --target "${init_of[$1]}" --all env -i HOME="$(home_of_root)" LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        bash -e -o pipefail -c "cd; $2" </dev/null
}

is_booted() {
    local state
    state=$(on "$1" "systemctl is-system-running" 2>/dev/null) || true
    [[ $state == running || $state == degraded ]]
}

# wait_for WHAT COMMAND...: until the command succeeds.
wait_for() {
    local what=$1 end=$((SECONDS + wait_max))
    shift
    until "$@"; do
        ((SECONDS < end)) || fail "exceeded time: $what"
        sleep 0.2
    done
}

# fail TEXT: shows what the hosts logged, and ends the run.
fail() {
    local name
    for name in "${!init_of[@]}"; do
        say "--- journal of $name:"
        on "$name" "journalctl --no-pager --lines 40 --output short-monotonic" 2>&1 || tail -n 20 "$folder/$name.log"
    done >&2
    stop "$1"
}

# --- The page's blocks. ---

# read_blocks: the blocks' machines and names into two lists, and the commands into files.
read_blocks() {
    machines=() block_names=()
    local line number=0 file=
    while IFS= read -r line; do
        number=$((number + 1))
        if [[ -n $file ]]; then
            if [[ $line == '```' ]]; then file=; else printf '%s\n' "$line" >>"$file"; fi
        elif [[ $line =~ ^\`\`\`sh' '([a-z0-9]+)' '([a-z-]+)(' background')?$ ]]; then
            machines+=("${BASH_REMATCH[1]}${BASH_REMATCH[3]}")
            block_names+=("${BASH_REMATCH[2]}")
            file=$folder/blocks/${BASH_REMATCH[2]}
            [[ ! -e $file ]] || stop "$page:$number: a second block ${BASH_REMATCH[2]}"
        elif [[ $line == '```'* ]]; then
            stop "$page:$number: commands without machine and name"
        fi
    done <"$page"
    ((${#block_names[@]})) || stop "$page has no commands"
}

run_blocks() {
    local index name function
    for ((index = 0; index < ${#block_names[@]}; index++)); do
        name=${block_names[index]}
        function=${name//-/_}
        ! declare -F "before_$function" >/dev/null || "before_$function"
        run_block "${machines[index]}" "$name"
        ! declare -F "check_$function" >/dev/null || "check_$function"
    done
}

# run_block MACHINE NAME: on each living node for `each`; in the background if MACHINE says so.
run_block() {
    local machine=${1% background} host commands hosts
    commands=$(<"$folder/blocks/$2")
    case $machine in
        each) hosts=("${nodes[@]}") ;;
        contact) hosts=("$(contact_node)") ;;
        *) hosts=("$machine") ;;
    esac
    for host in "${hosts[@]}"; do
        say "$host: $2"
        if [[ $1 == *' background' ]]; then
            on "$host" "$commands" >"$folder/output/$2" 2>&1 &
            background=$!
            continue
        fi
        if ! on "$host" "$commands" >"$folder/output/$2" 2>&1; then
            cat "$folder/output/$2"
            fail "failed on $host: $2"
        fi
    done
}

# expect TEXT COMMAND...: ends the run unless the command succeeds.
expect() {
    local what=$1
    shift
    "$@" || fail "not so: $what"
}

unit_property() { on "$1" "systemctl show --property $2 --value $3"; }

main_pid() { unit_property "$1" MainPID holdfastd; }

connected_nodes() { on "$1" "holdfast status" | grep --count ' connected ' || true; }

is_connected_to() { (($(connected_nodes "$1") == $2)); }

# The contact node, as n1 sees it.
contact_node() { on n1 "holdfast node list" | awk '/ contact node / { print $1 }'; }

is_contact() { [[ $(contact_node) == "$1" ]]; }

check_install_nodes() {
    local host state
    for host in "${nodes[@]}"; do
        for state in is-active is-enabled; do
            ! on "$host" "systemctl --quiet $state holdfastd rserpoold-registrar rserpoold-pool" ||
                fail "the installation of the package on $host started or enabled a daemon"
        done
    done
    # Without a configuration the daemon cannot run; systemd does not try again, and shows the reason.
    ! on n1 "systemctl start holdfastd" 2>"$folder/output/start" || fail "the daemon runs without configuration"
    expect "status 78" test "$(unit_property n1 ExecMainStatus holdfastd)" = 78
    expect "no restart" test "$(unit_property n1 ActiveState holdfastd)" = failed
    expect "reason in the status" grep --quiet 'holdfast.toml: cannot be read' \
        <(unit_property n1 StatusText holdfastd; on n1 "systemctl status holdfastd" || true)
    on n1 "systemctl reset-failed holdfastd"
}

check_status() {
    wait_for "the connection of n1 to the other nodes" is_connected_to n1 2
    expect "n1 is the contact node" is_contact n1
    expect "two backups" test "$(on n1 "holdfast node list" | grep --count ' backup ')" = 2
    # A token serves one host.
    expect "two used tokens" test "$(on n1 "holdfast group token --list" | grep --count ' used ')" = 2
    # A daemon that dies is started again.
    local pid status=0
    pid=$(main_pid n2)
    on n2 "kill -KILL $pid"
    wait_for "a new daemon on n2" is_restarted n2 "$pid"
    wait_for "the connection of n2" is_connected_to n1 2
    # A second daemon is refused.
    on n2 "holdfastd" >"$folder/output/second" 2>&1 || status=$?
    expect "status 75 of a second daemon" test "$status" = 75
}

check_service() {
    local host
    for host in "${nodes[@]}"; do
        wait_for "the service on $host" on "$host" "holdfast service list | grep --quiet 10.0.0.80"
    done
    check_handoffs
}

# Connections are handed off under the restrictions of the unit: an echo server on each node, a client that goes on.
check_handoffs() {
    local host client given=0
    for host in "${nodes[@]}"; do
        install -m 755 "$folder/echo-server" "$folder/hosts/$host/root/usr/local/lib/"
        on "$host" "systemd-run --quiet --unit echo-server /usr/local/lib/echo-server --pool web --listen 10.0.0.80:80"
        wait_for "the echo server on $host" on "$host" "holdfast status | grep --quiet '^echo-server '"
    done
    # shellcheck disable=SC2016 # expanded on the host
    on admin 'exec 3<>/dev/tcp/10.0.0.80/80
        for ((i = 0; i < 600; i++)); do
            echo "line $i" >&3
            read -t 20 -r answer <&3
            [[ $answer == "line $i" ]]
            [[ ! -e stop ]] || exit 0
            sleep 0.05
        done' >"$folder/output/echo-client" 2>&1 &
    client=$!
    wait_for "the client's connection" on n1 "holdfast flow list | grep --quiet 10.0.0.10"
    # Wherever the connection is, it moves at least twice.
    for host in n1:n2 n2:n3 n3:n1 n1:n2; do
        # A node that does not own the connection says so.
        on "${host%:*}" "holdfast handoff --all --to ${host#*:}" >>"$folder/output/handoffs" 2>&1 || true
    done
    on admin "touch stop"
    wait "$client" || { cat "$folder/output/echo-client" && fail "the client of the echo servers had an error"; }
    for host in "${nodes[@]}"; do
        given=$((given + $(on "$host" "holdfast status" | sed -n 's/.*handoffs: \([0-9]*\) given.*/\1/p')))
    done
    ((given >= 2)) || { cat "$folder/output/handoffs" && fail "the connection was handed off $given times, fewer than twice"; }
    for host in "${nodes[@]}"; do
        on "$host" "systemctl stop echo-server"
    done
}

is_restarted() {
    [[ $(unit_property "$1" ActiveState holdfastd) == active && $(main_pid "$1") != "$2" ]]
}

check_first_client() { expect_answers_of "${nodes[@]}"; }

# expect_answers_of HOST...: of these, and of no others, in the output of the page's client.
expect_answers_of() {
    local output=$folder/output/first-client
    expect "answers of $*" test "$(awk '{ print $2 }' "$output" | xargs)" = "$*"
    expect "30 answers" test "$(awk '{ sum += $1 } END { print sum }' "$output")" = 30
}

check_migration() {
    wait_for "the connection of n1 to the other nodes" is_connected_to n1 2
    # A process moves with the drop-in, and outlives the daemon of its new node.
    local pid
    on n1 "useradd --uid 1000 mover && systemd-run --quiet --unit mover --uid mover --property StandardOutput=null \
        --property StandardError=null sleep 1000"
    on n1 "holdfast migrate mover.service --to n2" >"$folder/output/migrate" 2>&1 ||
        { cat "$folder/output/migrate" && fail "the process did not move"; }
    pid=$(main_pid n2)
    on n2 "systemctl restart holdfastd"
    expect "a new daemon on n2" is_restarted n2 "$pid"
    expect "the moved process on n2" on n2 "pgrep --exact sleep"
    expect "no process on n1" on n1 "! pgrep --exact sleep"
    # A removal would leave it.
    on n2 "pkill --exact sleep"
    wait_for "the connection of n1 to the other nodes" is_connected_to n1 2
}

before_resolve() { wait_for "the element" is_registered; }

is_registered() { on n1 "holdfast pool list" 2>&1 | grep --quiet shell; }

check_resolve() {
    expect "the element's port" grep --quiet 2222 "$folder/output/resolve"
    # SCTP directly over IP: the unit's capabilities have an effect, though the user is not root.
    expect "SCTP over IP" on n1 "journalctl --unit rserpoold-registrar | grep --quiet 'raw=true'"
    expect "rserpoold is not root" test "$(on n1 "ps -o user= -C rserpoold" | sort -u)" = rserpoold
}

before_upgrade() {
    declare -gA pid_before
    local host
    for host in "${nodes[@]}"; do
        pid_before[$host]=$(main_pid "$host")
    done
    wait_for "the download" test -s "$folder/hosts/admin/root/$(home_of_root)/large"
}

check_upgrade() {
    local host unit
    for host in "${nodes[@]}"; do
        expect "version on $host" test "$(on "$host" "dpkg-query --show --showformat '\${Version}' holdfast")" = "$new_version"
        expect "the daemon on $host was restarted" is_restarted "$host" "${pid_before[$host]}"
    done
    for unit in rserpoold-registrar rserpoold-pool; do
        expect "$unit on n1" on n1 "systemctl --quiet is-active $unit"
        expect "no start of $unit on n2" on n2 "! systemctl --quiet is-active $unit"
    done
    expect_download_goes_on
}

# The slow download is under way, so that the node of its connection was upgraded meanwhile.
expect_download_goes_on() {
    kill -0 "$background" 2>/dev/null && return
    cat "$folder/output/download"
    fail "the download has ended: it broke, or was too fast"
}

check_rollback() {
    expect "the daemon on n3" test "$(unit_property n3 ActiveState holdfastd)" = active
    expect_download_goes_on
    wait "$background" || { cat "$folder/output/download" && fail "the download broke"; }
    local host sum sums=()
    for host in "${nodes[@]}"; do
        sums+=("$(on "$host" "sha256sum < /var/www/html/large")")
    done
    sum=$(on admin "sha256sum < large")
    expect "the download is complete" grep --quiet --fixed-strings "$sum" <(printf '%s\n' "${sums[@]}")
    wait_for "the connection of n1 to the other nodes" is_connected_to n1 2
}

check_promote() {
    wait_for "n3 as contact node" is_contact n3
    run_block admin first-client
    expect_answers_of n1 n2 n3
}

# What a shutdown does to the unit, and the boot after it.
check_drain_unit() {
    on n2 "systemctl stop holdfast-drain.service"
    on n2 "holdfast balance status" >"$folder/output/drained"
    expect "n2 is drained" grep --quiet --extended-regexp '^n2 .* no, draining' "$folder/output/drained"
    run_block admin first-client
    expect_answers_of n1 n3
    on n2 "systemctl start holdfast-drain.service"
    wait_for "new clients at n2" has_answer_of n2
    run_block admin first-client
    expect_answers_of n1 n2 n3
}

has_answer_of() {
    run_block admin first-client
    grep --quiet --word-regexp "$1" "$folder/output/first-client"
}

before_host_failed() {
    say "killing n3, the contact node"
    kill -KILL "${init_of[n3]}"
    unset 'init_of[n3]'
    nodes=(n1 n2)
    wait_for "another contact node" has_living_contact
    wait_for "n1 to miss n3" is_connected_to n1 1
}

has_living_contact() { [[ $(contact_node) == n[12] ]]; }

check_host_failed() {
    run_block admin first-client
    expect_answers_of n1 n2
}

check_revoke() {
    wait_for "the revocation on n2" on n2 "journalctl --unit holdfastd | grep --quiet 'a new revocation list is in force'"
    expect "n1 and n2 are connected" is_connected_to n1 1
}

check_leave() {
    wait_for "n1 alone" test "$(on n1 "holdfast node list" | grep --count --extended-regexp '^n[0-9]')" = 1
}

# What the page had the administrator start, who also ends it.
before_remove() { on n1 "systemctl stop shell-element"; }

check_remove() {
    local host left
    for host in "${nodes[@]}"; do
        left=$(on "$host" "
            ps -e -o pid=,comm= | grep -E ' (holdfast|rserpoold)' || true
            ip -oneline address | grep --fixed-strings 10.0.0.80 || true
            ip -oneline link | grep hf- || true
            ip -oneline -details link show eth0 | grep --only-matching 'prog/xdp.*' || true
            ip rule | grep 18534 || true
            find /sys/fs/bpf -mindepth 1 -not -name '*.debug'
            find /etc /lib /usr /opt /run /var/lib /var/cache -xdev -not -path '/run/systemd/*' \\
                \\( -iname '*holdfast*' -o -iname '*rserpoold*' \\)
        ")
        [[ -z $left ]] || { printf '%s\n' "$left" && fail "left on $host after the removal"; }
    done
}

case ${1:-} in
    --bootstrap) shift && bootstrap "$@" ;;
    --inside) shift && inside "$@" ;;
    --host) shift && host "$@" ;;
    *) outside "$@" ;;
esac
