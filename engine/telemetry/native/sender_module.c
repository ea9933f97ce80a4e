/* `Sender` for Python: see sender.py, which says what its methods do. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <string.h>

#include "kept_messages.h"
#include "sender.h"

typedef struct {
    PyObject ob_base;
    KeptMessages kept;
    Sender sender;
    PyObject *socket; /* not NULL: the thread runs */
} SenderObject;

static void stop(SenderObject *self) {
    PyObject *socket = self->socket;
    if (socket != NULL) {
        self->socket = NULL; /* nobody else ends it meanwhile */
        Py_BEGIN_ALLOW_THREADS
        sender_close(&self->sender);
        Py_END_ALLOW_THREADS
        Py_DECREF(socket);
    }
}

static PyObject *sender_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"size", "max_bytes", "queue_size", "queue_bytes", NULL};
    long long given[4];
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "LLLL", names, &given[0], &given[1], &given[2], &given[3]
        )) {
        return NULL;
    }
    for (int i = 0; i < 4; i++) {
        if (given[i] < 1) {
            PyErr_Format(PyExc_ValueError, "%s is positive", names[i]);
            return NULL;
        }
    }
    Limits offered = {(uint64_t)given[0], (uint64_t)given[1]};
    Limits queued = {(uint64_t)given[2], (uint64_t)given[3]};
    SenderObject *self = (SenderObject *)type->tp_alloc(type, 0); /* zeroed */
    if (self == NULL) {
        return NULL;
    }
    if (!kept_open(&self->kept, offered, queued)) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void sender_dealloc(SenderObject *self) {
    stop(self);
    kept_close(&self->kept);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *sender_start(SenderObject *self, PyObject *args) {
    PyObject *socket, *addresses;
    unsigned long long address;
    int is_gated;
    if (!PyArg_ParseTuple(args, "OKO!p", &socket, &address, &PyTuple_Type, &addresses, &is_gated)) {
        return NULL;
    }
    if (self->socket != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "it sends already");
        return NULL;
    }
    if (PyTuple_GET_SIZE(addresses) != NUM_ZMQ_FUNCTIONS) {
        PyErr_Format(PyExc_ValueError, "%d functions are needed", (int)NUM_ZMQ_FUNCTIONS);
        return NULL;
    }
    uintptr_t functions[NUM_ZMQ_FUNCTIONS];
    for (Py_ssize_t i = 0; i < NUM_ZMQ_FUNCTIONS; i++) {
        functions[i] = (uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(addresses, i));
        if (PyErr_Occurred()) {
            return NULL;
        }
    }
    memcpy(&self->sender.zmq, functions, sizeof functions);
    self->sender.kept = &self->kept;
    self->sender.socket = (void *)(uintptr_t)address;
    self->sender.is_gated = is_gated;
    int error = sender_open(&self->sender);
    if (error != 0) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    self->socket = Py_NewRef(socket);
    Py_RETURN_NONE;
}

static PyObject *sender_stop(SenderObject *self, PyObject *Py_UNUSED(nothing)) {
    stop(self);
    Py_RETURN_NONE;
}

static PyObject *sender_add(SenderObject *self, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 2 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "add(topic: bytes, payload: bytes | bytearray)");
        return NULL;
    }
    Py_ssize_t length = PyBytes_GET_SIZE(args[0]);
    if (length > MAX_TOPIC_BYTES) {
        PyErr_Format(PyExc_ValueError, "a topic has %d bytes at most", (int)MAX_TOPIC_BYTES);
        return NULL;
    }
    Topic topic = {.length = (uint8_t)length};
    memcpy(topic.bytes, PyBytes_AS_STRING(args[0]), (size_t)length);
    Py_buffer payload;
    if (PyObject_GetBuffer(args[1], &payload, PyBUF_SIMPLE) != 0) {
        return NULL;
    }
    bool is_kept = kept_add(&self->kept, &topic, payload.buf, (uint64_t)payload.len);
    PyBuffer_Release(&payload);
    if (!is_kept) {
        return PyErr_NoMemory();
    }
    if (self->socket != NULL) {
        sender_note(&self->sender);
    }
    return PyLong_FromUnsignedLongLong(atomic_load(&self->sender.num_dropped));
}

static PyObject *sender_get(SenderObject *self, PyObject *argument) {
    unsigned long long number = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred()) {
        return NULL;
    }
    /* Whoever adds holds the interpreter's lock, as we do: nothing is given up meanwhile. */
    if (number < self->kept.offered.first || number >= atomic_load(&self->kept.next)) {
        Py_RETURN_NONE;
    }
    uint64_t length = kept_length(&self->kept, number);
    PyObject *payload = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
    if (payload == NULL) {
        return NULL;
    }
    Topic topic;
    kept_copy(&self->kept, number, &topic, (uint8_t *)PyBytes_AS_STRING(payload), length);
    return Py_BuildValue("(Ky#N)", number, topic.bytes, (Py_ssize_t)topic.length, payload);
}

static PyObject *sender_take_subscription(SenderObject *self, PyObject *Py_UNUSED(nothing)) {
    Subscription taken;
    if (self->socket == NULL || !sender_take(&self->sender, &taken)) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(si)", taken.user, taken.descriptor);
}

static PyObject *get_next_sequence(SenderObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(atomic_load(&self->kept.next));
}

static PyObject *get_oldest_sequence(SenderObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(self->kept.offered.first);
}

static PyObject *get_num_bytes(SenderObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(self->kept.offered.num_bytes);
}

static PyObject *get_num_dropped(SenderObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(atomic_load(&self->sender.num_dropped));
}

static PyMethodDef methods[] = {
    {"start", (PyCFunction)sender_start, METH_VARARGS, "start(socket, address, functions, is_gated)"},
    {"stop", (PyCFunction)sender_stop, METH_NOARGS, "stop()"},
    {"add", (PyCFunction)(void (*)(void))sender_add, METH_FASTCALL, "add(topic, payload) -> num_dropped"},
    {"get", (PyCFunction)sender_get, METH_O, "get(sequence) -> (sequence, topic, payload) or None"},
    {"take_subscription", (PyCFunction)sender_take_subscription, METH_NOARGS,
     "take_subscription() -> (user, descriptor) or None"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"next_sequence", (getter)get_next_sequence, NULL, NULL, NULL},
    {"oldest_sequence", (getter)get_oldest_sequence, NULL, NULL, NULL},
    {"num_bytes", (getter)get_num_bytes, NULL, NULL, NULL},
    {"num_dropped", (getter)get_num_dropped, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Keeps the last messages, and sends them on a thread of its own."},
    {Py_tp_new, sender_new},
    {Py_tp_dealloc, sender_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, NULL},
};

static PyType_Spec specification = {
    .name = "stepscope.engine.telemetry._sender.Sender",
    .basicsize = sizeof(SenderObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

static int execute(PyObject *module) {
    PyObject *type = PyType_FromSpec(&specification);
    if (type == NULL) {
        return -1;
    }
    int result = PyModule_AddObjectRef(module, "Sender", type);
    Py_DECREF(type);
    return result;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "stepscope.engine.telemetry._sender",
    .m_doc = "Sends telemetry on a thread of its own; see sender.py.",
    .m_size = 0,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__sender(void) { return PyModuleDef_Init(&definition); }
