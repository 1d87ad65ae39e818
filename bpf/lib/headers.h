/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Wire formats as plain bytes.
 *
 * The uapi headers describe IPv4 with bit-fields, which user space cannot read
 * from BTF without knowing the byte order of the machine. These say the same
 * with whole bytes, aligned like the uapi ones.
 */
#pragma once

#include <linux/types.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include "address.h"

#define IPPROTO_ICMPV6 58 /* uapi has it in in6.h, which clashes with in.h */

#define IP4_HDR_LEN 20
#define IP4_VERSION_IHL 0x45
#define IP4_DF 0x4000
#define IP4_MF 0x2000
#define IP4_OFFSET 0x1fff

#define IP6_HDR_LEN 40
#define IP6_VERSION 6
#define IP6_HOPOPTS 0
#define IP6_ROUTING 43
#define IP6_FRAGMENT 44
#define IP6_DSTOPTS 60

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

#define ICMP_ECHOREPLY 0
#define ICMP_ECHO 8
#define ICMP6_ECHO 128
#define ICMP6_ECHOREPLY 129

/* RFC 7348: the I flag, everything else zero. */
#define VXLAN_FLAGS 0x08000000

struct eth {
	__u8 dst[6];
	__u8 src[6];
	__be16 proto;
};

struct ip4 {
	__u8 version_ihl;
	__u8 tos;
	__be16 tot_len;
	__be16 id;
	__be16 frag_off;
	__u8 ttl;
	__u8 protocol;
	__sum16 check;
	__be32 saddr;
	__be32 daddr;
};

struct ip6 {
	__be32 flow; /* version, traffic class, flow label */
	__be16 payload_len;
	__u8 nexthdr;
	__u8 hop_limit;
	struct address saddr;
	struct address daddr;
};

/* RFC 8200, 4.3, 4.4 and 4.6: of options and routing headers all that is needed here. */
struct extension6 {
	__u8 nexthdr;
	__u8 length; /* in 8 bytes, this header's first 8 not counted */
	__u8 rest[6];
};

/* RFC 8200, 4.5 */
struct fragment6 {
	__u8 nexthdr;
	__u8 reserved;
	__be16 offset; /* upper 13 bits */
	__be32 id;
};

#define FRAGMENT6_OFFSET 0xfff8
#define EXTENSIONS6 2 /* that we look behind; more are not seen in the wild */

struct udp {
	__be16 sport;
	__be16 dport;
	__be16 len;
	__sum16 check;
};

struct tcp {
	__be16 sport;
	__be16 dport;
	__be32 seq;
	__be32 ack_seq;
	__u8 doff; /* upper four bits, in words */
	__u8 flags;
	__be16 window;
	__sum16 check;
	__be16 urgent;
};

struct icmp_echo {
	__u8 type;
	__u8 code;
	__sum16 check;
	__be16 id;
	__be16 seq;
};

struct vxlan {
	__be32 flags;
	__be32 vni; /* upper 24 bits; the low byte is reserved and zero */
};

/* Everything VXLAN over IPv4 puts in front of the inner IP header; 14 bytes shift all to even. */
struct vxlan4 {
	struct eth eth;
	struct ip4 ip;
	struct udp udp;
	struct vxlan vxlan;
	struct eth inner;
} __attribute__((packed, aligned(2)));

struct vxlan6 {
	struct eth eth;
	struct ip6 ip;
	struct udp udp;
	struct vxlan vxlan;
	struct eth inner;
} __attribute__((packed, aligned(2)));

/* What a pod receives. */
struct frame4 {
	struct eth eth;
	struct ip4 ip;
} __attribute__((packed, aligned(2)));

struct frame6 {
	struct eth eth;
	struct ip6 ip;
} __attribute__((packed, aligned(2)));

#define VXLAN4_OVERHEAD (sizeof(struct vxlan4) - sizeof(struct eth))
#define UDP_OVERHEAD (sizeof(struct udp) + sizeof(struct vxlan) + sizeof(struct eth))
#define VXLAN6_OVERHEAD (sizeof(struct vxlan6) - sizeof(struct eth))

_Static_assert(sizeof(struct eth) == 14, "Ethernet II");
_Static_assert(sizeof(struct ip4) == IP4_HDR_LEN, "RFC 791");
_Static_assert(sizeof(struct ip6) == IP6_HDR_LEN, "RFC 8200");
_Static_assert(sizeof(struct tcp) == 20, "RFC 9293");
_Static_assert(sizeof(struct frame4) == 34, "14 + 20");
_Static_assert(sizeof(struct vxlan4) == 64, "14 + 20 + 8 + 8 + 14");
_Static_assert(sizeof(struct vxlan6) == 84, "14 + 40 + 8 + 8 + 14");
_Static_assert(VXLAN4_OVERHEAD == 50, "RFC 7348");
