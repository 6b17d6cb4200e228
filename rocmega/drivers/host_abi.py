"""What the host driver and its runtime tell each other: the structs of hip/host/launch.h."""

from __future__ import annotations

import ctypes

HOST_ABI = 3
CHECK, WATCH_WAITS, PEERS, REPLAY, IN_STEP, KIND_MEMORY = 1, 2, 4, 8, 16, 32
ALL_STAGES = (1 << 64) - 1
HISTORY_BYTES = 56  # of each word, what the checker knows


class Region(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 64),
        ("offset", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("epochs", ctypes.c_void_p),
        ("history", ctypes.c_void_p),
        ("peers", ctypes.c_uint64),
        ("stages", ctypes.c_uint64),
    ]


class Arena(ctypes.Structure):
    _fields_ = [
        ("window", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("regions", ctypes.POINTER(Region)),
        ("count", ctypes.c_uint64),
    ]


class Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("arena", ctypes.POINTER(Arena)),
        ("stages", ctypes.POINTER(ctypes.c_char_p)),
        ("n_stages", ctypes.c_uint32),
        ("serial", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("xcds", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("patience", ctypes.c_double),
        ("stacks", ctypes.c_void_p),
        ("stack_bytes", ctypes.c_uint64),
        ("choices", ctypes.POINTER(ctypes.c_uint64)),
        ("n_choices", ctypes.c_uint64),
        ("record", ctypes.POINTER(ctypes.c_uint64)),
        ("record_room", ctypes.c_uint64),
    ]


class Result(ctypes.Structure):
    _fields_ = [
        ("turns", ctypes.c_uint64),
        ("switches", ctypes.c_uint64),
        ("reports", ctypes.c_uint64),
        ("recorded", ctypes.c_uint64),
        ("seconds", ctypes.c_double),
        ("finished", ctypes.c_uint32),
        ("stuck", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("block", ctypes.c_uint32),
        ("stage", ctypes.c_uint32),
        ("task", ctypes.c_uint32),
        ("expected", ctypes.c_uint32),
        ("seen", ctypes.c_uint32),
        ("report", ctypes.c_char * 1500),
        ("story", ctypes.c_char * 2500),
    ]


def version() -> int:
    sizes = ctypes.sizeof(Launch) << 16 | ctypes.sizeof(Result) << 4 | ctypes.sizeof(Region) // 8
    return (HOST_ABI << 24 | sizes) & 0xFFFFFFFF
