"""Every public name says what it takes and shows how it is used, in numpydoc sections with an example."""

import inspect

import pytest

import farthing as ft
from farthing.accounting import filters

PUBLIC = {name: getattr(ft, name) for name in ft.__all__ if not inspect.ismodule(getattr(ft, name))}
PUBLIC |= {rule.__name__: rule for rule in filters.FILTERS.values()}
UNDOCUMENTED = {  # names that lack a section still: this set may shrink and must not grow
    "AdaSSP",
    "DPAGD",
    "DPSGD",
    "Descent",
    "FunctionalMechanism",
    "LeastSquares",
    "LinearRegression",
    "LinearSVC",
    "LogisticRegression",
    "Majority",
    "NoisyGradient",
    "NonPrivate",
    "ObjectivePerturbation",
    "OutputPerturbation",
    "PCA",
    "PrivGene",
    "SGDAdv",
    "SufficientStatistics",
    "audit_mechanism",
}


def takes_any(found):
    """Whether a function or a class takes parameters; enumerations and exceptions do not count."""
    if isinstance(found, type) and issubclass(found, BaseException | str):
        return False
    return bool(inspect.signature(found).parameters)


def sections(found):
    return {
        line.strip()
        for line, rule in zip(*[(inspect.getdoc(found) or "").splitlines()[n:] for n in (0, 1)], strict=False)
        if rule.strip() and set(rule.strip()) == {"-"}
    }


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_says_what_it_takes_and_has_an_example(name):
    found = PUBLIC[name]
    missing = {"Examples"} - sections(found)
    if takes_any(found) and not sections(found) & {"Parameters", "Attributes"}:
        missing.add("Parameters")
    if ">>> " not in (found.__doc__ or ""):
        missing.add("an example")
    if name in UNDOCUMENTED:
        pytest.skip(f"{name} has no {', '.join(sorted(missing)) or 'gap any more: take it from the set'}")
    assert not missing


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_parameter_is_named_in_the_docstring(name):
    found = PUBLIC[name]
    if name in UNDOCUMENTED or not takes_any(found):
        pytest.skip("without parameters, or not documented yet")
    text = inspect.getdoc(found)
    missing = [
        parameter
        for parameter in inspect.signature(found).parameters
        if f"\n{parameter} :" not in text
        and f"\n*{parameter} :" not in text
        and f", {parameter} :" not in text
        and f"\n{parameter}, " not in text
        and f"\n{parameter}\n" not in text
    ]
    assert not missing


def test_a_docstring_begins_with_a_sentence():
    for name in PUBLIC.keys() - UNDOCUMENTED:
        first = inspect.getdoc(PUBLIC[name]).split("\n")[0]
        assert first.endswith("."), name
        assert not first.startswith(("The same", "What ", "Who ")), name
