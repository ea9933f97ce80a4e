#define _GNU_SOURCE
#include "sender.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    /* Of zmq.h; its binary interface is fixed. */
    ZMQ_DONTWAIT = 1,
    ZMQ_SNDMORE = 2,
    ZMQ_SRCFD = 2,
    ZMQ_XPUB_NODROP = 69,
    /* Between two looks, at first and where nothing comes. */
    MIN_PAUSE_US = 1000,
    MAX_PAUSE_US = 4000,
    AWAKE_US = 100 * 1000, /* without a message */
    NOTE_US = 50 * 1000,   /* between two looks at who has subscribed */
};

typedef union {
    uint8_t bytes[64];
    void *aligned;
} Message; /* zmq_msg_t */

static int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static void put_number(uint8_t *to, uint64_t number) {
    for (int i = 7; i >= 0; i--) {
        *to++ = (uint8_t)(number >> (8 * i));
    }
}

/* Topic, number and payload; false when a queue has no room for it, and then nobody gets it. */
static bool try_to_send(Sender *sender, const Topic *topic, uint64_t number, Message *payload) {
    const Zmq *zmq = &sender->zmq;
    uint8_t frame[8];
    put_number(frame, number);
    if (zmq->send(sender->socket, topic->bytes, topic->length, ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0) {
        return false;
    }
    /* A message that was begun has room for all of it. */
    zmq->send(sender->socket, frame, sizeof frame, ZMQ_DONTWAIT | ZMQ_SNDMORE);
    zmq->message_send(payload, sender->socket, ZMQ_DONTWAIT);
    return true;
}

/* False: libzmq does not take messages any more. */
static bool send_one(Sender *sender, uint64_t number) {
    const Zmq *zmq = &sender->zmq;
    Message payload;
    Topic topic;
    uint64_t length = kept_length(sender->kept, number);
    if (zmq->message_init_size(&payload, length) != 0) {
        atomic_fetch_add(&sender->num_dropped, 1); /* no memory for a copy */
        return true;
    }
    bool is_sent = false, is_open = true;
    if (!kept_copy(sender->kept, number, &topic, zmq->message_bytes(&payload), length)) {
        atomic_fetch_add(&sender->num_dropped, 1); /* it was given up before its turn came */
    } else if (try_to_send(sender, &topic, number, &payload)) {
        is_sent = true;
    } else if (zmq->error() == EAGAIN) {
        /* NODROP makes a full queue visible, so that it can be counted; the other subscribers are
         * not to miss the message for it. */
        int off = 0, on = 1;
        atomic_fetch_add(&sender->num_dropped, 1);
        zmq->set(sender->socket, ZMQ_XPUB_NODROP, &off, sizeof off);
        is_sent = try_to_send(sender, &topic, number, &payload);
        zmq->set(sender->socket, ZMQ_XPUB_NODROP, &on, sizeof on);
    } else {
        is_open = false;
    }
    if (!is_sent) {
        zmq->message_close(&payload);
    }
    return is_open;
}

/* Remember who has subscribed, as far as there is room. They come from outside: not too many at a
 * time. */
static void note_subscriptions(Sender *sender) {
    const Zmq *zmq = &sender->zmq;
    uint64_t number = atomic_load_explicit(&sender->num_noted, memory_order_relaxed);
    for (int i = 0; i < MAX_SUBSCRIPTIONS; i++) {
        if (number - atomic_load(&sender->num_taken) == MAX_SUBSCRIPTIONS) {
            return;
        }
        Message message;
        zmq->message_init(&message);
        if (zmq->message_receive(&message, sender->socket, ZMQ_DONTWAIT) < 0) {
            zmq->message_close(&message);
            return;
        }
        const char *user = zmq->message_gets(&message, "User-Id");
        int descriptor = zmq->message_get(&message, ZMQ_SRCFD);
        /* One that has left has no name any more. */
        if (user != NULL && descriptor >= 0 && strlen(user) <= MAX_USER_BYTES) {
            Subscription *noted = &sender->subscriptions[number % MAX_SUBSCRIPTIONS];
            strcpy(noted->user, user);
            noted->descriptor = descriptor;
            atomic_store_explicit(&sender->num_noted, ++number, memory_order_release);
        }
        zmq->message_close(&message);
    }
}

/* Until a message comes, or the end. */
static void sleep_until_woken(Sender *sender, uint64_t sent) {
    atomic_store(&sender->sleeps, true);
    if (atomic_load(&sender->kept->next) == sent && !atomic_load(&sender->closing)) {
        char bytes[64];
        while (read(sender->wake_read, bytes, sizeof bytes) < 0 && errno == EINTR) {
        }
    }
    atomic_store(&sender->sleeps, false);
}

static void *run(void *argument) {
    Sender *sender = argument;
#ifdef __linux__
    /* As libzmq's own threads, it never interrupts the one that runs the model. */
    struct sched_param parameter = {0};
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &parameter);
    pthread_setname_np(pthread_self(), "telemetry");
#endif
    uint64_t sent = sender->first;
    int64_t last_us = now_us(), noted_us = 0;
    long pause_us = MIN_PAUSE_US;
    bool is_open = true;
    for (;;) {
        /* Asked for first: what is added before the end is sent. */
        bool is_last = atomic_load(&sender->closing);
        int64_t look_us = now_us();
        if (sender->is_gated && look_us - noted_us >= NOTE_US) {
            noted_us = look_us;
            note_subscriptions(sender);
        }
        uint64_t next = atomic_load_explicit(&sender->kept->next, memory_order_acquire);
        if (sent != next) {
            last_us = look_us;
            pause_us = MIN_PAUSE_US;
        }
        uint64_t oldest = atomic_load_explicit(&sender->kept->oldest, memory_order_relaxed);
        if (sent < oldest) {
            atomic_fetch_add(&sender->num_dropped, oldest - sent);
            sent = oldest;
        }
        while (sent != next && is_open) {
            is_open = send_one(sender, sent++);
        }
        if (is_last || !is_open) {
            return NULL;
        }
        if (look_us - last_us >= AWAKE_US) {
            sleep_until_woken(sender, sent);
            last_us = now_us();
            pause_us = MIN_PAUSE_US;
            continue;
        }
        struct timespec pause = {0, pause_us * 1000};
        nanosleep(&pause, NULL);
        pause_us = pause_us * 2 < MAX_PAUSE_US ? pause_us * 2 : MAX_PAUSE_US;
    }
}

