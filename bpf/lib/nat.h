/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The base path's own translation of a flow (a service's address and port for a
 * backend's), repeated from what the two hooks saw. The transport checksum only
 * ever changes by helper: it may still be partial, for the device to complete.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "flow.h"
#include "packet.h"
#include "tunnel.h"

#define TCP_CHECK 16 /* offset of the checksum */
#define UDP_CHECK 6

/* The remote address in the description, which the header is written from later. */
static __always_inline void nat_ip(struct packet *p, const struct half *half, enum journey journey)
{
	__be32 *ip4 = journey == FROM_POD ? &p->ip4.daddr : &p->ip4.saddr;
	const __u16 *new = (const __u16 *)&half->nat.word[3], *old = (const __u16 *)ip4;

	if (p->is_ip6) {
		if (journey == FROM_POD)
			p->ip6.daddr = half->nat;
		else
			p->ip6.saddr = half->nat;
		return;
	}
	p->ip4.check =
		~fold((__u16)~p->ip4.check + (__u16)~old[0] + (__u16)~old[1] + new[0] + new[1]);
	*ip4 = half->nat.word[3];
}

/* The port and the checksum of the packet itself, whose IP header is at offset `at`. */
static __noinline int nat_l4(struct __sk_buff *skb, const struct packet *p, const struct half *half,
			     __u32 at, enum journey journey)
{
	__u32 l4 = at + (p->is_ip6 ? IP6_HDR_LEN : IP4_HDR_LEN);
	__u32 port = l4 + (journey == FROM_POD ? 2 : 0);
	struct address old = p->key.remote, new = half->nat;
	__u64 flags = BPF_F_PSEUDO_HDR;
	__be16 nat_port = half->nat_port;
	__u64 zero_is_none = 0;
	__u32 check;
	__s64 diff;

	check = l4 + (p->key.protocol == IPPROTO_TCP ? TCP_CHECK : UDP_CHECK);
	if (p->key.protocol == IPPROTO_UDP)
		zero_is_none = BPF_F_MARK_MANGLED_0;
	diff = bpf_csum_diff(old.word, sizeof(old), new.word, sizeof(new), 0);
	if (diff < 0 || bpf_l4_csum_replace(skb, check, 0, diff, flags | zero_is_none) ||
	    bpf_l4_csum_replace(skb, check, p->key.remote_port, nat_port, 2 | zero_is_none))
		return -1;
	return bpf_skb_store_bytes(skb, port, &nat_port, sizeof(nat_port), 0);
}
