/* The blocks that changed in a step as msgpack, straight from the pool's books, and those of equal
 * state, for snapshots.
 *
 * What `BlockPool.drain_moves` returns, to the byte once it is encoded. A step of a few hundred
 * requests changes some dozens of blocks.
 */

#include "wire_rows.h"

#include <stdbool.h>

#include "msgpack.h"

enum {
    CACHED = -1,    /* `wire.CACHED` */
    EMPTY = -2,     /* `wire.EMPTY` */
    NUM_FIELDS = 3, /* of `wire.BlockMove` */
    MAX_MOVE_BYTES = 1 + NUM_FIELDS * MAX_INT_BYTES,
    MOVE_HEADER = 0x90 | NUM_FIELDS,
    NUM_LISTS = 3, /* ref_counts, owners, digests */
};

/* Owner and references as one number: `block_pool._REF_BITS`, and what is left of 63. */
static const long long REFS = 1LL << 24, OWNERS = 1LL << 39;

/* False with an error set. */
static bool number_of(PyObject *object, long long most, const char *what, long long *number) {
    *number = PyLong_Check(object) ? PyLong_AsLongLong(object) : -1;
    if (*number >= 0 && *number < most) {
        return true;
    }
    if (!PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "%R is no %s", object, what);
    }
    return false;
}

/* Where the next move goes; NULL with an error set. */
static uint8_t *put_move(uint8_t *at, PyObject *key, int64_t *published, PyObject *const *lists) {
    PyObject *ref_counts = lists[0], *owners = lists[1], *digests = lists[2];
    long long block, refs, owner = EMPTY;
    if (!number_of(key, PyList_GET_SIZE(ref_counts), "block", &block) ||
        !number_of(PyList_GET_ITEM(ref_counts, block), REFS, "number of holders", &refs)) {
        return NULL;
    }
    if (refs != 0) {
        if (!number_of(PyList_GET_ITEM(owners, block), OWNERS, "holder", &owner)) {
            return NULL;
        }
    } else if (PyList_GET_ITEM(digests, block) != Py_None) {
        owner = CACHED;
    }
    published[block] = owner * REFS + refs;
    *at++ = MOVE_HEADER;
    at = put_number(at, (uint64_t)block);
    at = owner < 0 ? put_small_negative(at, (int)owner) : put_number(at, (uint64_t)owner);
    return put_number(at, (uint64_t)refs);
}

PyObject *drain_moves(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args) {
    bool fits = num_args == 2 + NUM_LISTS && PyDict_Check(args[0]) && PyByteArray_Check(args[1]);
    Py_ssize_t num_bytes = fits ? PyByteArray_GET_SIZE(args[1]) : 0;
    for (Py_ssize_t i = 2; fits && i < num_args; i++) {
        fits = PyList_Check(args[i]) &&
               (size_t)PyList_GET_SIZE(args[i]) * sizeof(int64_t) == (size_t)num_bytes;
    }
    if (!fits) {
        PyErr_SetString(
            PyExc_TypeError,
            "drain_moves(changed: dict, published: bytearray of 64 bits for each block, three lists with "
            "an entry for each)"
        );
        return NULL;
    }
    PyObject *changed = args[0];
    int64_t *published = (int64_t *)PyByteArray_AS_STRING(args[1]);
    Py_ssize_t num_moves = PyDict_GET_SIZE(changed);
    PyObject *payload =
        PyBytes_FromStringAndSize(NULL, MAX_HEADER_BYTES + num_moves * MAX_MOVE_BYTES);
    if (payload == NULL) {
        return NULL;
    }
    uint8_t *begin = (uint8_t *)PyBytes_AS_STRING(payload);
    uint8_t *at = put_array_header(begin, (uint64_t)num_moves);
    PyObject *key;
    Py_ssize_t position = 0;
    while (PyDict_Next(changed, &position, &key, NULL)) {
        at = put_move(at, key, published, args + 2);
        if (at == NULL) {
            Py_DECREF(payload);
            return NULL;
        }
    }
    PyDict_Clear(changed);
    _PyBytes_Resize(&payload, (Py_ssize_t)(at - begin)); /* NULL with an error set if it fails */
    return payload;
}

PyObject *ends_of_runs(PyObject *Py_UNUSED(module), PyObject *published) {
    if (!PyByteArray_Check(published) || PyByteArray_GET_SIZE(published) % (Py_ssize_t)sizeof(int64_t) != 0) {
        PyErr_SetString(PyExc_TypeError, "ends_of_runs(published: bytearray of 64 bits for each block)");
        return NULL;
    }
    PyObject *ends = PyList_New(0);
    Py_ssize_t num_blocks = PyByteArray_GET_SIZE(published) / (Py_ssize_t)sizeof(int64_t);
    const int64_t *states = (const int64_t *)PyByteArray_AS_STRING(published);
    for (Py_ssize_t i = 1; ends != NULL && i <= num_blocks; i++) {
        if (i < num_blocks && states[i] == states[i - 1]) {
            continue;
        }
        PyObject *end = PyLong_FromSsize_t(i);
        if (end == NULL || PyList_Append(ends, end) != 0) {
            Py_CLEAR(ends);
        }
        Py_XDECREF(end);
    }
    return ends;
}
