"""Which layouts are worth a look for so many processes and a model."""

from __future__ import annotations

from afina.parallel.plan import Plan, divisors
from afina.parallel.refusals import Facts, explained


def layouts(processes: int, facts: Facts) -> list[Plan]:
    """Each stage of ZeRO over all processes, and each size of tensor groups and pipelines that the model takes.

    What of the processes is left beside tensor groups and pipelines shares the optimiser's state out (zero 1).

    Args:
        processes: how many.
        facts: of the model.
    """
    found = [Plan(shard=processes, zero=zero) for zero in (0, 1, 2, 3)] if processes > 1 else []  # type: ignore[arg-type]
    sizes = divisors(processes)
    for tensor in sizes:
        for pipeline in sizes:
            rest, over = divmod(processes, tensor * pipeline)
            if over or tensor * pipeline == 1:
                continue
            found.append(Plan(pipeline, 1, rest, tensor, zero=1 if rest > 1 else 0))
    takes = [plan for plan in found if not any(explained(plan, facts))]
    return takes or [Plan()]
