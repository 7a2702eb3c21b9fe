/* SPDX-License-Identifier: (MIT OR GPL-2.0-only) */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

#include "steer.h"
#include "ingress.h"
#include "egress.h"
#include "sockets.h"
#include "batch_setter.h"

char _license[] SEC("license") = "Dual MIT/GPL";
