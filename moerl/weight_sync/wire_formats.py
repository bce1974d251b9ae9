"""Formats of a weight on the wire and in the engine: as it is, or quantised with scales.

    WireFormat   every tensor in the engine's dtype
    Fp8Blocks    projections in float8_e4m3fn; 128 x 128 values have one fp32 scale

Plans, cuts, packing and byte counts ask the format and compare no names: a further format is a
class here and its entry in FORMATS (CONTRIBUTING.md lists the checks of the engine).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moerl.core.errors import LayoutError
from moerl.layout.tiles import Box, num_elements

if TYPE_CHECKING:
    from torch import Tensor

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
BLOCK = 128  # rows and columns that share one scale
_PROJECTIONS = ("_proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")


class WireFormat:
    """A weight in the dtype of the engine: no scales, and a cut between any two rows."""

    name = "none"
    quant_method = ""  # of checkpoints that engines serve in this format
    rows = 1  # that a cut keeps together
    scale_suffix = ""  # of the engine's name of the scales
    scale_dtype = "float32"

    def dtype(self, own: str) -> str:
        """Dtype of the values on the wire.  own: of the engine's weight without this format."""
        return own

    def check(self, name: str, shape: Sequence[int], box: Box, dst_box: Box) -> None:
        """Raises LayoutError if the format cannot be cut at this box of a tensor."""

    def scale_box(self, box: Box) -> Box | None:
        """Box of the scales of a box of values; None without scales."""
        return None

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Values and scales of a matrix on the wire."""
        raise NotImplementedError(f"{self.name} has no scales")

    def num_bytes(self, box: Box, own: str) -> int:
        """Bytes of a box of values with its scales."""
        scales = self.scale_box(box)
        size = num_elements(box) * ITEMSIZE[self.dtype(own)]
        return size + (num_elements(scales) * ITEMSIZE[self.scale_dtype] if scales else 0)

    def cut(self, box: Box, dtype: str, limit: int) -> Iterator[Box]:
        """Equal runs of rows, of at most `limit` bytes of values; never less than `rows`."""
        rows, *rest = box
        row_bytes = ITEMSIZE[dtype] * num_elements(tuple(rest))
        most = max(self.rows, limit // max(1, row_bytes) // self.rows * self.rows)
        runs = -(-len(rows) // most)
        step = -(-len(rows) // runs // self.rows) * self.rows
        for first in range(0, len(rows), step):
            yield (rows[first : first + step], *rest)


class Fp8Blocks(WireFormat):
    """The block format of DeepSeek-V3's released weights.

    A piece consists of whole blocks (the last blocks of a tensor may be smaller).  A cut inside a
    block is refused: no sender could compute the block's maximum, and SGLang refuses to build such
    layers as well.
    """

    name, quant_method = "fp8_block", "fp8"
    rows = BLOCK
    scale_suffix = "_scale_inv"  # the scale is the factor, despite its name

    def dtype(self, own: str) -> str:
        return "float8_e4m3fn"

    def check(self, name: str, shape: Sequence[int], box: Box, dst_box: Box) -> None:
        lead = len(dst_box) - len(box)
        whole = len(box) == 2 and all(
            r.step == 1 and r.start % BLOCK == 0 and (r.stop % BLOCK == 0 or r.stop == size)
            for r, size in zip(box, shape, strict=True)
        )
        if not whole or any(r.start % BLOCK for r in dst_box[lead:]):
            raise LayoutError(
                f"{name}: {box} of {tuple(shape)} does not consist of whole {BLOCK} x {BLOCK} "
                "blocks; use fewer ranks on the axis that cuts it, or quantization none"
            )

    def scale_box(self, box: Box) -> Box:
        return tuple(range(r.start // BLOCK, -(-r.stop // BLOCK)) for r in box)

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """[R, C] to float8_e4m3fn [R, C] and fp32 scales [ceil(R/128), ceil(C/128)].

        scale = largest magnitude of the block / 448, value = round(weight / scale); the engine
        multiplies back.  A block depends on its own values only, so quantising a box of whole
        blocks equals quantising the whole tensor and cutting it.  Leading dims of extent 1 are
        dropped.  A block of zeros has scale 1.
        Source: SGLang 0.5.23 reads it in fp8_utils.block_quant_dequant.
        """
        import torch

        matrix = weight.float().reshape(weight.shape[-2:])
        rows, cols = matrix.shape
        padded = torch.nn.functional.pad(matrix, (0, -cols % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [r, 128, c, 128]
        largest = blocks.abs().amax(dim=(1, 3))
        # a tensor: CUDA multiplies with the reciprocal of a number, which rounds otherwise than
        # the CPU
        most = torch.full_like(largest, torch.finfo(torch.float8_e4m3fn).max)  # 448
        scale = torch.where(largest > 0, largest / most, 1.0)
        values = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
        return values[:rows, :cols].to(torch.float8_e4m3fn), scale


PLAIN, FP8_BLOCKS = WireFormat(), Fp8Blocks()
FORMATS = {one.name: one for one in (PLAIN, FP8_BLOCKS)}


def engine_wants(asked: object, model: Mapping[str, Any]) -> str:
    """Name of the format of engines that serve a model folder.

    asked: engine.args.quantization, if any; model: config.json.  Engines keep projections in the
    format of the checkpoint that they load; engines with another format refuse to start.
    """
    stored = model.get("quantization_config") or {}
    methods = asked, stored.get("quant_method")
    found = (one.name for one in FORMATS.values() if one.quant_method in methods)
    return next(found, PLAIN.name)


def format_of(hf: str, quantization: str) -> WireFormat:
    """Projections have the format of the engine; embedding, head, norms, routers, gates are plain.

    hf: Hugging Face name of a tensor.
    """
    return FORMATS[quantization] if hf.endswith(_PROJECTIONS) else PLAIN
