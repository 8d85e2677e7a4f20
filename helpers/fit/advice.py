"""From a job to its answer; where it does not fit, the changes that cost least come first, each traced, not guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from helpers.fit import cards
from helpers.fit.answer import Cost, Fit
from helpers.fit.strategies import Estimate, Job, estimate, estimates
from helpers.fit.vocabulary import STRATEGIES, ImpossibleCombination, one_of

GIB = 2**30
Change = tuple[str, Callable[[], Estimate]]  # what to change and, when asked, what the job then needs


def answer(
    job: Job,
    settings: Any,
    strategy: str,
    strategies: Sequence[str],
    *,
    title: str,
    cost: Cost,
    changes: Iterable[Change] = (),
    notes: Sequence[str] = (),
) -> Fit:
    """The job under each strategy against the card that `settings.hardware` names, with advice.

    Raises ImpossibleCombination or UnknownCard, each naming the value and the fix.
    """
    card = cards.of_settings(settings)
    found = estimates_for(job, strategy, strategies)
    return Fit(
        title=title,
        strategy=strategy,
        micro_batch=job.micro_batch,
        accumulation=job.accumulation,
        gpus=job.gpus,
        card=card,
        estimates=found,
        advice=advise(job, strategy, found, card, changes),
        cost=cost,
        notes=notes,
    )


def estimates_for(job: Job, strategy: str, strategies: Sequence[str]) -> dict[str, Estimate]:
    """The strategies' estimates, the one asked for among them; one GPU leaves only what one GPU can do: DDP."""
    wanted = list(dict.fromkeys([*strategies, strategy]))
    for name in wanted:
        one_of("strategy", name, STRATEGIES)
    if strategy == "fsdp2" and job.fsdp2_fault:
        raise ImpossibleCombination(job.fsdp2_fault)
    impossible = {"fsdp2"} if job.fsdp2_fault else set()
    order = [name for name in STRATEGIES if name in wanted and name not in impossible]
    return estimates(job, [name for name in order if name in ("ddp", strategy) or job.gpus > 1])


def advise(
    job: Job,
    strategy: str,
    found: Mapping[str, Estimate],
    card: cards.Card | None,
    changes: Iterable[Change] = (),
) -> list[str]:
    """Lines that say what fits. Without a card: the smallest card for the strategy asked for.

    changes: further changes, cheapest first, tried (so traced) one after the other until one fits.
    """
    asked = found[strategy]
    if card is None:
        smallest = [c for c in cards.CARDS.values() if asked.fits(c)]
        name = STRATEGIES[strategy]
        return [
            f"The smallest card for {name} is {smallest[0].name}" if smallest else f"No card holds this under {name}"
        ]
    if asked.fits(card):
        lines = [f"{STRATEGIES[strategy]} fits on {card.name}, up to micro-batch {asked.largest_micro_batch(card)}"]
        if strategy != "ddp" and "ddp" in found and found["ddp"].fits(card):
            lines.append(f"DDP fits too ({_gib(found['ddp'])}) and communicates least: prefer it")
        return lines
    verdict = "is too tight" if asked.total() <= card.bytes else "does not fit"
    room = f"{_gib(asked)} of {card.memory} GiB, of which {1 - cards.TIGHT:.0%} stay free for fragmentation"
    lines = [f"{STRATEGIES[strategy]} {verdict} on {card.name}: {room}. What to change, cheapest first:"]
    for text, needed in (*_free_changes(job, asked, card, found), *changes):
        each = needed()
        fits = each.fits(card)
        lines.append(f"  {text}: {_gib(each)}, {'fits' if fits else 'does not fit'}")
        if fits:
            return lines
    larger = [c for c in cards.CARDS.values() if asked.fits(c)]
    lines.append(f"  a larger card: {larger[0].name}" if larger else "  no card here holds it unchanged: more GPUs")
    return lines


def _free_changes(job: Job, asked: Estimate, card: cards.Card, found: Mapping[str, Estimate]) -> Iterable[Change]:
    if largest := min(asked.largest_micro_batch(card), job.micro_batch - 1):
        smaller = max(n for n in range(1, largest + 1) if job.micro_batch % n == 0)
        changed = replace(job, micro_batch=smaller, accumulation=job.micro_batch // smaller * job.accumulation)
        text = f"micro-batch {smaller} with accumulation {changed.accumulation}, the same global batch"
        yield text, lambda: estimate(changed, asked.strategy)  # traced: accumulating keeps gradients alive for longer
    for name in ("zero2", "fsdp2", "zero3"):
        if name != asked.strategy and name in found:
            yield f"{STRATEGIES[name]}, more communication", partial(found.__getitem__, name)


def _gib(each: Estimate) -> str:
    return f"{each.total() / GIB:.1f} GiB"
