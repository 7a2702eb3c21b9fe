#!/usr/bin/env bash
# A second Linux kernel (User-mode Linux 6.1 from Debian) that has what the host kernel lacks:
# kernel SCTP, Mobile IPv6 (XFRM route2/hao), netem, IPVS, VETH, netns. No virtualisation needed.
#
#   guest.sh prepare DIR               fetch and unpack the kernel and its modules into DIR (once)
#   guest.sh run DIR SCRIPT [TAP]      boot, run a copy of SCRIPT as root inside, power off; exit status of the guest is lost,
#                                      so SCRIPT writes its results under /mnt (= DIR, read-write)
# Inside: / is the host's root, read-only; /mnt is DIR; /tmp /run /var are tmpfs; modules below are loaded.
# With TAP (an existing tap device on the host, e.g. in a bridge) the guest has vec0 on that tap.
# Notes: one CPU; no /dev/fd (use pipes, not <( )); each guest netns needs sysctl net.sctp.cookie_hmac_alg=none
# before SCTP listen(); RFC 6951 UDP encapsulation is enabled by sysctl net.sctp.udp_port=9899.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
modules="hmac md5 sha1_generic crc32c_generic sctp sctp_diag bridge veth sch_netem dummy af_packet ip_vs mip6 esp6 ah6 xfrm_user"
case ${1:?prepare or run} in
prepare)
  dir=$(mkdir -p "${2:?DIR}" && cd "$2" && pwd)
  cd "$dir"
  [ -x init ] && exit 0
  command -v depmod >/dev/null || { echo "guest.sh: install kmod first" >&2; exit 1; }
  apt-get download user-mode-linux
  dpkg -x user-mode-linux_*.deb unpacked
  cp unpacked/usr/bin/linux.uml .
  # Without it the guest cannot start where the processor has AMX; the source says why.
  cc -O2 -shared -fPIC -o xstate.so "$here/xstate.c"
  mkdir -p lib/modules && cp -r unpacked/usr/lib/uml/modules/* lib/modules/
  PATH=$PATH:/sbin:/usr/sbin depmod -b "$dir" "$(ls lib/modules)"
  cat > init <<EOI
#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs tmp /run; mount -t tmpfs tmp /var
mkdir -p /var/{tmp,log,lib,run}
mount -t hostfs none /mnt -o $dir
mount -t tmpfs tmp /tmp
for m in $modules; do
  for f in \$(modprobe -d /mnt --show-depends \$m 2>/dev/null | awk '\$1=="insmod"{print \$2}'); do insmod \$f 2>/dev/null; done
done
ip link set lo up
sysctl -qw net.sctp.cookie_hmac_alg=none
/bin/bash "\$(sed -n 's/.*umlrun=\([^ ]*\).*/\1/p' /proc/cmdline)"
sync; echo o > /proc/sysrq-trigger; sleep 1; kill -9 1
EOI
  chmod +x init ;;
run)
  dir=$(cd "${2:?DIR}" && pwd); script=$(realpath "${3:?SCRIPT}"); tap=${4:-}
  copy=$(mktemp "$dir/run.XXXXXX"); trap 'rm -f "$copy"' EXIT; cp "$script" "$copy"
  net=(); [ -n "$tap" ] && net=("vec0:transport=tap,ifname=$tap,depth=128")
  LD_PRELOAD="$dir/xstate.so" "$dir/linux.uml" mem="${MEM:-1024M}" root=/dev/root rootfstype=hostfs rootflags=/ ro init="$dir/init" \
    con=null con0=null,fd:1 con1=fd:0,fd:1 quiet umlrun="/mnt/${copy##*/}" "${net[@]}" </dev/null ;;
*) echo "usage: guest.sh prepare|run" >&2; exit 2 ;;
esac
