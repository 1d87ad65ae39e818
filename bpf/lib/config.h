/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the agent tells the programs. The agent is the only writer; it stores
 * single fields through a mapping of this array, so a field never tears.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "address.h"

struct config {
	__u64 deadline; /* CLOCK_MONOTONIC ns; the dead-man switch: after it, base path only */
	__u64 lease; /* ns an entry may live before a packet must renew it */
	__u32 generation; /* all entries learned under another one are stale */
	__u32 epoch; /* moves before any generation does: packets in flight learn nothing */
	__u32 learning; /* 0 while the agent changes something */
	__u32 mark_mask; /* our bits of skb->mark, contiguous */
	__u32 mark_shift;
	__u32 nonces; /* usable slots of the ring: 1 .. nonces */
	__u32 uplink; /* ifindex */
	__u32 tunnel; /* ifindex */
	__u32 mtu; /* largest inner IP packet */
	__be32 vni; /* as on the wire: upper 24 bits */
	__be16 port; /* tunnel destination port */
	__u16 port_min; /* outer source ports: port_min .. port_max - 1 */
	__u16 port_max;
	__u8 tos_inherit;
	__u8 ttl_inherit;
	__u8 df_inherit;
	__u8 zero_sum6_tx; /* over IPv6: send with outer UDP checksum 0 (RFC 6935) */
	__u8 zero_sum6_rx; /* ... and accept it */
	__u8 pad[5];
	struct address local; /* this node's tunnel address */
};

_Static_assert(sizeof(struct config) == 88, "explicit padding only");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct config);
} config SEC(".maps");

static __always_inline struct config *config_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&config, &zero);
}

/* The coarse clock is a load from memory; the precise one reads the TSC. */
static __always_inline int config_alive(const struct config *cfg, __u64 now)
{
	return now < cfg->deadline;
}
