#define _GNU_SOURCE
#include "region.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Memory that is only taken as it is written to: a ring that never fills costs what is in it. */
Region *region_open(uint64_t capacity) {
    if (capacity > SIZE_MAX / 2) {
        return NULL;
    }
    /* What is kept may begin and end within a piece; and room to begin at a huge page. */
    uint64_t num_segments = (capacity - 1) / SEGMENT_BYTES + 2;
    uint64_t num_mapped = (num_segments + 1) * SEGMENT_BYTES;
    if (num_mapped > SIZE_MAX / 2 || num_segments > UINT32_MAX) {
        return NULL;
    }
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    void *memory = mmap(NULL, (size_t)num_mapped, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) {
        return NULL;
    }
#ifdef MADV_HUGEPAGE
    /* Or there would be a page fault for each message until it is full. */
    madvise(memory, (size_t)num_mapped, MADV_HUGEPAGE);
#endif
    Region *region = calloc(1, sizeof(Region) + (size_t)num_segments * sizeof(Slot));
    if (region == NULL) {
        munmap(memory, (size_t)num_mapped);
        return NULL;
    }
    uintptr_t past = (uintptr_t)memory % SEGMENT_BYTES;
    region->capacity = capacity;
    region->bytes = (uint8_t *)memory + (past == 0 ? 0 : SEGMENT_BYTES - past);
    region->memory = memory;
    region->num_mapped = num_mapped;
    region->num_segments = num_segments;
    for (uint64_t i = 0; i < num_segments; i++) {
        region->slots[i].spare = (uint32_t)(num_segments - 1 - i);
    }
    return region;
}

void region_close(Region *region) {
    while (region != NULL) {
        Region *before = region->before;
        munmap(region->memory, (size_t)region->num_mapped);
        free(region);
        region = before;
    }
}

static uint8_t *segment_of(const Region *region, uint64_t piece) {
    const Slot *slot = &region->slots[piece % region->num_segments];
    uint64_t segment = atomic_load_explicit(&slot->of_piece, memory_order_relaxed);
    return region->bytes + segment * SEGMENT_BYTES;
}

static uint64_t num_spare(const Region *region) {
    return region->num_segments - (region->end - region->first);
}

void region_give_up(Region *region, uint64_t before) {
    while (region->first < before / SEGMENT_BYTES) {
        Slot *slot = &region->slots[region->first % region->num_segments];
        uint32_t segment = atomic_load_explicit(&slot->of_piece, memory_order_relaxed);
        region->slots[num_spare(region)].spare = segment;
        region->first++;
    }
}

static void take_segment(Region *region) {
    uint32_t segment = region->slots[num_spare(region) - 1].spare;
    Slot *slot = &region->slots[region->end % region->num_segments];
    atomic_store_explicit(&slot->of_piece, segment, memory_order_relaxed);
    region->end++;
}

/* What of `length` bytes lies in the piece where they begin. */
static uint64_t in_piece(uint64_t at, uint64_t length) {
    uint64_t to_end = SEGMENT_BYTES - at % SEGMENT_BYTES;
    return length < to_end ? length : to_end;
}

void region_write(Region *region, uint64_t at, const uint8_t *bytes, uint64_t length) {
    while (length > 0) {
        uint64_t piece = at / SEGMENT_BYTES, part = in_piece(at, length);
        if (piece == region->end) {
            take_segment(region);
        }
        memcpy(segment_of(region, piece) + at % SEGMENT_BYTES, bytes, (size_t)part);
        at += part;
        bytes += part;
        length -= part;
    }
}

void region_read(const Region *region, uint64_t at, uint8_t *bytes, uint64_t length) {
    while (length > 0) {
        uint64_t part = in_piece(at, length);
        const uint8_t *segment = segment_of(region, at / SEGMENT_BYTES);
        memcpy(bytes, segment + at % SEGMENT_BYTES, (size_t)part);
        at += part;
        bytes += part;
        length -= part;
    }
}
