"""A plain CPU for SGLang: no AMX, no sgl_kernel, no CUDA.

Out of tree (`OOT`), because SGLang's built-in CPU platform imports sgl_kernel unconditionally.
Imported by name from SGLang only, see `moerl.engine.plugin.entry_points.activate`.
"""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class PlainCpu(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # untyped
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"  # every fused operation takes its torch path

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_compile_backend(self, mode: object = None) -> str:
        return "eager"
