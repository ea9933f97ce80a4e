/* What telemetry says of each request and each block of a step; see `wire_rows_module.c`. */

#ifndef STEPSCOPE_WIRE_ROWS_H
#define STEPSCOPE_WIRE_ROWS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *encode_batch(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *drain_moves(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *ends_of_runs(PyObject *module, PyObject *published);

#endif
