/* `KeptMessages`: the last messages in memory that is used again and again.
 *
 * For two readers: who has missed some is offered as many as the operator wants to be kept, and the
 * sender, who is only a little behind, finds more than that where it is very few.
 *
 * One thread adds and gives up; another may read at the same time without a lock, and learns after
 * reading whether what it read was still there. So whoever adds never waits for who reads.
 */

#ifndef STEPSCOPE_KEPT_MESSAGES_H
#define STEPSCOPE_KEPT_MESSAGES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "region.h"

enum { MAX_TOPIC_BYTES = 15 };

typedef struct {
    uint8_t length;
    char bytes[MAX_TOPIC_BYTES];
} Topic;

/* Where a message lies. */
typedef struct {
    _Atomic uint64_t start; /* bytes that its region had taken before it */
    _Atomic uint64_t length;
    Topic topic;
} Place;

typedef struct {
    uint64_t size;  /* messages at most, ... */
    uint64_t bytes; /* ... and bytes of them, but for the newest message alone */
} Limits;

/* The newest messages that are within some limits. */
typedef struct {
    Limits limits;
    uint64_t first;
    uint64_t num_bytes; /* of the payloads */
} Newest;

typedef struct {
    _Atomic uint64_t next;   /* number of the next message that is added */
    _Atomic uint64_t oldest; /* the first message that is there, for one reader or the other */
    Newest offered, queued;  /* to who has missed some; to the sender */
    uint64_t num_written;    /* to the region so far */
    uint64_t num_places;
    Place *places;           /* of each message, at its number modulo their number */
    _Atomic(Region *) region;
} KeptMessages;

/* All of these are for the thread that adds, unless they say otherwise. */

/* False: no memory. */
bool kept_open(KeptMessages *kept, Limits offered, Limits queued);

/* To be called when nobody reads any more. */
void kept_close(KeptMessages *kept);

/* Keep the next message, and give up the oldest ones that are too much for both beside it.
 *
 * False: there is no memory for one larger than all before; nothing was kept or given up.
 */
bool kept_add(KeptMessages *kept, const Topic *topic, const uint8_t *payload, uint64_t length);

/* Any thread: a message that has been added by now; what it says of one that is given up meanwhile
 * is wrong, and `kept_copy` will say so. */
uint64_t kept_length(const KeptMessages *kept, uint64_t number);

/* Any thread: the topic and `length` bytes of a message, as `kept_length` said.
 *
 * False: it was given up before all was read, and what was read is worth nothing.
 */
bool kept_copy(
    const KeptMessages *kept, uint64_t number, Topic *topic, uint8_t *payload, uint64_t length
);

#endif
