/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* One address type for both families: IPv4 is kept IPv4-mapped (RFC 4291, 2.5.5.2). */
#pragma once

#include <linux/types.h>
#include <bpf/bpf_endian.h>

struct address {
	__be32 word[4];
};

static __always_inline void address_from_ip4(struct address *to, __be32 ip)
{
	to->word[0] = 0;
	to->word[1] = 0;
	to->word[2] = bpf_htonl(0xffff);
	to->word[3] = ip;
}

static __always_inline int address_is_ip4(const struct address *a)
{
	return a->word[2] == bpf_htonl(0xffff) && !a->word[1] && !a->word[0];
}

static __always_inline int address_equal(const struct address *a, const struct address *b)
{
	return a->word[3] == b->word[3] && a->word[2] == b->word[2] && a->word[1] == b->word[1] &&
	       a->word[0] == b->word[0];
}
