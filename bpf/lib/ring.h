/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Learning without touching the packet. The first hook of a journey writes down
 * what it saw in one slot of a small ring and puts the slot's number, the nonce,
 * into our bits of skb->mark; the second hook finds the slot by it. The nonce is
 * a hint, never an identity: connmark brings back old ones, GRO merges packets,
 * a bridge floods. So the second hook compares everything before it learns.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "config.h"
#include "packet.h"

#define RING_SLOTS 1024 /* ten bits of mark at most */

struct slot {
	struct bpf_spin_lock lock; /* two CPUs may meet in one slot */
	__u32 number; /* never 0 in a slot that is used */
	__u32 epoch;
	__u8 journey; /* enum journey */
	__u8 ttl;
	__u8 to_mac[6];
	__u8 pad[4];
	__u64 pod; /* from_pod: reference to the pod */
	struct flow_key key;
	struct address peer; /* from_wire: outer source */
};

_Static_assert(sizeof(struct slot) == 88, "explicit padding only");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, RING_SLOTS);
	__type(key, __u32);
	__type(value, struct slot);
} ring SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} ring_head SEC(".maps");

/* Writes the packet down and marks it. Returns its number, 0 if that failed. */
static __always_inline __u32 ring_note(struct __sk_buff *skb, const struct config *cfg,
				       const struct packet *p, enum journey journey, __u64 pod)
{
	__u32 zero = 0, number, nonce, *head = bpf_map_lookup_elem(&ring_head, &zero);
	struct slot *slot;

	if (!head || !cfg->nonces)
		return 0;
	number = __sync_fetch_and_add(head, 1) + 1;
	if (!number)
		return 0;
	nonce = number % cfg->nonces + 1;
	slot = bpf_map_lookup_elem(&ring, &nonce);
	if (!slot)
		return 0;
	bpf_spin_lock(&slot->lock);
	slot->number = number;
	slot->epoch = cfg->epoch;
	slot->journey = journey;
	slot->ttl = p->ttl;
	mac_copy(slot->to_mac, p->to_mac);
	slot->pod = pod;
	slot->key = p->key;
	slot->peer = p->peer;
	bpf_spin_unlock(&slot->lock);
	skb->mark = (skb->mark & ~cfg->mark_mask) | nonce << cfg->mark_shift;
	return number;
}

/*
 * Takes the slot that the mark names and wipes our bits. 0 if the mark is not ours:
 * IGMP and MLD packets seem marked, the kernel keeps their tail room in that place.
 */
static __always_inline int ring_take(struct __sk_buff *skb, const struct config *cfg,
				     struct slot *copy)
{
	__u32 nonce = (skb->mark & cfg->mark_mask) >> cfg->mark_shift;
	struct slot *slot;

	if (!nonce)
		return 0;
	slot = bpf_map_lookup_elem(&ring, &nonce);
	if (!slot || !slot->number)
		return 0;
	skb->mark &= ~cfg->mark_mask;
	bpf_spin_lock(&slot->lock);
	copy->number = slot->number;
	copy->epoch = slot->epoch;
	copy->journey = slot->journey;
	copy->ttl = slot->ttl;
	mac_copy(copy->to_mac, slot->to_mac);
	copy->pod = slot->pod;
	copy->key = slot->key;
	copy->peer = slot->peer;
	bpf_spin_unlock(&slot->lock);
	return 1;
}
