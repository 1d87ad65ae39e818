/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The nodes at the other ends of the tunnel, as its forwarding table lists them.
 * Written by the agent alone. The tunnel device itself takes packets from anybody;
 * we learn nothing from strangers.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "address.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096); /* limits.peers */
	__type(key, struct address);
	__type(value, __u32);
} peers SEC(".maps");

static __always_inline int peer_known(const struct address *address)
{
	return bpf_map_lookup_elem(&peers, address) != NULL;
}
