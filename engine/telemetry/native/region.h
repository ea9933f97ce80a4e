/* `Region`: memory for a stream of bytes of which only the newest are kept.
 *
 * The stream is cut into pieces, and each lies in a segment. The segments of pieces that were given
 * up are taken again first: so no more memory is ever touched than was kept at one time, and it is
 * likely to be in a cache, however many bytes have gone through.
 */

#ifndef STEPSCOPE_REGION_H
#define STEPSCOPE_REGION_H

#include <stdatomic.h>
#include <stdint.h>

enum { SEGMENT_BYTES = 2 * 1024 * 1024 }; /* a huge page */

typedef struct {
    _Atomic uint32_t of_piece; /* the segment of a piece, at its number modulo all */
    uint32_t spare;            /* a segment that can be taken, on a stack */
} Slot;

typedef struct Region {
    struct Region *before; /* smaller ones, which a reader may still be in */
    uint64_t capacity;     /* bytes of the stream that can be kept */
    uint8_t *bytes;        /* of the segments */
    void *memory;
    uint64_t num_mapped;
    uint64_t num_segments;
    uint64_t first, end; /* pieces that have a segment */
    Slot slots[];
} Region;

/* NULL: no memory. */
Region *region_open(uint64_t capacity);

/* It and all before it. */
void region_close(Region *region);

/* Everything before a place in the stream is given up. */
void region_give_up(Region *region, uint64_t before);

/* Write where the last write has ended. */
void region_write(Region *region, uint64_t at, const uint8_t *bytes, uint64_t length);

/* Any thread: what has been given up reads as anything, but reads. */
void region_read(const Region *region, uint64_t at, uint8_t *bytes, uint64_t length);

#endif
