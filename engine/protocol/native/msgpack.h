/* Numbers and arrays in msgpack, each in its shortest form. Whoever writes has made room. */

#ifndef STEPSCOPE_MSGPACK_H
#define STEPSCOPE_MSGPACK_H

#include <stdint.h>

enum {
    MAX_INT_BYTES = 9,    /* a tag and 64 bits */
    MAX_HEADER_BYTES = 5, /* of an array: a tag and 32 bits */
};

static inline uint8_t *put_bytes(uint8_t *at, uint64_t value, int num_bytes) {
    for (int shift = 8 * (num_bytes - 1); shift >= 0; shift -= 8) {
        *at++ = (uint8_t)(value >> shift);
    }
    return at;
}

static inline uint8_t *put_number(uint8_t *at, uint64_t value) {
    if (value < 0x80) {
        *at++ = (uint8_t)value;
        return at;
    }
    if (value <= UINT8_MAX) {
        *at++ = 0xcc;
        return put_bytes(at, value, 1);
    }
    if (value <= UINT16_MAX) {
        *at++ = 0xcd;
        return put_bytes(at, value, 2);
    }
    if (value <= UINT32_MAX) {
        *at++ = 0xce;
        return put_bytes(at, value, 4);
    }
    *at++ = 0xcf;
    return put_bytes(at, value, 8);
}

static inline uint8_t *put_array_header(uint8_t *at, uint64_t length) {
    if (length < 16) {
        *at++ = (uint8_t)(0x90 | length);
        return at;
    }
    if (length <= UINT16_MAX) {
        *at++ = 0xdc;
        return put_bytes(at, length, 2);
    }
    *at++ = 0xdd;
    return put_bytes(at, length, 4);
}

/* Of the negative numbers only those that a byte holds. */
static inline uint8_t *put_small_negative(uint8_t *at, int value) {
    *at++ = (uint8_t)(0x100 + value); /* -32 to -1 */
    return at;
}

#endif
