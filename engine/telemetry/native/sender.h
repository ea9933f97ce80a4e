/* `Sender`: a thread that sends the messages of `KeptMessages` with libzmq.
 *
 * The engine's thread only adds. While messages come often, nobody wakes the sender: it looks for
 * itself, for waking a thread on a core that rests costs more than everything else about a message.
 */

#ifndef STEPSCOPE_SENDER_H
#define STEPSCOPE_SENDER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "kept_messages.h"

/* What is used of libzmq, in the order in which `sender.py` looks it up. */
typedef struct {
    int (*error)(void);
    int (*send)(void *socket, const void *bytes, size_t length, int flags);
    int (*set)(void *socket, int option, const void *value, size_t length);
    int (*message_init)(void *message);
    int (*message_init_size)(void *message, size_t length);
    void *(*message_bytes)(void *message);
    int (*message_send)(void *message, void *socket, int flags);
    int (*message_receive)(void *message, void *socket, int flags);
    const char *(*message_gets)(const void *message, const char *property);
    int (*message_get)(const void *message, int property);
    int (*message_close)(void *message);
} Zmq;

enum {
    NUM_ZMQ_FUNCTIONS = sizeof(Zmq) / sizeof(void (*)(void)),
    MAX_USER_BYTES = 63,
    MAX_SUBSCRIPTIONS = 128, /* that wait to be taken; later ones wait in libzmq */
};

/* Who has subscribed to a socket with a gate. */
typedef struct {
    char user[MAX_USER_BYTES + 1]; /* whose key */
    int descriptor;                /* of the connection */
} Subscription;

typedef struct {
    KeptMessages *kept;
    Zmq zmq;
    void *socket;
    bool is_gated; /* an XPUB socket: subscriptions can be received from it */
    pid_t process; /* that the thread is of */
    pthread_t thread;
    uint64_t first; /* number of the first message that is to be sent */
    int wake_read, wake_write;
    _Atomic bool sleeps; /* and has to be woken */
    _Atomic bool closing;
    _Atomic uint64_t num_dropped; /* messages that at least one subscriber missed */
    Subscription subscriptions[MAX_SUBSCRIPTIONS]; /* at their number modulo that */
    _Atomic uint64_t num_noted, num_taken;
} Sender;

/* Begin to send; everything but `kept`, `zmq`, `socket` and `is_gated` is set here.
 *
 * The socket is the sender's until `sender_close`. Returns 0 or an errno.
 */
int sender_open(Sender *sender);

/* Hand the last messages to libzmq, and end the thread. */
void sender_close(Sender *sender);

/* To be called after each message that was added. */
void sender_note(Sender *sender);

/* The oldest subscription that was not taken yet; false when there is none. */
bool sender_take(Sender *sender, Subscription *subscription);

#endif
