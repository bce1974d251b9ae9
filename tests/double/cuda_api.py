"""`torch.cuda` over the double: the names that Megatron and this project call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

OPS = torch.ops.device_double
MEMORY = 80 * 2**30
SHARES: dict[int, float] = {}  # `set_per_process_memory_fraction`, by device

Where = torch.device | int | str | None


def index_of(device: Where) -> int:
    """Device number; without one the selected device's."""
    if isinstance(device, int):
        return device
    found = None if device is None else torch.device(device).index
    return int(OPS.get_device()) if found is None else found


class Event:
    """A point in a stream's work."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.number = 0  # until it is recorded, which also makes a wait for it do nothing

    def record(self, stream: Stream | None = None) -> None:
        on = stream or current_stream()
        self.number = OPS.record(self.number, on.index, on.cuda_stream)

    def wait(self, stream: Stream | None = None) -> None:
        on = stream or current_stream()
        if self.number:
            OPS.wait_event(on.index, on.cuda_stream, self.number)

    def synchronize(self) -> None:
        OPS.sync_event(self.number, True)

    def query(self) -> bool:
        """Done at once; the host knows it then, without having waited."""
        OPS.sync_event(self.number, False)
        return True

    def elapsed_time(self, _other: Event) -> float:
        return 0.0


class Stream:
    """A queue of work on a device.  The default one has number 0 and waits for no other."""

    _made = 0

    def __init__(self, device: Where = None, priority: int = 0, number: int | None = None) -> None:
        if number is None:
            Stream._made += 1
            number = Stream._made
        self.cuda_stream = self.stream_id = number
        self.index, self.device = index_of(device), torch.device("cuda", index_of(device))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        OPS.sync_stream(self.index, self.cuda_stream, True)

    def query(self) -> bool:
        OPS.sync_stream(self.index, self.cuda_stream, False)
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.index, self.cuda_stream) == (
            other.index,
            other.cuda_stream,
        )

    def __hash__(self) -> int:
        return hash((self.index, self.cuda_stream))


def current_stream(device: Where = None) -> Stream:
    index = index_of(device)
    return Stream(index, number=OPS.get_stream(index))


def set_stream(stream: Stream) -> None:
    OPS.set_stream(stream.index, stream.cuda_stream)


@contextlib.contextmanager
def use_stream(stream: Stream | None) -> Any:
    """`torch.cuda.stream`: select a stream for a block."""
    if stream is None:
        yield
        return
    before = current_stream(stream.index)
    with SelectDevice(stream.index):
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)


class SelectDevice:
    """`torch.cuda.device`: select a device for a block."""

    def __init__(self, device: Where) -> None:
        self.index = index_of(device)

    def __enter__(self) -> None:
        self.before = OPS.get_device()
        OPS.set_device(self.index)

    def __exit__(self, *_error: object) -> None:
        OPS.set_device(self.before)


@dataclass(frozen=True)
class Properties:
    """Of an H100, as far as somebody asks."""

    name: str = "double"
    major: int = 9
    minor: int = 0
    total_memory: int = MEMORY
    multi_processor_count: int = 132
    uuid: str = "GPU-double"
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536


def _nothing() -> Callable[..., None]:
    """A function of its own each time: dynamo keeps a table by function."""
    return lambda *_args, **_kwargs: None


def _bytes(which: int) -> Callable[..., int]:
    return lambda device=None: int(OPS.memory(index_of(device), "")[which])


def _free(device: Where = None) -> int:
    """Bytes that no purpose holds, by a cache of its own."""
    index = index_of(device)
    return MEMORY - sum(OPS.memory(index, purpose)[3] for purpose in OPS.purposes(index))


def _streams() -> dict[str, Any]:
    return {
        "Stream": Stream,
        "Event": Event,
        "stream": use_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(index_of(device), number=0),
        "set_stream": set_stream,
        "synchronize": lambda device=None: OPS.sync_device(index_of(device)),
        "is_current_stream_capturing": lambda: False,
    }


def visible(devices: int) -> list[str]:
    """Numbers of the machine's GPUs, by device number of this process."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(device) for device in range(devices)]


def uuid_of(device: int) -> str:
    return f"GPU-{visible(device + 1)[device]}"


def _devices(devices: int) -> dict[str, Any]:
    return {
        "_lazy_init": _nothing(),
        "init": _nothing(),
        "_lazy_call": lambda call, **_kwargs: call(),
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: len(visible(devices)),
        "current_device": OPS.get_device,
        "set_device": lambda device: OPS.set_device(index_of(device)),
        "device": SelectDevice,
        "get_device_properties": lambda device=None: Properties(uuid=uuid_of(index_of(device))),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "double",
    }


def _memory() -> dict[str, Any]:
    return {
        "memory_allocated": _bytes(0),
        "memory_reserved": _bytes(0),
        "max_memory_allocated": _bytes(1),
        "max_memory_reserved": _bytes(1),
        "reset_peak_memory_stats": lambda device=None: OPS.reset_peak(index_of(device)),
        "mem_get_info": lambda device=None: (_free(device), MEMORY),
        "empty_cache": lambda: OPS.empty_cache(OPS.get_device()),
        "set_per_process_memory_fraction": lambda fraction, device=None: SHARES.update(
            {index_of(device): fraction}
        ),
        "ipc_collect": _nothing(),
        "cudart": Runtime,
    }


class Runtime:
    """`torch.cuda.cudart()`: page-locks memory of this process."""

    @staticmethod
    def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
        OPS.register_host(address, num_bytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        OPS.unregister_host(address)
        return 0


def _random(devices: int) -> dict[str, Any]:
    """The CPU's generator serves: numbers differ from a GPU's."""
    return {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state.cpu()),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": _nothing(),
        "default_generators": [torch.default_generator] * devices,
    }


def _resize(original: Any) -> Any:
    """torch refuses a device storage in a build without CUDA."""

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return original(self, size)  # type: ignore[no-any-return]
        flat = torch.empty(0, dtype=torch.uint8, device=self.device)
        OPS.resize_storage(flat.set_(self, 0, (0,), (1,)), size)
        return self

    return resize_


def replace(devices: int) -> None:
    """Put the double's answers into `torch.cuda`."""
    answers = _streams() | _devices(devices) | _memory() | _random(devices)
    for name, value in answers.items():
        setattr(torch.cuda, name, value)
    places: Any = SimpleNamespace(random=torch.cuda.random, streams=torch.cuda.streams)
    places.random.get_rng_state = answers["get_rng_state"]
    places.random.set_rng_state = answers["set_rng_state"]
    places.streams.Stream, places.streams.Event = Stream, Event
    setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)  # noqa: B010
    record: Any = lambda self, stream: OPS.record_use(self, stream.index, stream.cuda_stream)  # noqa: E731
    setattr(torch.Tensor, "record_stream", record)  # noqa: B010
    setattr(torch.UntypedStorage, "resize_", _resize(torch.UntypedStorage.resize_))  # noqa: B010
