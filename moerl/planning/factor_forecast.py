"""What a publish of factors costs, from shapes alone: bytes, weights that are merged, memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import ParallelConfig
from moerl.layout.spec import ModelSpec
from moerl.planning.layout_check import ITEMSIZE, Spread
from moerl.planning.memory import EngineMemory
from moerl.planning.sync_cost import Forecast, Links
from moerl.weight_sync.adapters.factor_tables import FactorTables
from moerl.weight_sync.held_shards import EngineLayout

_GB = 1e9


@dataclass(frozen=True, slots=True)
class FactorForecast:
    """One publish into one engine."""

    received: Spread  # bytes, by engine rank
    engine_bytes: int  # all ranks of it
    merged: int  # weights that its largest rank computes from W0 and factors; 0 with adapter slots
    largest: int  # of these, of one Hugging Face weight


def factor_forecast(
    spec: ModelSpec, engine: EngineLayout, lora: LoraConfig, dtype: str
) -> FactorForecast:
    """The trainer's layout does not matter: an engine rank gets each element once."""
    tables = FactorTables(spec, ParallelConfig(), engine, lora)
    received, merged, largest = [], [], 0
    for rank in range(engine.tp):
        elements = 0
        for factor in tables.of_engine(rank):
            want = factor.target.parts.wanted[rank]
            elements += factor.target.rank * len(want.cols if factor.is_a else want.rows)
        received.append(ITEMSIZE.get(dtype, 2) * elements)
        every = () if lora.serves_adapters else tables.targets(rank)
        wanted = (target.parts.wanted[rank] for target in every)
        sizes = [len(want.rows) * len(want.cols) for want in wanted]
        merged.append(sum(sizes))
        largest = max([largest, *sizes])
    return FactorForecast(Spread.of(received), sum(received), max(merged), largest)


def merging_memory(
    whole: EngineMemory, found: FactorForecast, lora: LoraConfig, dtype: str, bucket: int
) -> EngineMemory:
    """Of an engine rank that merges: staged factors and their two buckets, the factors, and W0.

    One with adapter slots needs no W0.  whole: with publishes of whole weights.  SGLang's slots,
    and the one tensor at a time that VERIFY computes, are not counted.
    """
    width, factors = ITEMSIZE.get(dtype, 2), round(found.received.high)
    base, stays = width * found.merged, lora.base == "device"
    staged = factors if whole.host == 0 else 2 * min(bucket, factors)
    return replace(
        whole,
        update=factors + staged + (base if stays else 2 * width * found.largest),
        host=(factors if whole.host else 0) + (0 if stays else base),
    )


def describe_factors(found: FactorForecast, whole: Forecast, links: Links) -> str:
    """Lines of `moerl plan`, below those of whole weights."""
    share = found.engine_bytes / whole.engine_bytes
    seconds = found.received.high / links.bytes_per_s
    then = "SGLang's adapter slots of each rank are filled, and its weights stay W0"
    if found.merged:
        then = (
            f"each engine rank computes W0 + s B A: up to {found.merged:,} weights, at VERIFY and "
            "at COMMIT"
        )
    return (
        f"\nfactors alone (lora.send: factors): {found.received.high / _GB:.3g} GB into an engine "
        f"rank, {found.engine_bytes / _GB:.3g} GB into an engine, {share:.2%} of its weights; "
        f"{seconds:.3g} s at line rate\nthen {then}"
    )


def as_json(found: FactorForecast, whole: Forecast) -> dict[str, object]:
    return asdict(found) | {"share": found.engine_bytes / whole.engine_bytes}
