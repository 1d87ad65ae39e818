/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The Internet checksum (RFC 1071). Byte order does not matter to it. */
#pragma once

#include <linux/types.h>

/* One's complement sum of `length` bytes; a constant, even. */
static __always_inline __u32 sum16(const void *data, int length)
{
	const __u16 *word = data;
	__u32 sum = 0;

#pragma unroll
	for (int i = 0; i < length / 2; i++)
		sum += word[i];
	return sum;
}

static __always_inline __u16 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}
