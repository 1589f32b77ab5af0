"""Load UCI Adult, which comes with the package: 48,842 records, 108 features by a public schema.

>>> adult = load_adult()
>>> adult.X_train.shape, adult.X_test.shape
((32561, 108), (16281, 108))
>>> f"{adult.y.mean():.2%}"
'23.93%'
"""

import hashlib
import lzma
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.data.columns import Categorical, Numeric
from farthing.data.schema import Schema, Table
from farthing.errors import InvalidValue


@dataclass(frozen=True, eq=False)
class Dataset:
    """A table with its encoding by a public schema, and the standard split.

    Attributes
    ----------
    name : str
    table : mapping of str to array
        The columns as they are.
    X : ndarray of shape (records, features)
        The features, in [0, 1].
    y : ndarray of shape (records,)
        The labels, as positions in the target's vocabulary.
    schema : Schema
    split : int
        The first ``split`` records are ``X_train`` and ``y_train``, the others ``X_test`` and ``y_test``.
    """

    name: str
    table: Table = field(repr=False)
    X: NDArray[np.float64] = field(repr=False)
    y: NDArray[np.int64] = field(repr=False)
    schema: Schema = field(repr=False)
    split: int

    @property
    def X_train(self) -> NDArray[np.float64]:
        """Return the features of the training rows."""
        return self.X[: self.split]

    @property
    def y_train(self) -> NDArray[np.int64]:
        """Return the labels of the training rows."""
        return self.y[: self.split]

    @property
    def X_test(self) -> NDArray[np.float64]:
        """Return the features of the test rows."""
        return self.X[self.split :]

    @property
    def y_test(self) -> NDArray[np.int64]:
        """Return the labels of the test rows."""
        return self.y[self.split :]


def _listed(*lines: str) -> tuple[str, ...]:
    return tuple(", ".join(lines).split(", "))


# Vocabularies as listed in UCI's adult.names, with "?" in the three columns UCI says have missing values.
# The lower bounds of age and hours are UCI's extraction rule (AAGE > 16, HRSWK > 0); 90 years, 99 hours and a
# gain of 99,999 are taken as the survey's top codes; the remaining bounds are round numbers.
ADULT = Schema(
    columns=(
        Numeric("age", 17, 90),
        Categorical(
            "workclass",
            _listed(
                "Private, Self-emp-not-inc, Self-emp-inc, Federal-gov, Local-gov, State-gov, Without-pay",
                "Never-worked, ?",
            ),
        ),
        Numeric("fnlwgt", 0, 1_500_000),
        Categorical(
            "education",
            _listed(
                "Bachelors, Some-college, 11th, HS-grad, Prof-school, Assoc-acdm, Assoc-voc, 9th, 7th-8th",
                "12th, Masters, 1st-4th, 10th, Doctorate, 5th-6th, Preschool",
            ),
        ),
        Numeric("education-num", 1, 16),
        Categorical(
            "marital-status",
            _listed(
                "Married-civ-spouse, Divorced, Never-married, Separated, Widowed, Married-spouse-absent",
                "Married-AF-spouse",
            ),
        ),
        Categorical(
            "occupation",
            _listed(
                "Tech-support, Craft-repair, Other-service, Sales, Exec-managerial, Prof-specialty",
                "Handlers-cleaners, Machine-op-inspct, Adm-clerical, Farming-fishing, Transport-moving",
                "Priv-house-serv, Protective-serv, Armed-Forces, ?",
            ),
        ),
        Categorical(
            "relationship", _listed("Wife, Own-child, Husband, Not-in-family, Other-relative, Unmarried")
        ),
        Categorical("race", _listed("White, Asian-Pac-Islander, Amer-Indian-Eskimo, Other, Black")),
        Categorical("sex", _listed("Female, Male")),
        Numeric("capital-gain", 0, 99_999),
        Numeric("capital-loss", 0, 5_000),
        Numeric("hours-per-week", 1, 99),
        Categorical(
            "native-country",
            _listed(
                "United-States, Cambodia, England, Puerto-Rico, Canada, Germany, Outlying-US(Guam-USVI-etc)",
                "India, Japan, Greece, South, China, Cuba, Iran, Honduras, Philippines, Italy, Poland",
                "Jamaica, Vietnam, Mexico, Portugal, Ireland, France, Dominican-Republic, Laos, Ecuador",
                "Taiwan, Haiti, Columbia, Hungary, Guatemala, Nicaragua, Scotland, Thailand, Yugoslavia",
                "El-Salvador, Trinadad&Tobago, Peru, Hong, Holand-Netherlands, ?",
            ),
        ),
    ),
    target=Categorical("class", ("<=50K", ">50K")),
    checked_by="farthing: from the public code book of the data set (UCI Machine Learning Repository)",
)


_ADULT_TRAIN = 32_561
ADULT_SHA256 = "223fee11d100db8a286cdffc32c701f73f4b74ad8adcd39fc23a4a6c7ac5a2d3"


def load_adult() -> Dataset:
    """Load UCI Adult, the 1994 US census extract: does a person earn more than $50,000 a year?

    Returns
    -------
    Dataset
        All 48,842 records with their original values, in UCI's order: the 32,561 of adult.data, then the
        16,281 of adult.test. ``y`` is 1 for ">50K". Missing values stay "?".

    Notes
    -----
    Becker, B. and Kohavi, R. (1996), UCI Machine Learning Repository, https://doi.org/10.24432/C5XW20,
    CC BY 4.0. The data comes with the package.

    Examples
    --------
    >>> load_adult().X_test.shape
    (16281, 108)
    """
    packed = lzma.decompress(files("farthing.data").joinpath("datasets", "adult.xz").read_bytes())
    if hashlib.sha256(packed).hexdigest() != ADULT_SHA256:
        raise InvalidValue("datasets/adult.xz does not have the expected checksum; install farthing again")
    table = unpack(packed, ADULT)
    return Dataset("adult", table, ADULT.encode(table), ADULT.encode_target(table), ADULT, split=_ADULT_TRAIN)


def unpack(packed: bytes, schema: Schema) -> dict[str, NDArray[Any]]:
    """Read a table of whole numbers and categories from the form tools/build_adult.py writes.

    Columns follow each other, the target last. A column is stored as `byte_planes` planes of one byte per
    record, the lowest byte first: of the number itself, or of its position in the vocabulary.
    """
    columns = [one for one in (*schema.columns, schema.target) if isinstance(one, Numeric | Categorical)]
    planes = np.frombuffer(packed, dtype=np.uint8).reshape(sum(map(byte_planes, columns)), -1)
    table: dict[str, NDArray[Any]] = {}
    start = 0
    for column in columns:
        stop = start + byte_planes(column)
        places = 256 ** np.arange(stop - start, dtype=np.int64)
        numbers = places @ planes[start:stop].astype(np.int64)
        table[column.name] = numbers if isinstance(column, Numeric) else np.array(column.values)[numbers]
        start = stop
    return table


def byte_planes(column: Numeric | Categorical) -> int:
    """Return the number of bytes for whole numbers up to the bound, or for positions in the vocabulary."""
    largest = int(column.high) if isinstance(column, Numeric) else len(column.values) - 1
    return max(1, (largest.bit_length() + 7) // 8)
