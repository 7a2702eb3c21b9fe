// Sends every IPv4 datagram for port 7 back to its source, by redirecting it to the interface it arrived on. Swapping
// addresses and ports leaves all checksums right.
// SPDX-License-Identifier: GPL-2.0 OR MIT
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

#define SEC(name) __attribute__((section(name), used))
#define SWAP(type, a, b) do { type t = a; a = b; b = t; } while (0)

static long (*bpf_redirect)(__u32 ifindex, __u64 flags) = (void *)BPF_FUNC_redirect;

SEC("xdp") int echo(struct xdp_md *ctx)
{
	void *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = (void *)(long)ctx->data;
	struct iphdr *ip = (void *)(eth + 1);
	struct udphdr *udp = (void *)(ip + 1);

	if ((void *)(udp + 1) > end || eth->h_proto != __builtin_bswap16(ETH_P_IP))
		return XDP_PASS;
	if (ip->protocol != IPPROTO_UDP || ip->ihl != 5 || udp->dest != __builtin_bswap16(7))
		return XDP_PASS;
	for (int i = 0; i < ETH_ALEN; i++)
		SWAP(unsigned char, eth->h_source[i], eth->h_dest[i]);
	SWAP(__be32, ip->saddr, ip->daddr);
	SWAP(__be16, udp->source, udp->dest);
	return bpf_redirect(ctx->ingress_ifindex, 0);
}

char _license[] SEC("license") = "Dual MIT/GPL";
