# Run in the guest by ../rsplib.sh: the scenarios that are named, one after the other, each from nothing.
# shellcheck shell=bash
set -o pipefail
here=/mnt/rsplib-test
logs_root=/mnt/rsplib-logs
export PATH=/mnt/bin:/mnt/rsplib/usr/bin:$PATH LD_LIBRARY_PATH=/mnt/rsplib/usr/lib/x86_64-linux-gnu
echo "guest: Linux $(uname -r), booted"

# shellcheck source=scripts/guest/rsplib/lib.sh
source "$here/lib.sh"
make_bridge
for scenario in "$@"; do
    run_scenario "$scenario"
done
result
