/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Egress cache: the ways to remote nodes. A path is everything that the base
 * path put in front of the packet, less what differs from packet to packet, and
 * the device it left by. Programs add paths and never change one, so a reader
 * never sees half of one; the agent retires them and hands their index back.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "headers.h"

#define PATH_HEADER_MAX 88 /* VXLAN over IPv6 takes 84; a multiple of 8 */

struct path {
	__u32 ifindex; /* of the uplink */
	__u16 length; /* of the header in use */
	__u16 sum; /* IPv4: of the header, without TOS; IPv6: of what UDP covers here */
	union {
		struct vxlan4 v4;
		struct vxlan6 v6;
		__u64 word[PATH_HEADER_MAX / 8];
	} header; /* length, checksum, id, source port and inherited fields are 0 */
};

/* Validity of a path. Written by the agent alone. */
struct path_state {
	__u32 generation; /* never 0 */
	__u32 mtu; /* largest inner IP packet, 0: no limit of its own */
};

_Static_assert(sizeof(struct path) == 96, "hash key: explicit padding only");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 4096); /* limits.peers */
	__type(key, __u32);
	__type(value, struct path);
} egress_cache SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 4096); /* limits.peers */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct path_state);
} path_states SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096); /* limits.peers */
	__type(key, struct path);
	__type(value, __u32);
} path_index SEC(".maps");

/* Unused indices: the agent fills it, programs draw from it. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, 4096); /* limits.peers */
	__type(value, __u32);
} path_free SEC(".maps");

static __always_inline struct path *path_get(__u32 index)
{
	return bpf_map_lookup_elem(&egress_cache, &index);
}

static __always_inline struct path_state *path_state_get(__u32 index)
{
	return bpf_map_lookup_elem(&path_states, &index);
}

/* The index of a path that looks like this, added if new; -1 when there is no room. */
static __always_inline long path_intern(const struct path *path)
{
	__u32 *found = bpf_map_lookup_elem(&path_index, path), index;
	struct path *slot;

	if (found)
		return *found;
	if (bpf_map_pop_elem(&path_free, &index))
		return -1;
	slot = path_get(index);
	if (!slot)
		return -1;
	*slot = *path;
	if (!bpf_map_update_elem(&path_index, path, &index, BPF_NOEXIST))
		return index;
	/* Another CPU was first, or the table is full. */
	bpf_map_push_elem(&path_free, &index, BPF_ANY);
	found = bpf_map_lookup_elem(&path_index, path);
	return found ? (long)*found : -1;
}