static void wake(Sender *sender) {
    char byte = 0;
    ssize_t written = write(sender->wake_write, &byte, 1);
    (void)written; /* a full pipe wakes it as well */
}

int sender_open(Sender *sender) {
    int ends[2];
    if (pipe(ends) != 0) {
        return errno;
    }
    sender->wake_read = ends[0];
    sender->wake_write = ends[1];
    for (int i = 0; i < 2; i++) {
        fcntl(ends[i], F_SETFD, FD_CLOEXEC);
    }
    fcntl(sender->wake_write, F_SETFL, O_NONBLOCK);
    /* Here: the thread may begin long after messages have come. */
    sender->first = atomic_load(&sender->kept->next);
    sender->process = getpid();
    atomic_init(&sender->sleeps, false);
    atomic_init(&sender->closing, false);
    atomic_init(&sender->num_dropped, 0);
    atomic_init(&sender->num_noted, 0);
    atomic_init(&sender->num_taken, 0);
    /* Signals are for the threads that know what to do with them, but for a crash of its own. */
    sigset_t others, before;
    sigfillset(&others);
    sigdelset(&others, SIGSEGV);
    sigdelset(&others, SIGBUS);
    sigdelset(&others, SIGFPE);
    sigdelset(&others, SIGILL);
    sigdelset(&others, SIGABRT);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    int error = pthread_create(&sender->thread, NULL, run, sender);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        close(sender->wake_read);
        close(sender->wake_write);
    }
    return error;
}

void sender_close(Sender *sender) {
    if (sender->process == getpid()) { /* a fork has our memory, but not our thread */
        atomic_store(&sender->closing, true);
        wake(sender);
        pthread_join(sender->thread, NULL);
    }
    close(sender->wake_read);
    close(sender->wake_write);
}

void sender_note(Sender *sender) {
    atomic_thread_fence(memory_order_seq_cst); /* it is added before we ask */
    if (atomic_load_explicit(&sender->sleeps, memory_order_relaxed) &&
        atomic_exchange(&sender->sleeps, false)) {
        wake(sender);
    }
}

bool sender_take(Sender *sender, Subscription *subscription) {
    uint64_t number = atomic_load_explicit(&sender->num_taken, memory_order_relaxed);
    if (number == atomic_load_explicit(&sender->num_noted, memory_order_acquire)) {
        return false;
    }
    *subscription = sender->subscriptions[number % MAX_SUBSCRIPTIONS];
    atomic_store(&sender->num_taken, number + 1);
    return true;
}
