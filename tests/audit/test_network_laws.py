"""Guards over networks tell nothing by their replies, and planted bugs by which they would are caught."""

import pytest

pytest.importorskip("torch")

from farthing.audit import network_laws
from farthing.deploy.guard.keeper import Guard
from farthing.deploy.messages.signed import MessageKind, Reason, refuse
from farthing.ledger import answers


@pytest.fixture
def some(monkeypatch):
    """Some neighbours, one draw: enough to see a bug."""

    def take(*places):
        found = [list(network_laws.neighbours())[place] for place in places]
        monkeypatch.setattr(network_laws, "neighbours", lambda: found)
        monkeypatch.setattr(network_laws, "DRAWS", network_laws.DRAWS[:1])

    return take


def test_no_reply_of_a_guard_over_networks_tells_of_these_records(tmp_path, some):
    some(0, 1, 3, -1)
    assert network_laws.replies(str(tmp_path)) == []


@pytest.mark.slow
def test_no_reply_of_a_guard_over_networks_tells_of_a_record(tmp_path):
    assert network_laws.replies(str(tmp_path)) == []


def a_refusal_tells_of_a_class(original):
    def ask(self, question, terms, w, key):
        labels = [record[1] for record in self._attached._records.data[:-1]]
        if len(labels) < 7:
            refuse(Reason.SHAPE, "there are few records")
        return original(self, question, terms, w, key)

    return ask


def fewer_steps_for_fewer_records(original):
    def stepped(self, question, terms, w, key, local):
        value, told = original(self, question, terms, w, key, local)
        return value, told | {"taken": min(told["taken"], len(self._attached._records) - 5)}

    return stepped


def an_answer_is_longer_for_some_records(original):
    def sealed(self, kind, turn, opened, header, body=b""):
        few = kind is MessageKind.ANSWER and len(self._attached._records) < 8
        return original(self, kind, turn, opened, header, body + bytes(4 * few))

    return sealed


BUGS = [
    (Guard, "ask", a_refusal_tells_of_a_class),
    (Guard, "_stepped", fewer_steps_for_fewer_records),
    (Guard, "_sealed", an_answer_is_longer_for_some_records),
    (answers, "refusal", lambda original: lambda error: error),
]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=["refusal", "steps", "length", "failure"])
def test_planted_bugs_are_caught(bug, tmp_path, monkeypatch, some):
    owner, name, changed = bug
    some(0, 3 if owner is answers else 1)
    monkeypatch.setattr(owner, name, changed(getattr(owner, name)))
    if owner is answers:
        from farthing.torch.training.records import Examples

        monkeypatch.setattr(Examples, "within", lambda self, classes, others=(): self)
    assert network_laws.replies(str(tmp_path))
