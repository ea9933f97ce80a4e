#include "kept_messages.h"

#include <stdlib.h>
#include <string.h>

static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

bool kept_open(KeptMessages *kept, Limits offered, Limits queued) {
    memset(kept, 0, sizeof *kept);
    kept->offered.limits = offered;
    kept->queued.limits = queued;
    uint64_t size = kept->num_places = larger(offered.size, queued.size);
    kept->places = size > SIZE_MAX ? NULL : calloc((size_t)size, sizeof(Place));
    uint64_t capacity = larger(offered.bytes, queued.bytes);
    atomic_init(&kept->region, kept->places == NULL ? NULL : region_open(capacity));
    return atomic_load(&kept->region) != NULL;
}

void kept_close(KeptMessages *kept) {
    region_close(atomic_load(&kept->region));
    free(kept->places);
}

/* Room for a message larger than all that may be kept. Doubling bounds what the regions before it
 * hold on to. */
static Region *larger_region(Region *region, uint64_t length) {
    Region *next = region_open(larger(length, 2 * region->capacity));
    if (next != NULL) {
        next->before = region;
    }
    return next;
}

static Place *place_of(const KeptMessages *kept, uint64_t number) {
    return &kept->places[number % kept->num_places];
}

/* What is left of them once one more is there. */
static void take_in(Newest *newest, const KeptMessages *kept, uint64_t next, uint64_t length) {
    const Limits *limits = &newest->limits;
    newest->num_bytes += length;
    while (newest->first < next &&
           (next - newest->first >= limits->size || newest->num_bytes > limits->bytes)) {
        newest->num_bytes -= kept_length(kept, newest->first++);
    }
}

bool kept_add(KeptMessages *kept, const Topic *topic, const uint8_t *payload, uint64_t length) {
    uint64_t next = atomic_load_explicit(&kept->next, memory_order_relaxed);
    Region *region = atomic_load_explicit(&kept->region, memory_order_relaxed);
    bool is_larger = length > region->capacity;
    if (is_larger) {
        region = larger_region(region, length);
        if (region == NULL) {
            return false;
        }
    }
    take_in(&kept->offered, kept, next, length);
    take_in(&kept->queued, kept, next, length);
    bool is_more = kept->offered.first < kept->queued.first;
    const Newest *held = is_more ? &kept->offered : &kept->queued;
    /* Given up before it is overwritten: a reader never learns of what is not there any more. */
    atomic_store_explicit(&kept->oldest, held->first, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    if (is_larger) {
        kept->num_written = 0;
        atomic_store_explicit(&kept->region, region, memory_order_release);
    }
    region_give_up(region, kept->num_written - (held->num_bytes - length));
    region_write(region, kept->num_written, payload, length);
    Place *place = place_of(kept, next);
    atomic_store_explicit(&place->start, kept->num_written, memory_order_relaxed);
    atomic_store_explicit(&place->length, length, memory_order_relaxed);
    place->topic = *topic;
    kept->num_written += length;
    atomic_store_explicit(&kept->next, next + 1, memory_order_release);
    return true;
}

uint64_t kept_length(const KeptMessages *kept, uint64_t number) {
    return atomic_load_explicit(&place_of(kept, number)->length, memory_order_relaxed);
}

bool kept_copy(
    const KeptMessages *kept, uint64_t number, Topic *topic, uint8_t *payload, uint64_t length
) {
    const Place *place = place_of(kept, number);
    const Region *region = atomic_load_explicit(&kept->region, memory_order_acquire);
    uint64_t start = atomic_load_explicit(&place->start, memory_order_relaxed);
    if (length > region->capacity) {
        return false; /* of another message by now */
    }
    *topic = place->topic;
    region_read(region, start, payload, length);
    atomic_thread_fence(memory_order_acquire);
    return number >= atomic_load_explicit(&kept->oldest, memory_order_relaxed);
}
