/* The rows of a step as msgpack, straight from the engine's objects.
 *
 * What `batch_rows.encode_in_python` does, to the byte, for what the engine makes; anything else is
 * refused rather than guessed at. Telemetry names every request in every step, so this is a loop
 * over hundreds of objects between two steps; as Python it takes longer than everything else that
 * telemetry takes of the engine's thread.
 */

#include "wire_rows.h"

#include <structmember.h>

#include <stdbool.h>

#include "msgpack.h"

enum {
    NUM_FIELDS = 7,                 /* of `wire.BatchRow` */
    MAX_ROW_BYTES = 1 + NUM_FIELDS * MAX_INT_BYTES,
    ROW_HEADER = 0x90 | NUM_FIELDS, /* an array of so many */
    DECODE = 1,                     /* `wire.Phase.DECODE` */
    LAST_CHUNK = 1,                 /* `wire.RowFlag.LAST_CHUNK` */
};

/* NULL with an error set where it is no int, or none that a row may hold. */
static uint8_t *put_int(uint8_t *at, PyObject *number) {
    if (!PyLong_Check(number)) {
        PyErr_Format(PyExc_TypeError, "a row holds ints, not %s", Py_TYPE(number)->tp_name);
        return NULL;
    }
    unsigned long long value = PyLong_AsUnsignedLongLong(number); /* negative: OverflowError */
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    return put_number(at, value);
}

/* Where instances of a class with __slots__ keep an attribute; -1 with an error set. */
static Py_ssize_t offset_of(PyObject *type, const char *name) {
    PyObject *descriptor = PyObject_GetAttrString(type, name);
    if (descriptor == NULL) {
        return -1;
    }
    Py_ssize_t offset = -1;
    if (Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) {
        PyMemberDef *member = ((PyMemberDescrObject *)descriptor)->d_member;
        if (member->type == T_OBJECT_EX) {
            offset = member->offset;
        }
    }
    Py_DECREF(descriptor);
    if (offset < 0) {
        PyErr_Format(PyExc_TypeError, "%s is no slot", name);
    }
    return offset;
}

/* Of the last class that was asked about, which there is only one of. */
static struct {
    PyObject *type;
    Py_ssize_t id_at;
    Py_ssize_t table_at;
} known;

static bool know(PyObject *type) {
    if (known.type == type) {
        return true;
    }
    Py_ssize_t id_at = offset_of(type, "request_id");
    Py_ssize_t table_at = id_at < 0 ? -1 : offset_of(type, "block_table");
    if (table_at < 0) {
        return false;
    }
    known.id_at = id_at;
    known.table_at = table_at;
    Py_XSETREF(known.type, Py_NewRef(type)); /* last: whatever the one before it ends with may run */
    return true;
}

static PyObject *slot(PyObject *object, Py_ssize_t offset) {
    PyObject *value = *(PyObject **)((char *)object + offset);
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "a slot of the request is empty");
    }
    return value; /* borrowed */
}

/* A decode: one token, behind those that were computed. */
static uint8_t *put_decode(uint8_t *at, PyObject *row) {
    PyObject *request = PyTuple_GET_ITEM(row, 0);
    if ((PyObject *)Py_TYPE(request) != known.type) {
        PyErr_Format(PyExc_TypeError, "a row is of a request, not %s", Py_TYPE(request)->tp_name);
        return NULL;
    }
    PyObject *request_id = slot(request, known.id_at);
    PyObject *block_table = slot(request, known.table_at);
    if (request_id == NULL || block_table == NULL) {
        return NULL;
    }
    if (!PyList_Check(block_table)) {
        PyErr_SetString(PyExc_TypeError, "a block table is a list");
        return NULL;
    }
    *at++ = ROW_HEADER;
    at = put_int(at, request_id);
    if (at == NULL) {
        return NULL;
    }
    *at++ = DECODE;
    at = put_int(at, PyTuple_GET_ITEM(row, 2)); /* start */
    if (at == NULL) {
        return NULL;
    }
    *at++ = 1; /* num_tokens */
    *at++ = 0; /* num_cached_tokens */
    at = put_number(at, (uint64_t)PyList_GET_SIZE(block_table));
    *at++ = LAST_CHUNK;
    return at;
}

/* Any other row, as `describe` puts it. */
static uint8_t *put_described(uint8_t *at, PyObject *row, PyObject *describe) {
    PyObject *fields = PyObject_CallOneArg(describe, row);
    if (fields == NULL) {
        return NULL;
    }
    if (!PyTuple_Check(fields) || PyTuple_GET_SIZE(fields) != NUM_FIELDS) {
        PyErr_Format(PyExc_TypeError, "a row must be a tuple of %d", (int)NUM_FIELDS);
        Py_DECREF(fields);
        return NULL;
    }
    *at++ = ROW_HEADER;
    for (Py_ssize_t i = 0; i < NUM_FIELDS && at != NULL; i++) {
        at = put_int(at, PyTuple_GET_ITEM(fields, i));
    }
    Py_DECREF(fields);
    return at;
}

PyObject *encode_batch(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 4 || !PyList_Check(args[0]) || !PyType_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "encode_batch(rows: list, ordinary, request_type, describe)");
        return NULL;
    }
    PyObject *rows = args[0], *ordinary = args[1], *describe = args[3];
    if (!know(args[2])) {
        return NULL;
    }
    Py_ssize_t num_rows = PyList_GET_SIZE(rows);
    PyObject *payload =
        PyBytes_FromStringAndSize(NULL, MAX_HEADER_BYTES + num_rows * MAX_ROW_BYTES);
    if (payload == NULL) {
        return NULL;
    }
    uint8_t *begin = (uint8_t *)PyBytes_AS_STRING(payload);
    uint8_t *at = put_array_header(begin, (uint64_t)num_rows);
    for (Py_ssize_t i = 0; i < num_rows; i++) {
        if (i >= PyList_GET_SIZE(rows)) { /* `describe` may do what it likes */
            PyErr_SetString(PyExc_RuntimeError, "the rows changed while they were encoded");
            goto failed;
        }
        PyObject *row = PyList_GET_ITEM(rows, i);
        if (!PyTuple_Check(row) || PyTuple_GET_SIZE(row) < 3) {
            PyErr_SetString(PyExc_TypeError, "a row is a ScheduledRow");
            goto failed;
        }
        if (PyTuple_GET_ITEM(row, 1) == ordinary) {
            at = put_decode(at, row);
        } else {
            Py_INCREF(row);
            at = put_described(at, row, describe);
            Py_DECREF(row);
        }
        if (at == NULL) {
            goto failed;
        }
    }
    _PyBytes_Resize(&payload, (Py_ssize_t)(at - begin)); /* NULL with an error set if it fails */
    return payload;

failed:
    Py_DECREF(payload);
    return NULL;
}
