/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Ethernet addresses, compared and copied in 2-byte steps (see headers.h). */
#pragma once

#include <linux/types.h>

static __always_inline int mac_equal(const void *a, const void *b)
{
	const __u16 *x = a, *y = b;

	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2];
}

static __always_inline void mac_copy(void *to, const void *from)
{
	const __u16 *x = from;
	__u16 *y = to;

	y[0] = x[0];
	y[1] = x[1];
	y[2] = x[2];
}
