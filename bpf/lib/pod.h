/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Ingress cache: the local pods. Written by the agent alone.
 * The index is the pod's identity in flow entries, together with the generation.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "address.h"

#define POD_ADDRESSES 2 /* one of each family */

struct pod {
	__u32 generation; /* never 0: a zeroed reference is stale */
	__u32 ifindex; /* host side device; 0 when the slot is free */
	__u8 mac[6]; /* inside the pod */
	__u8 pad[2];
	struct address address[POD_ADDRESSES]; /* zero when absent */
};

_Static_assert(sizeof(struct pod) == 48, "explicit padding only");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1024); /* limits.pods */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct pod);
} ingress_cache SEC(".maps");

/* Host side device to pod index, for packets that do not hit. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024); /* limits.pods */
	__type(key, __u32);
	__type(value, __u32);
} pod_devices SEC(".maps");

static __always_inline struct pod *pod_get(__u32 index)
{
	return bpf_map_lookup_elem(&ingress_cache, &index);
}

static __always_inline struct pod *pod_of_device(__u32 ifindex, __u32 *index)
{
	__u32 *found = bpf_map_lookup_elem(&pod_devices, &ifindex);

	if (!found)
		return NULL;
	*index = *found;
	return pod_get(*found);
}

static __always_inline int pod_owns(const struct pod *pod, const struct address *address)
{
	return address_equal(&pod->address[0], address) || address_equal(&pod->address[1], address);
}
