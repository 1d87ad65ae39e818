# SPDX-License-Identifier: Apache-2.0
"""Jobs for the simulator: drawn from published distributions, or read from a trace."""

from __future__ import annotations

import csv
import io
import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from oncache.core.errors import ConfigError

# Sizes in shares of the fabric and their cumulative probability: those of the vClos authors'
# simulator for 8,192 GPUs (TPU v4 slices, on which they map a public trace).
SIZES: Final = (4, 8, 64, 128, 256, 512, 1024, 2048)
CUMULATIVE: Final = (0.05, 0.10, 0.43, 0.605, 0.729, 0.849, 0.893, 1.0)
SIZES_OF: Final = 8192

SECONDS_MEDIAN: Final = 8000.0
SECONDS_SPREAD: Final = 1.0  # of the logarithm
SECONDS_LEAST, SECONDS_MOST = 1000.0, 100_000.0

# Share of an iteration that is communication when nothing contends, as the authors profiled it:
# ResNet50, BERT, Pangu (three collectives together); VGG16 falls from 25 % at 4 GPUs to 4 % at 96.
SHARES: Final = (0.04, 0.12, 0.35)
VGG: Final = ((4, 0.25), (96, 0.04))


@dataclass(frozen=True)
class Job:
    """``seconds`` is its run time without contention, ``share`` the part that is communication."""

    arrival: float
    gpus: int
    seconds: float
    share: float


def draw(count: int, gpus: int, load: float, rng: random.Random) -> list[Job]:
    """Jobs with exponential arrivals that ask for ``load`` of the GPUs' time on average."""
    sizes = [_size(gpus, rng) for _ in range(count)]
    shapes = [(size, _seconds(rng), _share(size, rng)) for size in sizes]
    demand = sum(size * seconds for size, seconds, _ in shapes) / count
    arrivals = accumulate(rng.expovariate(gpus * load / demand) for _ in range(count))
    return [Job(arrival, *shape) for arrival, shape in zip(arrivals, shapes, strict=True)]


def _size(gpus: int, rng: random.Random) -> int:
    size = SIZES[bisect_left(CUMULATIVE, rng.random())]
    return max(1, size * gpus // SIZES_OF)


def _seconds(rng: random.Random) -> float:
    drawn = rng.lognormvariate(math.log(SECONDS_MEDIAN), SECONDS_SPREAD)
    return min(max(drawn, SECONDS_LEAST), SECONDS_MOST)


def _share(size: int, rng: random.Random) -> float:
    (few, high), (many, low) = VGG
    scale = math.log(max(few, min(size, many)) / few) / math.log(many / few)
    return rng.choice((*SHARES, high * (low / high) ** scale))


def read_trace(text: str) -> list[Job]:
    """Lines ``arrival,gpus,seconds,share``; ConfigError names the line that is wrong."""
    jobs: list[Job] = []
    for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
        if not row or row[0].startswith("#"):
            continue
        jobs.append(_traced(number, row))
    if not jobs:
        raise ConfigError("the trace has no job", hint="lines 'arrival,gpus,seconds,share'")
    return sorted(jobs, key=lambda job: job.arrival)


def _traced(number: int, row: Sequence[str]) -> Job:
    try:
        arrival, gpus, seconds, share = row
        job = Job(float(arrival), int(gpus), float(seconds), float(share))
    except ValueError as error:
        raise ConfigError(
            f"trace line {number}: {','.join(row)}", hint="arrival,gpus,seconds,share"
        ) from error
    if not (job.gpus > 0 and job.seconds > 0 and 0 <= job.share <= 1 and job.arrival >= 0):
        raise ConfigError(f"trace line {number}: out of range", hint="share is from 0 to 1")
    return job
