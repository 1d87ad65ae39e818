/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A named counter for each way out. Every run of from_pod and from_wire moves
 * exactly one of hits, base_path or dropped; every run of to_wire and to_pod on
 * a packet that carries our mark moves learned or one of not_learned.
 */
#pragma once

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

struct counters {
	struct {
		__u64 from_pod; /* pod to a remote node, header pushed */
		__u64 from_wire; /* remote node to a pod, header stripped */
		__u64 local; /* pod to a pod of this node */
	} hits;
	struct {
		__u64 disabled; /* no agent has configured us yet, or it withdrew */
		__u64 deadline; /* the agent stopped refreshing the deadline */
		__u64 not_ip;
		__u64 vlan;
		__u64 truncated; /* headers do not fit the packet, or lengths disagree */
		__u64 header_checksum; /* of an IPv4 header is wrong */
		__u64 ip_options; /* IPv4 options, IPv6 extension headers */
		__u64 fragment;
		__u64 protocol; /* neither TCP, UDP nor ICMP echo */
		__u64 tcp_flags; /* SYN, FIN, RST, or no ACK */
		__u64 icmp_type; /* ICMP, but not an echo */
		__u64 not_tunnel; /* arrived on the uplink outside the tunnel */
		__u64 outer; /* tunnel packet for another address or MAC, fragmented, odd */
		__u64 vni;
		__u64 unknown_pod; /* the device belongs to no known pod */
		__u64 spoofed; /* the source is not an address of this pod */
		__u64 miss; /* no entry for this flow and direction */
		__u64 stale; /* learned under an older generation */
		__u64 unconfirmed; /* the other direction has not been delivered yet */
		__u64 closed; /* FIN or RST was seen before */
		__u64 lease; /* due for renewal by the base path */
		__u64 order; /* earlier packets are still in the base path */
		__u64 size; /* above the MTU of the path */
		__u64 ttl; /* would expire on the way */
		__u64 mac; /* sent to another MAC than was learned */
		__u64 peer; /* outer source is not the node it was learned from */
		__u64 ecn; /* a combination RFC 6040 treats specially */
		__u64 checksum; /* only the outer checksum protects it, or none can be had */
		__u64 segments; /* merged datagrams, which strip would leave marked as a tunnel's */
		__u64 helper; /* the kernel refused to make room */
	} base_path;
	struct {
		__u64 unfinished; /* already changed and could not be completed */
	} dropped;
	__u64 learned;
	struct {
		__u64 paused; /* the agent was changing something */
		__u64 mark; /* the slot had been reused, or names another journey */
		__u64 tunnel; /* left the uplink outside the tunnel, or not as expected */
		__u64 translated; /* the two hooks saw different tuples */
		__u64 foreign; /* address or MAC are not this device's */
		__u64 unestablished; /* conntrack does not call it established */
		__u64 full; /* no room for another path or flow */
	} not_learned;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct counters);
} counters SEC(".maps");

static __always_inline struct counters *counters_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&counters, &zero);
}

/* TC_ACT_UNSPEC is also TCX_NEXT: whoever comes behind us still sees the packet. */
static __always_inline int leave(__u64 *counter)
{
	(*counter)++;
	return TC_ACT_UNSPEC;
}
