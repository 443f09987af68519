"""The checkpoint interval k from costs and budget; what it means for a crash. Pure.

After CheckFreq (FAST '21), section 4, "Checkpointing policy": the shortest interval in which a save
is finished before the next one starts, and whose overhead stays within the budget p. Durations that
are none (NaN, negative) count as 0.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from dcp_checkfreq.policy.constants import ALIKE
from dcp_checkfreq.policy.costs import Costs

# No interval is longer, whatever was measured: a broken clock must not end checkpointing.
MAX_INTERVAL_STEPS = 1_000_000
# A shorter iteration is taken for a broken measurement.
SHORTEST_ITERATION_S = 1e-6


class Mode(str, enum.Enum):
    """Where the snapshot goes, and whether the next iteration runs meanwhile."""

    GPU = "gpu"  # into free GPU memory, beside the next forward and backward
    CPU = "cpu"  # into host memory, beside the next forward and backward
    BLOCKING = "blocking"  # into host memory inside `after_step`; nothing runs meanwhile

    __str__ = str.__str__


def stall_s(costs: Costs, mode: Mode) -> float:
    """Return how long the training loop stands still for one save, in seconds (To).

    An overlapped copy has until the next weight update: ``max(0, Tc - (Ti - Tw))``, or Tg on the
    GPU. In every mode the start of a save (``call_s``) comes on top.
    """
    hidden_s = max(0.0, _duration(costs.iteration_s) - _duration(costs.update_s))
    if mode is Mode.BLOCKING:
        hidden_s = 0.0
    return _duration(costs.call_s) + max(0.0, _copy_s(costs, mode) - hidden_s)


def finish_s(costs: Costs, mode: Mode) -> float:
    """Return how long a save takes from the start of its copy until it is published, in seconds."""
    on_gpu = _copy_s(costs, mode) if mode is Mode.GPU else 0.0  # and then to the host
    return on_gpu + _duration(costs.snapshot_cpu_s) + _duration(costs.persist_s)


def choose_mode(costs: Costs, headroom: float = ALIKE) -> Mode:
    """Return GPU if the snapshot fits there, with headroom for peaks, and stalls less, else CPU."""
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom must be in [0, 1), got {headroom}")
    if costs.snapshot_gpu_s is None or costs.gpu_total_bytes <= 0:
        return Mode.CPU
    fits = costs.state_bytes <= costs.gpu_free_bytes * (1 - headroom)
    cheaper = stall_s(costs, Mode.GPU) < stall_s(costs, Mode.CPU)
    return Mode.GPU if fits and cheaper else Mode.CPU


def interval_steps(
    costs: Costs, mode: Mode, max_overhead: float, mtbf_s: float | None = None
) -> int:
    """Return k for these costs, ``max(ceil((Tc + Ts - To) / Ti), ceil(To / (p Ti)), 1)``.

    The copy begins after the start of a save, so in the first term To is what stands still for the
    copy. With ``mtbf_s``, mean time between failures of the whole job, see `needed_steps`.
    ValueError for values that cannot be meant, and for mode GPU without ``snapshot_gpu_s``.
    """
    cost_s = stall_s(costs, mode)
    left_s = finish_s(costs, mode) + _duration(costs.call_s) - cost_s
    return needed_steps(cost_s, left_s, costs.iteration_s, max_overhead, mtbf_s)


def needed_steps(
    cost_s: float, left_s: float, iteration_s: float, max_overhead: float, mtbf_s: float | None
) -> int:
    """Return k for saves that cost ``cost_s`` and go on beside the loop for ``left_s``.

    With a failure rate it is not shorter than the one that wastes least.
    """
    shortest = steps_for(left_s, cost_s, iteration_s, max_overhead)
    if mtbf_s is None:
        return shortest
    return max(shortest, least_waste_interval_steps(cost_s, iteration_s, mtbf_s))


def steps_for(left_s: float, cost_s: float, iteration_s: float, max_overhead: float) -> int:
    """Return the smallest k with ``left_s <= k Ti`` and ``cost_s <= p k Ti``, at least 1."""
    if not 0 < max_overhead <= 1:
        raise ValueError(f"max_overhead must be in (0, 1], got {max_overhead}")
    one = _iteration(iteration_s)
    to_finish = _ceil(_duration(left_s) / one)
    to_afford = _ceil(_duration(cost_s) / (max_overhead * one))
    return max(to_finish, to_afford, 1)


def least_waste_interval_steps(cost_per_save_s: float, iteration_s: float, mtbf_s: float) -> int:
    """Return the k that wastes least time on saves and on work lost by failures, to first order.

    A save costs C every k iterations, a failure loses half an interval on average, so the waste is
    ``C / (k Ti) + k Ti / (2 MTBF)``: least at ``k Ti = sqrt(2 C MTBF)`` (Young 1974, Daly 2006).
    """
    check_mtbf(mtbf_s)
    one, cost = _iteration(iteration_s), _duration(cost_per_save_s)
    exact = math.sqrt(2 * cost) * math.sqrt(mtbf_s) / one  # two roots: the product may overflow
    if exact >= MAX_INTERVAL_STEPS:
        return MAX_INTERVAL_STEPS
    low = max(1, math.floor(exact))
    return min(low, low + 1, key=lambda k: cost / (k * one) + k * one / (2 * mtbf_s))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What an interval means for the run."""

    lost_work_s: float  # expected of one failure: half an interval, and the save in flight
    recovery_bound_s: float  # at most this much is computed again after a failure
    overhead: float  # share of training time spent on saves, ``To / (k Ti)``
    # Expected share of wall time that is training and not done twice, without the time to restart;
    # None if the failure rate is not known.
    goodput: float | None


