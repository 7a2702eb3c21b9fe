#!/usr/bin/env bash
# What an operation costs our registrar and rsplib's, over the guest's kernel SCTP, both under one generator
# (`holdfast bench registrar --external`): ours at most half of rsplib's processor time. Not a step of ./x: a busy machine is no place
# to measure. Needs what rsplib.sh needs.
#
#   bench-registrar.sh [-d DIR]   the guest's folder, and the figures as JSON, are kept in DIR (default: below the build folder)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
: "${CARGO_TARGET_DIR:=$root/target}"
export CARGO_TARGET_DIR
dir=$CARGO_TARGET_DIR/guest
[[ ${1:-} == -d ]] && { dir=$2; shift 2; }
# shellcheck source=scripts/guest/rsplib/host.sh
source "$here/rsplib/host.sh"
(cd "$root" && cargo build --release --locked -p holdfast-cli -p holdfast-rserpoold -p holdfast-bench --bins)
prepare_guest "$dir" release holdfast rserpoold holdfast-bench
dir=$(cd "$dir" && pwd)
run_scenarios "$dir" 900 bench
