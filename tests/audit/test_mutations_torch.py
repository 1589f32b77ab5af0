"""Planted bugs where models, losses, datasets and ranks meet `farthing.torch`: each is noticed by a law."""

import pytest

torch = pytest.importorskip("torch")

from farthing.audit import network_laws  # noqa: E402
from farthing.torch.checks import leftovers, overlap  # noqa: E402
from farthing.torch.gradients import tape  # noqa: E402
from farthing.torch.training import (  # noqa: E402
    collating,
    distributed,
    optim,
    plan,
    randomness,
)
from farthing.torch.training import loop as runs  # noqa: E402


def gradients_of_every_leaf(original):
    def back(self, objective):
        for _, leaf in self._copies:
            leaf.retain_grad()
        torch.autograd.backward(objective)

    return back


def nothing(original):
    return lambda *given, **named: None


def never(original):
    return lambda *given, **named: False


def no_changes(original):
    return lambda before, after: []


def no_leaves(original):
    return lambda value: iter(())


def a_wall_that_lets_through(original):
    return lambda self, *given: None


def attributes_are_left(original):
    return lambda holder, content: None


def tensors_are_left(original):
    return lambda holder, last: original(holder, last)._replace(parts=[])


def the_whole_batch_is_collated(original):
    def read(self, places):
        self._first()
        rows = self._collate([self._dataset[place] for place in places])
        return rows, collating.np.ones(len(places), dtype=bool)

    return read


def a_graph_of_the_data(original):
    return lambda data: (tuple(data), None, len(data[0])) if isinstance(data, tuple) else original(data)


def contents_are_not_compared(original):
    return lambda found: original([(one[0], 0, 1) for one in found])


def forms_are_not_compared(original):
    return lambda found: original([(0, *one[1:]) for one in found])


def no_size(original):
    return ((4, 0, 1.0),) * 0


BUGS = [
    (network_laws.leaves, tape.Tape, "back", gradients_of_every_leaf),
    (network_laws.leaves, leftovers, "_leaves", no_leaves),
    (network_laws.attributes, leftovers, "changes", no_changes),
    (network_laws.attributes, leftovers, "refuse", nothing),
    (network_laws.attributes, leftovers.Wall, "__exit__", a_wall_that_lets_through),
    (network_laws.attributes, leftovers, "_restore", attributes_are_left),
    (network_laws.attributes, leftovers, "_noted", tensors_are_left),
    (network_laws.collating, collating.Reader, "read", the_whole_batch_is_collated),
    (network_laws.collating, collating.Reader, "_refuse_padding", nothing),
    (network_laws.labels, plan, "target_range", nothing),
    (network_laws.refusals, optim, "rehearse", nothing),
    (network_laws.refusals, runs, "one_by_one", nothing),
    (network_laws.refusals, randomness, "_CASES", no_size),
    (network_laws.ranks, distributed, "refuse_different", contents_are_not_compared),
    (network_laws.ranks, distributed, "refuse_different", forms_are_not_compared),
    (network_laws.ranks, distributed, "refuse_different", nothing),
    (network_laws.scores, overlap, "_meet", never),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug[2]}-{bug[3].__name__}")
def test_planted_bugs_are_caught(bug, monkeypatch):
    law, owner, name, changed = bug
    monkeypatch.setattr(owner, name, changed(getattr(owner, name)))
    assert law()


def test_the_real_code_sets_off_no_alarm():
    assert network_laws.brought() == []
