/* The rows of `wire_rows.py` as msgpack: those of requests (`batch_rows.py`) and those of blocks
 * (`block_pool.py`).
 */

#include "wire_rows.h"

PyDoc_STRVAR(
    encode_batch_doc,
    "encode_batch(rows, ordinary, request_type, describe, /)\n--\n\n"
    "Msgpack of the rows of a step (`ScheduledRow`s): `wire.BatchRow`s.\n\n"
    "Rows whose phase is the object `ordinary` are decodes of one token; of the others `describe`\n"
    "makes the fields. `request_type` is the class of the requests.");

PyDoc_STRVAR(
    drain_moves_doc,
    "drain_moves(changed, published, ref_counts, owners, digests, /)\n--\n\n"
    "Msgpack of the blocks that are keys of `changed`, which is empty then: `wire.BlockMove`s.\n\n"
    "`published` is brought up to date; the others are a block's books, by its number.");

PyDoc_STRVAR(
    ends_of_runs_doc,
    "ends_of_runs(published, /)\n--\n\n"
    "Numbers of the blocks where neighbours of one state end, each the first of the next run.");

static PyMethodDef methods[] = {
    {"encode_batch", (PyCFunction)(void (*)(void))encode_batch, METH_FASTCALL, encode_batch_doc},
    {"drain_moves", (PyCFunction)(void (*)(void))drain_moves, METH_FASTCALL, drain_moves_doc},
    {"ends_of_runs", (PyCFunction)ends_of_runs, METH_O, ends_of_runs_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "stepscope.engine.protocol._wire_rows",
    .m_doc = "What a step says of each request and each block, as msgpack.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__wire_rows(void) { return PyModuleDef_Init(&definition); }