def forecast(
    k: int,
    *,
    iteration_s: float,
    cost_s: float,
    save_s: float,
    longest_save_s: float | None = None,
    gap_steps: int = 0,
    mtbf_s: float | None = None,
) -> Forecast:
    """Return what to expect of a save every ``k`` iterations; to first order in the failure rate.

    A crash loses one interval and the save in flight after it: ``2 k Ti``, or more if a gap does
    not fit into that. The next save waits for the one in flight, so that counts up to k iterations.
    """
    if k < 1:
        raise ValueError(f"an interval has at least one iteration, got {k}")
    one = _iteration(iteration_s)
    interval_s = k * one
    longest_s = _duration(save_s if longest_save_s is None else longest_save_s)
    most_steps = k + max(0, gap_steps) + min(k, _ceil(longest_s / one))
    lost_s = interval_s / 2 + min(_duration(save_s), interval_s)
    overhead = _duration(cost_s) / interval_s
    goodput = None
    if mtbf_s is not None:
        check_mtbf(mtbf_s)
        goodput = max(0.0, 1 - lost_s / mtbf_s) / (1 + overhead)
    return Forecast(lost_s, max(2 * k, most_steps) * one, overhead, goodput)


def check_mtbf(mtbf_s: float) -> None:
    """Raise ValueError unless ``mtbf_s`` is a positive finite number of seconds."""
    if not (math.isfinite(mtbf_s) and mtbf_s > 0):
        raise ValueError(f"mtbf_s must be a positive number of seconds, got {mtbf_s}")


def _copy_s(costs: Costs, mode: Mode) -> float:
    if mode is not Mode.GPU:
        return _duration(costs.snapshot_cpu_s)
    if costs.snapshot_gpu_s is None:
        raise ValueError("mode GPU, but no copy into GPU memory was measured")
    return _duration(costs.snapshot_gpu_s)


def _iteration(measured: float) -> float:
    return max(_duration(measured), SHORTEST_ITERATION_S)


def _duration(measured: float) -> float:
    return min(measured, 1e15) if measured > 0 else 0.0  # NaN is not


def _ceil(steps: float) -> int:
    # 20 iterations that add up to 20.000000001 are 20
    return min(math.ceil(steps - 1e-9 * max(1.0, steps)), MAX_INTERVAL_STEPS)
