#include "kept_messages.h"

#include <stdlib.h>
#include <string.h>

bool kept_open(KeptMessages *kept, uint64_t size, uint64_t max_bytes) {
    memset(kept, 0, sizeof *kept);
    kept->size = size;
    kept->max_bytes = max_bytes;
    kept->places = size > SIZE_MAX ? NULL : calloc((size_t)size, sizeof(Place));
    atomic_init(&kept->region, kept->places == NULL ? NULL : region_open(max_bytes));
    return atomic_load(&kept->region) != NULL;
}

void kept_close(KeptMessages *kept) {
    region_close(atomic_load(&kept->region));
    free(kept->places);
}

/* Room for a message larger than all that may be kept. Doubling bounds what the regions before it
 * hold on to. */
static Region *larger_region(Region *region, uint64_t length) {
    Region *larger = region_open(length > 2 * region->capacity ? length : 2 * region->capacity);
    if (larger != NULL) {
        larger->before = region;
    }
    return larger;
}

bool kept_add(KeptMessages *kept, const Topic *topic, const uint8_t *payload, uint64_t length) {
    uint64_t next = atomic_load_explicit(&kept->next, memory_order_relaxed);
    uint64_t oldest = atomic_load_explicit(&kept->oldest, memory_order_relaxed);
    Region *region = atomic_load_explicit(&kept->region, memory_order_relaxed);
    bool is_larger = length > region->capacity;
    if (is_larger) {
        region = larger_region(region, length);
        if (region == NULL) {
            return false;
        }
    }
    uint64_t num_bytes = kept->num_bytes + length;
    while (oldest < next && (next - oldest >= kept->size || num_bytes > kept->max_bytes)) {
        Place *place = &kept->places[oldest % kept->size];
        num_bytes -= atomic_load_explicit(&place->length, memory_order_relaxed);
        oldest++;
    }
    kept->num_bytes = num_bytes;
    /* Given up before it is overwritten: a reader is never told of what is not there any more. */
    atomic_store_explicit(&kept->oldest, oldest, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    if (is_larger) {
        kept->num_written = 0;
        atomic_store_explicit(&kept->region, region, memory_order_release);
    }
    region_give_up(region, kept->num_written - (num_bytes - length));
    region_write(region, kept->num_written, payload, length);
    Place *place = &kept->places[next % kept->size];
    atomic_store_explicit(&place->start, kept->num_written, memory_order_relaxed);
    atomic_store_explicit(&place->length, length, memory_order_relaxed);
    place->topic = *topic;
    kept->num_written += length;
    atomic_store_explicit(&kept->next, next + 1, memory_order_release);
    return true;
}

uint64_t kept_length(const KeptMessages *kept, uint64_t number) {
    const Place *place = &kept->places[number % kept->size];
    return atomic_load_explicit(&place->length, memory_order_relaxed);
}

bool kept_copy(
    const KeptMessages *kept, uint64_t number, Topic *topic, uint8_t *payload, uint64_t length
) {
    const Place *place = &kept->places[number % kept->size];
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
